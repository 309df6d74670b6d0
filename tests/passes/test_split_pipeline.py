"""SplitPipeline: where it cuts, what travels, what is repeated, what it refuses; and the order of its schedules."""

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules

import optimus_compiler as optimus
from optimus_compiler.cost import parameter_count
from optimus_compiler.explain import explain
from optimus_compiler.passes import PassError, PassOptions, default_passes
from optimus_compiler.passes.pipeline_schedule import check_schedule, in_flight, stage_ranks
from optimus_compiler.passes.split_pipeline import balanced_cuts
from optimus_compiler.program import Program
from tests.captured import captured


def split(
    kind: str, pp: int, layers: int = 2, inputs: tuple[str, ...] = (), tied: bool = False, **options: Any
) -> Program:
    program = captured(kind, layers, inputs, tie_word_embeddings=tied)
    program.mesh = optimus.Mesh.abstract(pp=pp)
    default_passes(program.mesh, PassOptions(**{"micro_batches": 8, **options})).run(program)
    return program


def layers_of(program: Program) -> list[int]:
    return [sum(s.kind == "layer" and s.stage == stage for s in program.segments)
            for stage in range(len(program.stage_ranks))]  # fmt: skip


def test_cuts_are_the_best_of_all() -> None:
    """The costliest part is as cheap as can be, then the squares are least: compared with every way to cut."""
    generator = torch.Generator().manual_seed(0)
    for length, stages in ((5, 2), (7, 3), (9, 4), (6, 6), (4, 1)):
        costs = torch.rand(length, generator=generator).tolist()

        def score(starts: tuple[int, ...], costs: list[float] = costs) -> tuple[float, float]:
            ends = (*starts[1:], len(costs))
            parts = [sum(costs[a:b]) for a, b in zip(starts, ends, strict=True)]
            return round(max(parts), 12), sum(part**2 for part in parts)

        every = [(0, *cut) for cut in combinations(range(1, length), stages - 1)]
        assert score(tuple(balanced_cuts(costs, stages))) == pytest.approx(min(map(score, every)))


def test_stages_hold_all_layers_in_order_and_layers_stay_one_function() -> None:
    program = split("olmoe", pp=3, layers=4)
    order = [segment.stage for segment in program.segments if segment.kind == "layer"]
    assert order == sorted(order)
    assert sum(layers_of(program)) == 4
    assert max(layers_of(program)) - min(layers_of(program)) <= 1
    assert len({id(segment.graph) for segment in program.segments if segment.kind == "layer"}) == 1
    (hidden, *statistics) = (program.example(name) for name in program.carried_into(1))
    assert tuple(hidden.shape) == (2, 8, 32)
    assert [tuple(value.shape) for value in statistics] == [(8,), (8,)]
    assert all(len(program.carried_into(stage)) == 3 for stage in (1, 2))


def test_boundaries_and_virtual_stages() -> None:
    program = split("olmo", pp=2, layers=4, stage_boundaries=(1,))
    assert layers_of(program) == [1, 3]
    program = split("olmo", pp=2, layers=4, stage_boundaries=(4,))
    assert layers_of(program) == [4, 0]
    program = split("olmoe", pp=2, layers=4, schedule="interleaved-1f1b", virtual_stages=2)
    assert program.stage_ranks == (0, 1, 0, 1)
    assert sum(layers_of(program)) == 4
    assert split("olmo", pp=4, layers=2).stage_ranks == (0, 1, 2, 3)  # embed, two layers, head


def test_tied_weights_are_on_two_stages() -> None:
    program = split("olmo", pp=2, layers=4, tied=True)
    stages = {name: spec.stages for name, spec in program.parameters.items()}
    assert stages.pop("model.embed_tokens.weight") == (0, 1)
    assert all(len(own) == 1 for own in stages.values())
    assert program.ranks_of(program.parameters["model.embed_tokens.weight"]) == (0, 1)


