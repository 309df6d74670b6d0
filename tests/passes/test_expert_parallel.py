"""ExpertParallel and ShardOptimizer on an abstract mesh: the collectives in the graph, placements, refusals."""

from typing import Any

import pytest
import torch
from torch import fx, nn

import optimus_compiler as optimus
from optimus_compiler.passes import ExpertParallel, PassError, PassOptions, PassPipeline, default_passes
from optimus_compiler.program import Program
from tests.captured import capture_once
from tests.models.twins import olmo_config, olmoe_config, ours

EP, K, HIDDEN = 2, 2, 24
TOKENS = 2 * 8


def lowered(model: nn.Module, mesh: optimus.Mesh, **options: Any) -> Program:
    program = capture_once(model, sequence_length=8, micro_batch_size=2)
    program.mesh = mesh
    default_passes(mesh, PassOptions(**options)).run(program)
    return program


def communication(program: Program) -> list[tuple[str, str, tuple[int, ...]]]:
    """(operation, group, shape of the first result) of what talks to other ranks in a layer, in order."""
    (layer,) = {id(s.graph): s for s in program.segments if s.kind == "layer"}.values()
    found = []
    for node in layer.graph.graph.nodes:
        name = str(node.target).removesuffix(".default")
        if (name.startswith("_c10d_functional") and "wait" not in name) or "exchange" in name or "_tokens" in name:
            group = next((a for a in node.args if isinstance(a, str) and a != "sum"), "")
            value = node.meta["val"][0] if isinstance(node.meta["val"], tuple | list) else node.meta["val"]
            found.append((name.rpartition(".")[2], group, tuple(value.shape)))
    return found


def test_all_gather_before_and_reduce_scatter_after_and_nothing_else() -> None:
    program = lowered(ours(olmoe_config()), optimus.Mesh.abstract(dp=3, ep=EP))
    assert communication(program) == [
        ("all_gather_into_tensor", "ep", (EP * TOKENS, K)),  # choices
        ("all_gather_into_tensor", "ep", (EP * TOKENS, HIDDEN)),  # hidden states
        ("all_gather_into_tensor", "ep", (EP * TOKENS, K)),  # routing weights
        ("index_tokens", "", (EP * TOKENS * K,)),
        ("reduce_scatter_tensor", "ep", (TOKENS, HIDDEN)),
    ]
    assert program.overflows() == ()  # twice an even share is everything where ep is 2
    for segment in program.segments:
        if segment.kind != "layer":
            assert not any("c10d" in str(node.target) for node in segment.graph.graph.nodes)


def test_all_to_all_sends_rows_to_their_experts() -> None:
    program = lowered(ours(olmoe_config()), optimus.Mesh.abstract(ep=3), dispatch="alltoall", expert_rows=1.5)
    rows = TOKENS * K * 3 // 2
    assert communication(program) == [
        ("plan_exchange", "ep", (TOKENS * K,)),
        ("send_tokens", "ep", (rows, HIDDEN)),
        ("index_tokens", "", (rows,)),
        ("return_tokens", "ep", (TOKENS, HIDDEN)),
    ]
    assert len(program.overflows()) == 2


@pytest.mark.parametrize(
    ("expert_rows", "rows"), [(1.0, 32), (1.01, 33), (2.0, 64), (3.0, 96), (7.5, 96), ("exact", 96)]
)
def test_row_buffers_are_bounded(expert_rows: float, rows: int) -> None:
    program = lowered(ours(olmoe_config()), optimus.Mesh.abstract(ep=3), expert_rows=expert_rows)
    assert communication(program)[3] == ("index_tokens", "", (rows,))
    assert len(program.overflows()) == (2 if rows < 96 else 0)


def test_experts_are_sharded_and_state_goes_to_every_replica() -> None:
    program = lowered(ours(olmoe_config()), optimus.Mesh.abstract(dp=2, ep=EP))
    for name, spec in program.parameters.items():
        is_expert = ".experts." in name
        assert spec.placement == ({"ep": 0} if is_expert else {}), name
        assert spec.local_shape(program.mesh)[0] == spec.shape[0] // (EP if is_expert else 1), name
        assert spec.state == (("dp", "tp") if is_expert else ("dp", "ep", "tp")), name


def test_all_layers_stay_one_function_and_the_pipeline_parses_back() -> None:
    mesh = optimus.Mesh.abstract(ep=EP)
    program = lowered(ours(olmoe_config(num_hidden_layers=4)), mesh)
    assert [s.kind for s in program.segments].count("layer") == 4
    assert len({id(s.graph) for s in program.segments if s.kind == "layer"}) == 1
    pipeline = default_passes(mesh, PassOptions(dispatch="alltoall", expert_rows="exact"))
    assert PassPipeline.parse(str(pipeline)) == pipeline


def test_a_dense_model_uses_ep_ranks_for_data() -> None:
    program = lowered(ours(olmo_config()), optimus.Mesh.abstract(ep=EP))
    assert not any(spec.placement for spec in program.parameters.values())
    (report,) = [r for r in program.history if r.name == "ExpertParallel"]
    assert (report.matches, report.notes) == (0, ("no experts: the ep ranks are further data-parallel ranks",))


def test_one_rank_of_ep_keeps_all_experts() -> None:
    program = capture_once(ours(olmoe_config()), sequence_length=8)
    default_passes(program.mesh, PassOptions()).run(program)
    before = program.node_count()
    report = ExpertParallel().run(program)
    assert (report.matches, report.notes) == (0, ("ep is 1: every rank holds all experts",))
    assert program.node_count() == before
    assert not any(spec.placement for spec in program.parameters.values())


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(PassError, match="has 6 experts, which cannot be divided over ep=4 ranks"):
        lowered(ours(olmoe_config()), optimus.Mesh.abstract(ep=4))


def test_an_unfused_router_is_refused() -> None:
    program = capture_once(ours(olmoe_config()), sequence_length=8)
    program.mesh = optimus.Mesh.abstract(ep=2)
    with pytest.raises(PassError, match=r"has no index_tokens.*run FuseSparseMoE before it"):
        ExpertParallel().run(program)


def test_uniform_routing_counts_tokens_over_the_ranks_of_ep() -> None:
    """Token g = rank * S + t: with 16 tokens a rank and 6 experts, rank 1 begins at expert 16 mod 6."""
    program = lowered(ours(olmoe_config()), optimus.Mesh.abstract(ep=EP), force_uniform_routing=True)
    layer = next(s for s in program.segments if s.kind == "layer")
    remainders = [node for node in layer.graph.graph.nodes if node.target is torch.ops.aten.remainder.Scalar]
    assert len(remainders) == 2  # the router's and the auxiliary loss's
    for node in remainders:
        for rank in (0, 1):
            choice = evaluate(node, {"ep_index": torch.tensor(rank)})
            token = torch.arange(TOKENS) + rank * TOKENS
            assert torch.equal(choice, (token[:, None] + torch.arange(K)) % 6)


def evaluate(node: fx.Node, inputs: dict[str, Any]) -> Any:
    """The value of a node that depends on the named placeholders alone."""
    if node.op == "placeholder":
        return inputs[node.name]
    arguments = fx.node.map_arg(node.args, lambda source: evaluate(source, inputs))
    return node.target(*arguments, **node.kwargs)  # type: ignore[operator]
