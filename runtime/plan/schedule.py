"""The time of a pipeline's schedule, action by action: a rank goes on when it is free and its input has arrived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from optimus_compiler.passes.pipeline_schedule import actions, stage_ranks


@dataclass(frozen=True)
class Action:
    """What a rank does from start to end, in seconds since the step began."""

    rank: int
    stage: int
    micro_batch: int
    forward: bool
    start: float
    end: float


def run_schedule(
    schedule: str,
    ranks: int,
    virtual_stages: int,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: float,
) -> list[Action]:
    """All actions of a step, in the order of their ends on each rank.

    forward, backward: seconds of each stage for a micro-batch. transfer: seconds from one stage to the next, during
    which both may compute. A single rank runs forward and backward of each micro-batch in turn.
    """
    stages = ranks * virtual_stages
    at = stage_ranks(ranks, virtual_stages)
    queues = [list(reversed(_order(schedule, ranks, virtual_stages, micro_batches, rank))) for rank in range(ranks)]
    counts: list[Counter[tuple[int, bool]]] = [Counter() for _ in range(ranks)]
    free = [0.0] * ranks
    done: dict[tuple[int, int, bool], float] = {}
    found: list[Action] = []
    while any(queues):
        before = len(found)
        for rank, queue in enumerate(queues):
            while queue:
                stage, is_forward = queue[-1]
                number = counts[rank][stage, is_forward]
                ready = _ready(done, stage, number, is_forward, stages, transfer)
                if ready is None:
                    break
                queue.pop()
                counts[rank][stage, is_forward] += 1
                start = max(free[rank], ready)
                end = start + (forward if is_forward else backward)[stage]
                free[rank] = done[stage, number, is_forward] = end
                found.append(Action(at[stage], stage, number, is_forward, start, end))
        assert len(found) > before, "a schedule that waits for itself"
    return found


def _order(schedule: str, ranks: int, virtual_stages: int, micro_batches: int, rank: int) -> list[tuple[int, bool]]:
    if ranks * virtual_stages == 1:
        return [(0, True), (0, False)] * micro_batches
    return [(stage, change == 1) for stage, change in actions(schedule, ranks, virtual_stages, micro_batches, rank)]


def _ready(
    done: dict[tuple[int, int, bool], float], stage: int, number: int, forward: bool, stages: int, transfer: float
) -> float | None:
    """When the input of an action is there; None while nobody has computed it."""
    if forward:
        return 0.0 if stage == 0 else _after(done.get((stage - 1, number, True)), transfer)
    if stage == stages - 1:
        return done.get((stage, number, True))
    return _after(done.get((stage + 1, number, False)), transfer)


def _after(moment: float | None, transfer: float) -> float | None:
    return None if moment is None else moment + transfer
