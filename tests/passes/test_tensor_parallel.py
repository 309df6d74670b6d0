"""TensorParallel: placements, the collectives that it adds, and what it refuses."""

from collections import Counter
from typing import Any

import pytest

import optimus_compiler as optimus
from optimus_compiler.capture import capture
from optimus_compiler.passes import PassError, PassOptions, PassPipeline, TensorParallel, default_passes
from optimus_compiler.program import Program
from tests.captured import captured, compiled_program
from tests.models.others import other_model

SUM, SCATTER, GATHER = "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"


def collectives(program: Program, kind: str) -> Counter[str]:
    """How often each collective over tp is in a segment of a kind."""
    segment = next(segment for segment in program.segments if segment.kind == kind)
    return Counter(
        node.target._schema.name.partition("::")[2] for node in segment.graph.graph.nodes if "tp" in node.args
    )


def test_placements() -> None:
    program = compiled_program("olmoe", optimus.Mesh.abstract(tp=2, ep=2))
    found = {name.partition("layers.0.")[2] or name: dict(spec.placement) for name, spec in program.parameters.items()
             if "layers.1" not in name}  # fmt: skip
    assert {name: placement for name, placement in found.items() if placement} == {
        "model.embed_tokens.weight": {"tp": 0},
        "self_attn.q_proj.weight": {"tp": 0},
        "self_attn.k_proj.weight": {"tp": 0},
        "self_attn.v_proj.weight": {"tp": 0},
        "self_attn.q_norm.weight": {"tp": 0},
        "self_attn.k_norm.weight": {"tp": 0},
        "self_attn.o_proj.weight": {"tp": 1},
        "mlp.experts.gate_up_proj": {"ep": 0, "tp": 2},
        "mlp.experts.down_proj": {"ep": 0, "tp": 2},
        "lm_head.weight": {"tp": 0},
    }
    dense = compiled_program("olmo", optimus.Mesh.abstract(tp=2)).parameters
    assert [dict(dense[f"model.layers.1.mlp.{name}_proj.weight"].placement) for name in ("gate", "up", "down")] == [
        {"tp": 0}, {"tp": 0}, {"tp": 1}]  # fmt: skip


@pytest.mark.parametrize("kind", ["olmoe", "olmo"])
def test_sums_become_scatters_and_gathers_under_sequence_parallelism(kind: str) -> None:
    """Two sums a layer, and one for each norm of queries and keys; gathers before attention, the MLP and the head."""
    norms = 2 if kind == "olmoe" else 0
    plain = compiled_program(kind, optimus.Mesh.abstract(tp=2))
    assert collectives(plain, "embed") == {SUM: 1}
    assert collectives(plain, "layer") == {SUM: 2 + norms}
    assert collectives(plain, "head") == {SUM: 2, GATHER: 1}  # maximum and sum; logits where they are asked for
    divided = compiled_program(kind, optimus.Mesh.abstract(tp=2), sequence_parallel=True)
    assert collectives(divided, "embed") == {SCATTER: 1}
    assert collectives(divided, "layer") == {GATHER: 2, SCATTER: 2} | ({SUM: norms} if norms else {})
    assert collectives(divided, "head") == {SUM: 2, GATHER: 2}
    for program in (plain, divided):
        assert len({id(segment.graph) for segment in program.segments if segment.kind == "layer"}) == 1
    hidden = divided.example(next(s for s in divided.segments if s.kind == "layer").outputs[0])
    assert tuple(hidden.shape) == (8, 32)  # 16 tokens over 2 ranks


def divide(program: Program, **sizes: int) -> None:
    sequence_parallel = bool(sizes.pop("sequence_parallel", False))
    program.mesh = optimus.Mesh.abstract(**sizes)
    default_passes(program.mesh, PassOptions(sequence_parallel=sequence_parallel)).run(program)


@pytest.mark.parametrize(
    ("settings", "sizes", "sentence"),
    [
        ({}, {"tp": 8}, "self_attn: tp=8 does not divide its 4 attention heads: choose a tp that does"),
        ({"num_key_value_heads": 2}, {"tp": 4}, "self_attn: tp=4 does not divide its 2 key-value heads"),
        ({"intermediate_size": 21}, {"tp": 2}, "does not divide its 21 columns of an expert"),
        ({"vocab_size": 97}, {"tp": 2}, "embed_tokens.weight: tp=2 does not divide its 97 words of the vocabulary"),
        ({"hidden_size": 36, "num_attention_heads": 3, "intermediate_size": 21, "vocab_size": 99},
         {"tp": 3, "sequence_parallel": 1}, "tp=3 does not divide the 16 tokens of a micro-batch"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(settings: dict[str, Any], sizes: dict[str, int], sentence: str) -> None:
    with pytest.raises(PassError, match=sentence):
        divide(captured("olmoe", **settings), **sizes)


def test_attention_that_it_does_not_know_is_refused() -> None:
    """DeepSeek-V3's keys and values come from one compressed projection."""
    program = capture(other_model("DeepSeek-V3", vocab_size=96), sequence_length=8, micro_batch_size=1)
    with pytest.raises(PassError, match=r"self_attn: one matrix makes queries, keys and values"):
        divide(program, tp=2)


def test_nothing_to_divide_is_an_error() -> None:
    program = captured("olmo")
    program.mesh = optimus.Mesh.abstract(tp=2)
    program.segments = [segment for segment in program.segments if segment.kind == "const"]
    with pytest.raises(
        PassError, match="found nothing to divide: it looks for attention, MLPs, experts and vocabulary"
    ):
        TensorParallel().run(program)


def test_the_pass_is_printed_and_read_back() -> None:
    pipeline = PassPipeline((TensorParallel(sequence_parallel=True),))
    assert PassPipeline.parse(str(pipeline)) == pipeline
