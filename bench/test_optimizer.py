"""ShardedAdamW at dp=2 x ep=2: state, time and bytes sent for epso, so and none; in one process beside torch's AdamW.

python -m pytest bench/test_optimizer.py -s
"""

import time
from collections.abc import Callable, Iterator
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


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


@DTYPES
def test_sharding(dtype: torch.dtype, four_ranks: Ranks, benchmark: Any, publish: Callable[..., None]) -> None:
    found = benchmark.pedantic(four_ranks.run, args=(4, measure, dtype), kwargs={"seconds": 900})[0]
    short = str(dtype).removeprefix("torch.")
    publish(
        f"optimizer-sharding-{short}",
        f"Optimizer step with reduction and gathering, dp=2 x ep=2, {short}; medians of {ROUNDS} interleaved rounds",
        ["sharding", "state bytes a rank", "bytes sent a step", "step ms", "x epso (median of pairs)"],
        [
            [name, f"{row['state']:,.0f}", f"{row['sent']:,.0f}", f"{1e3 * row['seconds']:.0f}", f"{row['ratio']:.2f}"]
            for name, row in found.items()
        ],
    )


@DTYPES
def test_one_process(dtype: torch.dtype, interleave: Callable[..., tuple], publish: Callable[..., None]) -> None:
    """The update alone with clipping: flat buckets (bf16: with fp32 masters and moments) beside torch's AdamW."""
    compiled = optimus.compile(build(from_name("olmoe-tiny", **SIZES)).to(dtype), sequence_length=8, backend="eager")
    sharded = optimus.ShardedAdamW(compiled, lr=1e-6)
    for bucket in compiled.buckets:
        bucket.gradients.fill_(1e-6)
    variants: dict[str, Callable[[], object]] = {"ours": sharded.step}
    for kind in ("fused", "foreach"):
        parameters = [torch.nn.Parameter(p.detach().clone()) for p in compiled.parameters()]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-6)
        variants[f"torch AdamW({kind}=True)"] = torch_update(parameters, **{kind: True})
    wall, cpu = interleave(variants, ROUNDS)
    count = sum(p.numel() for p in compiled.parameters())
    short = str(dtype).removeprefix("torch.")
    publish(
        f"optimizer-update-{short}",
        f"Clipping and AdamW update of {count / 1e6:.0f} M parameters in one process, {short}; {ROUNDS} rounds",
        ["variant", "wall ms", "CPU ms", "x ours"],
        [[name, f"{wall[name]:.0f}", f"{cpu[name]:.0f}", f"{cpu[name] / cpu['ours']:.2f}"] for name in variants],
    )


def torch_update(parameters: list[torch.nn.Parameter], **kind: bool) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, **kind)  # type: ignore[arg-type]

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step
