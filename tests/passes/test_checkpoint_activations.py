"""CheckpointActivations: what it tags, what it saves, how a budget chooses, and what it refuses."""

from typing import Any

import pytest

import optimus_compiler as optimus
from optimus_compiler.activation_memory import activation_bytes, parse_bytes
from optimus_compiler.passes import CheckpointActivations, PassError, PassPipeline
from optimus_compiler.passes.checkpoint_blocks import block_of
from optimus_compiler.program import Program
from tests.captured import compiled_program


def program_of(kind: str = "olmoe", mesh: optimus.Mesh | None = None, **options: Any) -> Program:
    return compiled_program(kind, mesh or optimus.Mesh.abstract(), layers=4, **options)


def checkpoint(*blocks: str, **options: Any) -> Program:
    return program_of(activation_checkpointing=blocks, **options)


def tags(program: Program) -> dict[str, set[str]]:
    """The targets of a layer's nodes by their tag."""
    found: dict[str, set[str]] = {}
    segment = next(segment for segment in program.segments if segment.kind == "layer")
    for node in segment.graph.graph.nodes:
        if "recompute" in node.meta:
            found.setdefault(node.meta["recompute"].name, set()).add(str(node.target))
    return found


def test_blocks_are_found_by_the_modules_of_a_layer() -> None:
    for kind in ("olmoe", "olmo"):
        segment = next(segment for segment in program_of(kind).segments if segment.kind == "layer")
        blocks = {str(node.target): block_of(node) for node in segment.graph.graph.nodes if block_of(node)}
        assert blocks["aten.scaled_dot_product_attention.default"] == "attention"
        expert = "optimus.grouped_mlp.default" if "optimus.grouped_mlp.default" in blocks else "aten.silu.default"
        assert blocks[expert] == "moe"
        assert "norm" in blocks.values()


def test_routing_attention_and_residuals_are_saved_whatever_is_chosen() -> None:
    for blocks in (("norm",), ("moe",), ("norm", "attention", "moe")):
        saved = tags(checkpoint(*blocks))["MUST_SAVE"]
        assert {"aten.topk.default", "optimus.index_tokens.default", "aten.add.Tensor", "aten.linear.default",
                "aten.scaled_dot_product_attention.default"} <= saved  # fmt: skip
    again = tags(checkpoint("moe"))["MUST_RECOMPUTE"]
    assert "optimus.grouped_mlp.default" in again
    assert not again & {"aten.topk.default", "optimus.index_tokens.default", "aten.linear.default"}
    assert "aten.linear.default" in tags(checkpoint("attention"))["MUST_RECOMPUTE"]
    assert "optimus.grouped_mlp.default" not in tags(checkpoint("norm", "attention"))["MUST_RECOMPUTE"]


def test_gathers_are_replayed_unless_kept() -> None:
    mesh = optimus.Mesh.abstract(ep=2, tp=2)
    gather = "_c10d_functional.all_gather_into_tensor.default"
    for sequence_parallel in (False, True):
        options = {"mesh": mesh, "sequence_parallel": sequence_parallel}
        assert gather in tags(checkpoint("moe", **options))["MUST_RECOMPUTE"]
        kept = tags(checkpoint("moe", keep_gathered=True, **options))
        assert gather in kept["MUST_SAVE"]
        assert gather not in kept["MUST_RECOMPUTE"]
        assert "_c10d_functional.reduce_scatter_tensor.default" in kept["MUST_SAVE"]


def test_layers_stay_one_function_and_each_choice_saves_memory() -> None:
    nothing = activation_bytes(program_of())
    alone = []
    for block in ("norm", "attention", "moe"):
        program = checkpoint(block)
        assert len({id(s.graph) for s in program.segments if s.kind == "layer"}) == 1
        alone.append(activation_bytes(program))
    assert max(alone) < nothing
    assert activation_bytes(checkpoint("norm", "attention", "moe")) < min(alone)


def test_a_budget_takes_the_cheapest_choice_that_fits() -> None:
    """Norms cost no products, so they are first; then layer after layer. The estimate is within the budget."""
    most, least = (activation_bytes(checkpoint(*blocks), 0) for blocks in ((), ("norm", "attention", "moe")))
    previous = -1
    for part in (1.0, 0.9, 0.7, 0.5, 0.3, 0.0):
        budget = int(least + part * (most - least))
        program = program_of(memory_budget=f"{budget} B")
        assert activation_bytes(program, 0) <= budget
        (report,) = [report for report in program.history if report.name == "CheckpointActivations"]
        assert report.matches >= previous
        previous = report.matches
        distinct = {segment.key for segment in program.segments if segment.kind == "layer"}
        assert len({id(s.graph) for s in program.segments if s.kind == "layer"}) == len(distinct) <= 3
    assert most > least > 0
    only_norms = program_of(memory_budget=f"{most - 1} B")
    assert "norm" in only_norms.history[-2].notes[1]
    assert "moe" not in only_norms.history[-2].notes[1]
    with pytest.raises(PassError, match=r"memory_budget='1 KiB': stage 0 holds .* MiB of activations even with every"):
        program_of(memory_budget="1 KiB")


def test_a_budget_holds_for_every_stage_of_a_pipeline() -> None:
    """The first stage holds more micro-batches than the last: it checkpoints more."""
    options: dict[str, Any] = {"mesh": optimus.Mesh.abstract(pp=2), "micro_batches": 4}
    whole = program_of(**options)
    peaks = [activation_bytes(whole, stage) for stage in (0, 1)]
    assert whole.in_flight == (2, 1)
    assert peaks[0] > peaks[1]
    program = program_of(memory_budget=f"{peaks[1]} B", **options)
    assert [activation_bytes(program, stage) <= peaks[1] for stage in (0, 1)] == [True, True]
    by_stage = {s.stage: "recompute" in str([n.meta for n in s.graph.graph.nodes])
                for s in program.segments if s.kind == "layer"}  # fmt: skip
    assert by_stage == {0: True, 1: False}


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PassError, match="names 'mlp': choose from norm, attention, moe"):
        checkpoint("mlp")
    for text in ("8", "GiB", "-1 GiB", "0 MiB", "8 gigabytes"):
        with pytest.raises(ValueError, match="is no size: write a number and a unit, such as '8 GiB'"):
            parse_bytes(text)
    assert parse_bytes("1.5 GiB") == 3 * 2**29


def test_the_pass_is_printed_and_read_back() -> None:
    pipeline = PassPipeline((CheckpointActivations(("norm", "moe"), "8 GiB", keep_gathered=True),))
    assert PassPipeline.parse(str(pipeline)) == pipeline
