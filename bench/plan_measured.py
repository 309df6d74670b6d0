"""Plans beside real runs on this machine: memory of every rank, and how layouts rank by step time.

python -m bench.plan_measured          # about ten minutes: 4 and 8 gloo processes on the cores there are
Memory is what torch's profiler sees allocated (aot_eager, fp32), weights, gradients and optimizer state included. The
processes share two cores: while one waits in the pipeline the others have its time, so bubbles are not counted. The
machine's constants are measured here, not fitted to the runs.
"""

import statistics
import time
from typing import Any, NamedTuple

import torch

import optimus_compiler as optimus
from bench.tables import keep, machine, show
from optimus_compiler.config import Config, parse_config
from optimus_compiler.models import build, from_name
from optimus_compiler.runtime.plan.deepen import planned_program
from optimus_compiler.runtime.plan.estimate import Plan, estimate
from optimus_compiler.runtime.plan.hardware import Constant, Hardware, Link, load_hardware
from tests.peak_memory import peak_of
from tests.ranks import Ranks

SIZES = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 256, "num_experts": 16, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 8, "num_experts_per_tok": 4}  # fmt: skip
LENGTH, MICRO_BATCH, SEQUENCES = 1024, 2, 16
LAYOUTS: list[dict[str, int]] = [
    {"dp": 4},
    {"dp": 2, "ep": 2},
    {"ep": 4},
    {"pp": 2, "dp": 2},
    {"pp": 2, "ep": 2},
    {"pp": 4},
    {"dp": 2, "tp": 2},
    {"pp": 2, "dp": 2, "ep": 2},
]


class Measured(NamedTuple):
    """Of one rank."""

    state: int
    activations: int
    seconds: float


def configuration(sizes: dict[str, int]) -> Config:
    """The run that is planned and measured."""
    model = "\n".join(f"{name} = {size}" for name, size in SIZES.items())
    mesh = "\n".join(f"{name} = {size}" for name, size in sizes.items())
    return parse_config(
        f'[model]\nname = "olmoe-tiny"\n[model.overrides]\n{model}\n'
        f'[mesh]\nexpert_rows = "exact"\n{mesh}\n[train]\nsteps = 1\n'
        f"sequence_length = {LENGTH}\nmicro_batch_size = {MICRO_BATCH}\nglobal_batch_size = {SEQUENCES}\n"
        'precision = "fp32"\n',
        "bench",
    )


def measure(sizes: dict[str, int]) -> Measured:
    """One rank's step, after a first one."""
    mesh = optimus.Mesh(**sizes)  # type: ignore[arg-type]
    count = SEQUENCES // (MICRO_BATCH * mesh.dp * mesh.ep)
    compiled = optimus.compile(
        build(from_name("olmoe-tiny", **SIZES)), mesh, sequence_length=LENGTH, micro_batch_size=MICRO_BATCH,
        micro_batches=count, backend="aot_eager", expert_rows="exact",
    )  # fmt: skip
    optimizer = optimus.ShardedAdamW(compiled, lr=1e-4)
    ids = torch.randint(0, SIZES["vocab_size"], (count * MICRO_BATCH, LENGTH))

    def step() -> None:
        compiled.train_step(ids, ids.clone())
        optimizer.step()
        optimizer.zero_grad()

    step()
    times = []
    for _ in range(2):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    activations = peak_of(lambda: compiled.train_step(ids, ids.clone()))
    state = sum(bucket.weights.nbytes + bucket.gradients.nbytes for bucket in compiled.buckets)
    state += sum(tensor.nbytes for shard in optimizer.shards for tensor in shard.tensors().values())
    return Measured(state, activations, statistics.median(times))


