"""Shared by the benchmarks: one thread setting for every variant, the interleaved rounds, tables that are kept."""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from bench import tables

Milliseconds = dict[str, float]


@pytest.fixture(autouse=True)
def threads() -> Iterator[int]:
    """OMP_NUM_THREADS threads, one by default: with one, CPU time is what the variant used even on a busy machine."""
    before = torch.get_num_threads()
    count = int(os.environ.get("OMP_NUM_THREADS", "1"))
    torch.set_num_threads(count)
    yield count
    torch.set_num_threads(before)


@pytest.fixture
def interleave(benchmark: Any) -> Callable[..., tuple[Milliseconds, Milliseconds]]:
    """interleaved_medians, once a test."""
    return lambda variants, rounds=9: benchmark.pedantic(interleaved_medians, args=(variants, rounds))


def interleaved_medians(
    variants: dict[str, Callable[[], object]], rounds: int = 9
) -> tuple[Milliseconds, Milliseconds]:
    """Median wall and CPU milliseconds of each variant; a round runs each of them once, after one warm-up.

    Every round starts one variant later: none always runs behind the one that leaves the caches and the heap at their
    worst.
    """
    wall: dict[str, list[float]] = {name: [] for name in variants}
    cpu: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run()
    for number in range(rounds):
        order = list(variants.items())
        first = number % len(order)
        for name, run in order[first:] + order[:first]:
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            run()
            cpu[name].append(1e3 * (time.process_time() - cpu_start))
            wall[name].append(1e3 * (time.perf_counter() - wall_start))
    return (
        {name: statistics.median(times) for name, times in wall.items()},
        {name: statistics.median(times) for name, times in cpu.items()},
    )


@pytest.fixture
def publish(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """publish(name, title, columns, rows): prints a table; under --benchmark-enable also keeps it, in results/."""

    def show(name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        with capsys.disabled():
            tables.show(title, tables.machine(), columns, rows)
        if benchmark.enabled:
            tables.keep(name, title, tables.machine(), columns, rows)

    return show
