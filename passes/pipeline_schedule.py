"""Schedules of a pipeline: which are possible, which rank runs which stage, how many micro-batches a stage holds."""

from collections import Counter
from itertools import zip_longest
from typing import Literal, get_args

from optimus_compiler.passes.base import PassError

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b"]


def check_schedule(schedule: str, ranks: int, virtual_stages: int, micro_batches: int) -> None:
    """Raises PassError, one sentence with the numbers, for a schedule that cannot run."""
    if schedule not in get_args(Schedule):
        raise PassError(f"schedule={schedule!r} is unknown: choose one of {', '.join(get_args(Schedule))}")
    if virtual_stages < 1:
        raise PassError(f"virtual_stages={virtual_stages} must be at least 1")
    if schedule != "interleaved-1f1b" and virtual_stages > 1:
        raise PassError(f"{schedule} runs one stage a rank and virtual_stages is {virtual_stages}: "
                        "choose schedule='interleaved-1f1b', or virtual_stages=1")  # fmt: skip
    if schedule == "interleaved-1f1b" and virtual_stages == 1:
        raise PassError("interleaved-1f1b interleaves several stages a rank and virtual_stages is 1: "
                        "choose virtual_stages=2 or more, or schedule='1f1b'")  # fmt: skip
    if schedule != "gpipe" and micro_batches < ranks:
        raise PassError(f"{schedule} on pp={ranks} needs at least {ranks} micro-batches a step and there are "
                        f"{micro_batches}: raise the global batch size, lower pp, or choose gpipe")  # fmt: skip
    rounds = max(1, micro_batches // ranks)
    if schedule == "interleaved-1f1b" and micro_batches % rounds:
        raise PassError(f"interleaved-1f1b on pp={ranks} takes micro-batches in {rounds} equal rounds, and "
                        f"{micro_batches} cannot be divided so: choose a multiple of {ranks}")  # fmt: skip


def stage_ranks(ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """The coordinate on pp that runs each stage: round and round."""
    return tuple(stage % ranks for stage in range(ranks * virtual_stages))


def in_flight(schedule: str, ranks: int, virtual_stages: int, micro_batches: int) -> tuple[int, ...]:
    """How many micro-batches' activations each stage holds when its rank holds most."""
    most = [0] * (ranks * virtual_stages)
    for rank in range(ranks):
        held: Counter[int] = Counter()
        peak: Counter[int] = Counter()
        for stage, change in actions(schedule, ranks, virtual_stages, micro_batches, rank):
            held[stage] += change
            if held.total() > peak.total():
                peak = held.copy()
        for stage, count in peak.items():
            most[stage] = count
    return tuple(most)


def actions(
    schedule: str, ranks: int, virtual_stages: int, micro_batches: int, rank: int
) -> list[tuple[int, Literal[1, -1]]]:
    """One rank's forwards (stage, 1) and backwards (stage, -1) in order; those of a stage are in micro-batch order."""
    rounds = max(1, micro_batches // ranks)
    per_round = micro_batches // rounds
    total = micro_batches * virtual_stages
    # forward step i is of the chunk (i // per_round) mod v; backward goes through the chunks the other way round
    chunks = [step // per_round % virtual_stages for step in range(total)]
    forwards: list[tuple[int, Literal[1, -1]]] = [(chunk * ranks + rank, 1) for chunk in chunks]
    backwards: list[tuple[int, Literal[1, -1]]] = [((virtual_stages - 1 - c) * ranks + rank, -1) for c in chunks]
    if schedule == "gpipe":
        warmup = total
    elif schedule == "1f1b":
        warmup = min(total, ranks - rank - 1)
    else:
        warmup = min(total, (virtual_stages - 1) * per_round + 2 * (ranks - 1 - rank))
    steady = [a for pair in zip_longest(forwards[warmup:], backwards) for a in pair if a is not None]
    return forwards[:warmup] + steady