def rates() -> tuple[float, float]:
    """FLOP/s of a product and bytes/s of a copy, one thread of one process."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    source, target = torch.randn(2**24), torch.empty(2**24)
    found = []
    for run in (lambda: torch.mm(a, b), lambda: target.copy_(source)):
        run()
        began = time.perf_counter()
        for _ in range(10):
            run()
        found.append((time.perf_counter() - began) / 10)
    return 2 * 1024**3 / found[0], 2 * source.nbytes / found[1]


def gloo_rate() -> float:
    """Bytes/s that a rank sends in an all-gather of 64 MiB over all ranks."""
    part = torch.zeros(2**24 // torch.distributed.get_world_size())
    whole = torch.empty(2**24)
    torch.distributed.all_gather_into_tensor(whole, part)
    began = time.perf_counter()
    for _ in range(3):
        torch.distributed.all_gather_into_tensor(whole, part)
    return whole.nbytes / ((time.perf_counter() - began) / 3)


def this_machine(flops: float, copies: float, link: float, processes: int) -> Hardware:
    """Its constants for so many processes, which share two cores."""
    share = min(1.0, torch.get_num_threads() * 2 / processes)

    def constant(value: float, unit: str) -> Constant:
        return Constant(value=value, unit=unit, source="measured by bench/plan_measured.py")

    bandwidth = Link(within=10**6, bandwidth=constant(link / 1e9, "GB/s"), latency=constant(100, "us"))
    product = constant(flops * share / 1e12, "TFLOP/s")
    changes = {
        "name": "this machine", "matmul": product, "matmul_fp32": product, "peak": product,
        "memory_bandwidth": constant(copies * share / 1e12, "TB/s"), "links": (bandwidth,),
        "grouped_matmul": constant(1.0, "of matmul"), "fusion": constant(1.0, "of the traffic"),
    }  # fmt: skip
    return load_hardware("aurora").model_copy(update=changes)


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's: 1 where both order the layouts alike."""
    orders = [torch.tensor(x).argsort().argsort().double() for x in (a, b)]
    return float(torch.corrcoef(torch.stack(orders))[0, 1])


def main() -> None:
    torch.set_num_threads(1)
    flops, copies = rates()
    pool = Ranks()
    links = {count: min(pool.run(count, gloo_rate)) for count in (4, 8)}
    memory_rows, time_rows, predicted, measured_times = [], [], [], []
    for sizes in LAYOUTS:
        name = " ".join(f"{key}={size}" for key, size in sizes.items())
        config = configuration(sizes)
        processes = torch.tensor(list(sizes.values())).prod().item()
        hardware = this_machine(flops, copies, links[int(processes)], int(processes))
        plan: Plan = estimate(planned_program(config), config, hardware)
        ranks: list[Measured] = pool.run(int(processes), measure, sizes, seconds=600)
        worst = max(ranks, key=lambda rank: rank.state + rank.activations)
        planned = max(plan.memory, key=lambda rank: rank.state + rank.activations)
        total, estimated = worst.state + worst.activations, planned.state + planned.activations
        parts = (worst.state, planned.state, worst.activations, planned.activations, total, estimated)
        memory_rows.append([name, *(f"{part / 2**20:.0f}" for part in parts), f"{estimated / total:.3f}"])
        seconds = max(rank.seconds for rank in ranks)
        expected = plan.time.total - plan.time.bubble
        time_rows.append([name, f"{seconds:.2f}", f"{expected:.2f}", f"{expected / seconds:.2f}"])
        predicted.append(expected)
        measured_times.append(seconds)
        print(memory_rows[-1], time_rows[-1], flush=True)
    pool.stop()
    of_four = slice(0, len(LAYOUTS) - 1)
    correlation = rank_correlation(measured_times[of_four], predicted[of_four])
    columns = ["layout", "state MiB", "planned", "activations MiB", "planned", "together MiB", "planned", "ratio"]
    title = "Memory of the fullest rank, measured and planned (OLMoE of hidden 512, 4 layers, fp32, aot_eager)"
    tables: list[tuple[str, str, list[str], list[Any]]] = [("plan-memory", title, columns, memory_rows)]
    title = f"Step of 16 x 1,024 tokens, seconds; rank correlation over the layouts of 4 processes {correlation:.2f}"
    tables.append(("plan-time", title, ["layout", "measured", "planned", "ratio"], time_rows))
    for name, title, columns, rows in tables:
        show(title, machine(), columns, rows)
        keep(name, title, machine(), columns, rows)


if __name__ == "__main__":
    main()
