"""PassPipeline: order, reports, the text form, and what stops a run."""

from dataclasses import dataclass

import pytest
import torch

from optimus_compiler.mesh import Mesh
from optimus_compiler.passes import (
    Canonicalise,
    FuseLoss,
    Pass,
    PassError,
    PassOptions,
    PassPipeline,
    PassReport,
    default_passes,
)
from optimus_compiler.program import Program, ProgramError
from tests.passes.small import rand, small_program


@dataclass(frozen=True)
class Doubled(Pass):
    """A user's pass: doubles every relu."""

    factor: float = 2.0

    def run(self, program: Program) -> PassReport:
        graph = program.segments[0].graph.graph
        for node in [n for n in graph.nodes if n.target is torch.ops.aten.relu.default]:
            with graph.inserting_after(node):
                product = graph.call_function(torch.ops.aten.mul.Tensor, (node, self.factor))
                product.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(product, delete_user_cb=lambda user: user is not product)  # noqa: B023
        return self.report(1)


@dataclass(frozen=True)
class WrongShape(Pass):
    def run(self, program: Program) -> PassReport:
        node = program.segments[0].results()[0]
        node.meta["val"] = node.meta["val"].reshape(-1)
        return self.report(1)


def test_a_users_pass_reports_nodes_added_and_removed() -> None:
    program = small_program(lambda x: x.relu().exp(), rand(3, 4))
    (report,) = PassPipeline((Doubled(),)).run(program)
    assert (report.name, report.matches, report.added, report.removed) == ("Doubled", 1, 1, 0)
    assert (report.nodes_before, report.nodes_after) == (2, 3)
    assert report.seconds > 0
    assert program.history == [report]
    x = rand(3, 4)
    torch.testing.assert_close(program.segments[0].graph(x)[0], (x.relu() * 2).exp())


def test_text_form_round_trips() -> None:
    pipeline = PassPipeline((Canonicalise(), FuseLoss(logits_limit=7), Doubled(factor=3.5)))
    assert str(pipeline) == "Canonicalise() -> FuseLoss(logits_limit=7) -> Doubled(factor=3.5)"
    assert PassPipeline.parse(str(pipeline)) == pipeline


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Canonicalize()", "there is no pass 'Canonicalize'; the passes are Canonicalise"),
        ("FuseLoss(limit=3)", "FuseLoss has no option 'limit'"),
        ("FuseLoss(", "'FuseLoss\\(' is not a pass"),
        ("FuseLoss", "'FuseLoss' is not a pass"),
        ("FuseLoss(3)", "write Name\\(option=value\\)"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PassPipeline.parse(text)


def test_the_program_is_verified_after_each_pass() -> None:
    program = small_program(lambda x: x.relu(), rand(3, 4))
    with pytest.raises(
        ProgramError, match=r"relu is recorded as torch.float32 \(12,\) and computes torch.float32 \(3, 4\)"
    ):
        PassPipeline((WrongShape(),)).run(program)


def test_an_input_that_nothing_reads_is_an_error() -> None:
    program = small_program(lambda x, y: x.relu(), rand(3), rand(3))
    with pytest.raises(PassError, match="nothing reads the declared input in1"):
        PassPipeline((Canonicalise(),)).run(program)


def test_default_passes_are_a_readable_list() -> None:
    assert (
        str(default_passes(Mesh(), PassOptions()))
        == "Canonicalise() -> CausalMask() -> FuseSparseMoE() -> FuseLoss() -> WidenProducts() -> ShardOptimizer()"
    )
    assert str(default_passes(Mesh(), PassOptions(force_uniform_routing=True))).endswith(
        "-> ForceUniformRouting() -> WidenProducts() -> ShardOptimizer()"
    )
