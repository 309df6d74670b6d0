"""More data-parallel ranks and a batch that grows with them (the paper's figure 4a), and forced uniform routing (4b).

dp 1, 2 and 4 with one micro-batch of 16 sequences a rank see the same tokens in a step count that halves: the loss that
the larger batch costs, and the tokens per second that it gains. Beside each, the same steps with every expert getting
equally many tokens (FUR): what the imbalance of routing costs. On a machine with fewer cores than ranks, efficiency is
that of the cores.

Example:
  python -m bench.studies.batch_scaling --corpus corpus
"""

from __future__ import annotations

import os
import time
from statistics import median

import torch
import torch.distributed as dist
from matplotlib.axes import Axes

import optimus_compiler as optimus
from bench.studies.corpus import CONTEXT_LENGTH, VOCABULARY
from bench.studies.options import PATIENCE, Options, parse_options
from bench.studies.results import Curve, keep_study, validation_curve
from bench.studies.trainings import MICRO_BATCH, Training, configuration, train_all
from bench.tables import machine
from optimus_compiler.models import build, from_name
from tests.ranks import Ranks

STEPS, REPLICAS = 244, (1, 2, 4)  # 1 M tokens
MODEL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}
ROUNDS, TIMED_STEPS = 3, 6


def study(options: Options) -> None:
    """Trains with each number of replicas, times each with and without FUR, and shows both."""
    trainings = {
        dp: Training(
            options.work / "batch-scaling" / f"dp{dp}",
            configuration(
                options,
                model=MODEL,
                steps=max(4, options.scaled(STEPS) // dp),
                mesh={"dp": dp},
                train={"global_batch_size": MICRO_BATCH * dp},
            ),
        )
        for dp in REPLICAS
    }
    train_all(list(trainings.values()), at_once=1)
    curves = {f"dp={dp}": validation_curve(training.directory) for dp, training in trainings.items()}
    speeds = measure(max(1, round(ROUNDS * options.size)))

    rows = []
    cores = os.cpu_count() or 1
    for dp in REPLICAS:
        ratios = [
            speed / (one * min(dp, cores)) for one, speed in zip(speeds[1, False], speeds[dp, False], strict=True)
        ]
        uniform = [fur / free for free, fur in zip(speeds[dp, False], speeds[dp, True], strict=True)]
        tokens, loss = curves[f"dp={dp}"][-1]
        rows.append(
            [
                f"dp={dp}",
                f"{MICRO_BATCH * dp * CONTEXT_LENGTH:,}",
                f"{trainings[dp].config.train.steps}",
                f"{loss:.3f}",
                f"{median(speeds[dp, False]):,.0f}",
                f"{median(ratios):.0%}",
                f"{median(uniform):.2f}",
            ]
        )
    keep_study(
        "study-batch-scaling",
        f"Data parallelism with a growing batch, {tokens / 1e6:.2f} M tokens each, {cores} cores for all ranks",
        machine(),
        ["ranks", "tokens a step", "steps", "held-out loss", "tokens/s", "efficiency of the cores", "FUR, x tokens/s"],
        rows,
        curves=curves
        | {
            f"tokens/s{' with FUR' if fur else ''}": [(dp, median(speeds[dp, fur])) for dp in REPLICAS]
            for fur in (False, True)
        },
        draw=[lambda axes: _draw_losses(axes, curves), lambda axes: _draw_speeds(axes, speeds)],
        folder=options.results,
    )


def measure(rounds: int) -> dict[tuple[int, bool], list[float]]:
    """Tokens per second by (dp, FUR), one for each round; every round has every number of replicas."""
    speeds: dict[tuple[int, bool], list[float]] = {(dp, fur): [] for dp in REPLICAS for fur in (False, True)}
    pool = Ranks()
    try:
        for _ in range(rounds):
            for dp in REPLICAS:
                (found, *_) = pool.run(dp, timed, dp, seconds=PATIENCE)
                for fur, speed in found.items():
                    speeds[dp, fur].append(speed)
    finally:
        pool.stop()
    return speeds


def timed(dp: int) -> dict[bool, float]:
    """Tokens per second without and with forced uniform routing, of steps that take turns; on every rank."""
    mesh = optimus.Mesh(dp=dp)
    ids = torch.randint(VOCABULARY, (MICRO_BATCH, CONTEXT_LENGTH), generator=torch.Generator().manual_seed(mesh.rank))
    model = from_name("olmoe-tiny", vocab_size=VOCABULARY, max_position_embeddings=CONTEXT_LENGTH, **MODEL)
    steps = {}
    for fur in (False, True):
        compiled = optimus.compile(
            build(model),
            mesh,
            sequence_length=CONTEXT_LENGTH,
            micro_batch_size=MICRO_BATCH,
            force_uniform_routing=fur,
            seed=0,
        )
        steps[fur] = (compiled, optimus.ShardedAdamW(compiled, lr=1e-3))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(TIMED_STEPS + 1):
        for fur, (compiled, optimizer) in steps.items():
            if dp > 1:
                dist.barrier()
            started = time.perf_counter()
            compiled.train_step(ids, ids)
            optimizer.step()
            optimizer.zero_grad()
            seconds[fur].append(time.perf_counter() - started)
    return {fur: dp * ids.numel() / median(each[1:]) for fur, each in seconds.items()}


def _draw_losses(axes: Axes, curves: dict[str, Curve]) -> None:
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), "o-", label=name)
    axes.set_xlabel("tokens")
    axes.set_ylabel("validation loss")
    axes.legend()


def _draw_speeds(axes: Axes, speeds: dict[tuple[int, bool], list[float]]) -> None:
    for fur, style in ((False, "o-"), (True, "s--")):
        values = [median(speeds[dp, fur]) for dp in REPLICAS]
        axes.plot(REPLICAS, values, style, label="forced uniform routing" if fur else "routed")
    axes.plot(REPLICAS, [median(speeds[1, False]) * dp for dp in REPLICAS], ":", color="grey", label="as many cores")
    axes.set_xticks(REPLICAS)
    axes.set_xlabel("data-parallel ranks")
    axes.set_ylabel("tokens per second")
    axes.legend()


if __name__ == "__main__":
    study(parse_options(__doc__ or ""))
