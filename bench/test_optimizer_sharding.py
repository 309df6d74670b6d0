"""ShardedAdamW at dp=2 x ep=2: state bytes a rank, time of a step and bytes sent, for epso, so and none.

python -m pytest bench/test_optimizer_sharding.py -s
"""

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist

import optimus_compiler as optimus
from optimus_compiler.models import build, from_name
from optimus_compiler.runtime import optimizer as optimizer_module
from optimus_compiler.runtime import reduction as reduction_module
from tests.ranks import Ranks

SHARDINGS = ("epso", "so", "none")
SIZES = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 256, "num_experts": 16, "num_hidden_layers": 4}
ROUNDS = 9


@pytest.fixture
def four_ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.stop()


def measure(dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """For each sharding: state bytes of this rank, bytes it sends a step, and the median seconds of a step."""
    mesh = optimus.Mesh(dp=2, ep=2)
    sent = {"bytes": 0.0}
    _count_bytes(sent)
    steps: dict[str, Any] = {}
    found: dict[str, dict[str, float]] = {}
    for sharding in SHARDINGS:
        compiled = optimus.compile(build(from_name("olmoe-tiny", **SIZES)).to(dtype), mesh, sequence_length=8,
                                   backend="eager")  # fmt: skip
        optimizer = optimus.ShardedAdamW(compiled, lr=1e-4, sharding=sharding, reduce_dtype=dtype)  # type: ignore[arg-type]
        report = optimizer.memory_report()
        found[sharding] = {"state": sum(bucket.master + bucket.moments for bucket in report.buckets)}
        steps[sharding] = (compiled, optimizer)
    times: dict[str, list[float]] = {name: [] for name in SHARDINGS}
    for number in range(ROUNDS + 1):
        order = SHARDINGS[number % 3 :] + SHARDINGS[: number % 3]
        for name in order:
            compiled, optimizer = steps[name]
            for bucket in compiled.buckets:
                bucket.gradients.fill_(1e-3)
            sent["bytes"] = 0.0
            dist.barrier()
            start = time.perf_counter()
            optimizer.step()
            dist.barrier()
            times[name].append(time.perf_counter() - start)
            found[name]["sent"] = sent["bytes"]
            optimizer.zero_grad()
    for name in SHARDINGS:
        found[name]["seconds"] = median(times[name][1:])
        found[name]["ratio"] = median(t / e for t, e in zip(times[name][1:], times["epso"][1:], strict=True))
    return found


def _count_bytes(sent: dict[str, float]) -> None:
    """Adds up what a rank sends in each collective of a ring: (n-1)/n of the data, twice that for an all-reduce."""

    def counted(module: Any, name: str, data: int, factor: int) -> None:
        inner = getattr(module, name)

        def outer(*arguments: Any) -> Any:
            group = arguments[-1]
            if group is not None:
                n = dist.get_world_size(group)
                sent["bytes"] += factor * arguments[data].nbytes * (n - 1) / n
            return inner(*arguments)

        setattr(module, name, outer)

    counted(reduction_module, "reduce_scatter", 0, 1)
    counted(reduction_module, "all_reduce", 0, 2)
    counted(optimizer_module, "all_gather", 0, 1)
    inner = reduction_module.dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        if keywords.get("async_op"):  # sharding="none" reduces whole buckets
            n = dist.get_world_size(keywords["group"])
            sent["bytes"] += 2 * tensor.nbytes * (n - 1) / n
        return inner(tensor, *arguments, **keywords)

    reduction_module.dist.all_reduce = all_reduce


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sharding(four_ranks: Ranks, dtype: torch.dtype) -> None:
    found = four_ranks.run(4, measure, dtype, seconds=900)[0]
    print(f"\n{dtype}, dp=2 x ep=2, 4 processes on {torch.get_num_threads()} thread each")
    print("sharding  state bytes a rank  sent a step  step ms  step / epso (median of pairs)")
    for name, row in found.items():
        print(
            f"{name:8}  {row['state']:>18,.0f}  {row['sent']:>11,.0f}  {1e3 * row['seconds']:7.0f}  {row['ratio']:.2f}"
        )