@pytest.mark.parametrize("inputs", [("attention_mask",), ("document_ids",), ("document_ids", "position_ids")])
def test_masks_are_made_on_every_stage_and_do_not_travel(inputs: tuple[str, ...]) -> None:
    program = split("olmoe", pp=4, layers=4, inputs=inputs)
    for stage in (1, 2, 3):
        assert len(program.carried_into(stage)) == 3  # hidden states and two statistics
    readers = {segment.stage for segment in program.segments if segment.kind == "layer"}
    makers = {segment.stage for segment in program.segments if inputs[0] in segment.inputs}
    assert readers <= makers


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"micro_batches": 2, "pp": 4}, "1f1b on pp=4 needs at least 4 micro-batches a step and there are 2: raise"),
        ({"schedule": "interleaved-1f1b", "virtual_stages": 2, "micro_batches": 5, "pp": 2}, "5 cannot be divided so"),
        ({"schedule": "interleaved-1f1b", "pp": 2}, "interleaves several stages a rank and virtual_stages is 1"),
        ({"virtual_stages": 2, "pp": 2}, "1f1b runs one stage a rank and virtual_stages is 2"),
        ({"schedule": "zb", "pp": 2}, "schedule='zb' is unknown: choose one of gpipe, 1f1b, interleaved-1f1b"),
        ({"pp": 5}, r"5 stages \(pp=5 x 1\) are more than the embedding, 2 layers and the head"),
        ({"pp": 2, "stage_boundaries": (3,)}, r"stage_boundaries=\[3\] must be 1 rising layer numbers from 1 to 2"),
        ({"pp": 3, "stage_boundaries": (1,)}, "must be 2 rising layer numbers from 1 to 2"),
        ({"pp": 3, "stage_boundaries": (2, 1)}, "must be 2 rising layer numbers from 1 to 2"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PassError, match=sentence):
        split("olmo", **options)


def test_more_stages_than_micro_batches_is_possible_with_gpipe() -> None:
    check_schedule("gpipe", ranks=4, virtual_stages=1, micro_batches=1)


@pytest.mark.parametrize(
    ("name", "kind", "virtual_stages"),
    [
        ("gpipe", schedules.ScheduleGPipe, 1),
        ("1f1b", schedules.Schedule1F1B, 1),
        ("interleaved-1f1b", schedules.ScheduleInterleaved1F1B, 2),
        ("interleaved-1f1b", schedules.ScheduleInterleaved1F1B, 3),
    ],
)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 8), (4, 12)])
def test_in_flight_is_what_torch_does(
    name: str, kind: Any, virtual_stages: int, ranks: int, micro_batches: int
) -> None:
    """Counted from the order of actions that torch's schedule of that name computes."""
    expected = [0] * (ranks * virtual_stages)
    for rank, actions in torch_order(kind, ranks, virtual_stages, micro_batches).items():
        held, most = [0] * len(expected), [0] * len(expected)
        for action in actions:
            if action is not None:
                held[action.stage_index] += 1 if action.computation_type == schedules.FORWARD else -1
                most = held[:] if sum(held) > sum(most) else most
        assert all(stage % ranks == rank for stage, count in enumerate(most) if count)
        expected = [a + b for a, b in zip(expected, most, strict=True)]
    assert in_flight(name, ranks, virtual_stages, micro_batches) == tuple(expected)
    assert stage_ranks(ranks, virtual_stages) == tuple(stage % ranks for stage in range(ranks * virtual_stages))


def torch_order(kind: Any, ranks: int, virtual_stages: int, micro_batches: int) -> dict[int, list[Any]]:
    stages = [SimpleNamespace(stage_index=i * ranks, num_stages=ranks * virtual_stages, group_size=ranks, group_rank=0,
                              is_last=False, submod=None) for i in range(virtual_stages)]  # fmt: skip
    return dict(kind(stages if virtual_stages > 1 else stages[0], micro_batches).pipeline_order)


def test_explain_says_what_each_stage_does() -> None:
    """Layers, parameters, operations, memory with the micro-batches in flight, collectives."""
    program = captured("olmoe", layers=4)
    program.mesh = optimus.Mesh.abstract(pp=2, ep=2, tp=2)
    pipeline = default_passes(program.mesh, PassOptions(micro_batches=4))
    pipeline.run(program)
    rows = [line.split("  ") for line in explain(program, pipeline).splitlines() if " in flight)" in line]
    first, last = ([cell.strip() for cell in row if cell.strip()] for row in rows)
    assert (first[:2], last[:2]) == (["0", "0"], ["1", "1"])
    assert first[2].startswith("embed, 0")
    assert last[2].endswith(", head")
    parameters = sum(int(row[3].replace(",", "")) for row in (first, last))
    assert parameters == sum(parameter_count(program, segment) for segment in program.segments)
    assert first[5].endswith("MiB (2 in flight)")
    assert last[5].endswith("MiB (1 in flight)")
    assert all("all_gather_into_tensor ep: " in row[6] and "all_reduce tp: " in row[6] for row in (first, last))
