"""How a run scales: the same batch a rank on more and more devices, with stragglers, uneven routing and failures.

Each is sampled from what the hardware file says of it, with fixed seeds: a rank's step is longer by a lognormal factor
and the slowest rank is waited for; experts get shares of the tokens from a Dirichlet distribution, or a recorded one,
and every layer waits for the rank with the most; nodes fail at random, and what was done since the last checkpoint is
done again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from optimus_compiler.config import Config
from optimus_compiler.program import Program
from optimus_compiler.runtime.plan.estimate import Plan, estimate
from optimus_compiler.runtime.plan.hardware import Hardware
from optimus_compiler.runtime.plan.layout import on_processes
from optimus_compiler.runtime.run import abstract_mesh

SAMPLES = 200
LAYERS = 64  # whose imbalance averages out within a step
DAYS = 100.0  # over which failures are simulated


@dataclass(frozen=True)
class Goodput:
    """What failures cost."""

    failures_a_day: float
    interval: float  # seconds between two checkpoints
    share: float  # of the time that goes into steps which count


@dataclass(frozen=True)
class Point:
    """One number of devices."""

    plan: Plan
    step: float  # seconds, stragglers and uneven routing included
    step_uniform: float  # the same under forced uniform routing
    goodput: Goodput

    @property
    def rate(self) -> float:
        """Tokens a second and device."""
        return self.plan.tokens / self.step / self.plan.mesh.size

    @property
    def rate_uniform(self) -> float:
        """Tokens a second and device under forced uniform routing."""
        return self.plan.tokens / self.step_uniform / self.plan.mesh.size


def scale(
    program: Program, config: Config, hardware: Hardware, sizes: Sequence[int], shares: np.ndarray
) -> list[Point]:
    """A point for each number of processes. The program is one of `config` on any of them: only dp differs.

    shares: [draws, experts], each row the share of the tokens that every expert gets in one layer.
    """
    points = []
    stages = None
    for size in sizes:
        own = on_processes(config, size)
        program.mesh = abstract_mesh(own)
        plan = estimate(program, own, hardware, stages)
        stages = plan.stages
        waiting = straggling(size, hardware.jitter.si)
        uniform = plan.time.total + (waiting - 1) * plan.time.compute
        experts = _expert_seconds(plan)
        uneven = uniform + (imbalance(shares, own.mesh.ep, own.mesh.dp) - 1) * experts
        points.append(Point(plan, uneven, uniform, goodput(plan, hardware)))
    return points


def straggling(ranks: int, sigma: float) -> float:
    """The mean of the largest of `ranks` lognormal factors with median 1."""
    generator = np.random.default_rng(0)
    largest = [generator.standard_normal(ranks).max() for _ in range(SAMPLES)]
    return float(np.exp(sigma * np.array(largest)).mean())


def dirichlet(experts: int, concentration: float, draws: int = 1000) -> np.ndarray:
    """[draws, experts]: shares of the tokens; the higher the concentration, the more even."""
    return np.random.default_rng(0).dirichlet(np.full(experts, concentration), draws)


def recorded(path: Path, experts: int) -> np.ndarray:
    """[layers, experts]: shares from a JSON list of counts an expert, one list or one a layer. Raises ValueError."""
    try:
        counts = np.atleast_2d(np.array(json.loads(path.read_text()), dtype=float))
    except (json.JSONDecodeError, ValueError) as error:
        raise ValueError(f"{path} is not a JSON list of token counts an expert: {error}") from None
    if counts.ndim != 2 or counts.shape[1] != experts or (counts < 0).any() or (counts.sum(1) == 0).any():
        raise ValueError(f"{path} holds counts of shape {counts.shape}: the model has {experts} experts a layer")
    return counts / counts.sum(1, keepdims=True)


def imbalance(shares: np.ndarray, ep: int, groups: int) -> float:
    """How much longer the experts take than with even shares: every layer waits for the ep rank with the most rows, and
    the step for the slowest of all ep groups."""
    loads = shares.reshape(len(shares), ep, -1).sum(2).max(1) * ep  # of the fullest rank, 1 when even
    generator = np.random.default_rng(0)
    sums = generator.choice(loads, (min(groups, 256), LAYERS)).mean(1)
    return float(sums.max())


def _expert_seconds(plan: Plan) -> float:
    """In a step, on the rank with the most of it."""
    of_rank = [0.0] * plan.mesh.pp
    for stage, rank in zip(plan.stages, plan.stage_ranks, strict=True):
        of_rank[rank] += plan.micro_batches * (stage.forward.expert_seconds + stage.backward.expert_seconds)
    return max(of_rank)


def goodput(plan: Plan, hardware: Hardware) -> Goodput:
    """Failures simulated over many days, with the checkpoint interval of Young's formula."""
    nodes = math.ceil(plan.mesh.size / hardware.devices_per_node)
    between = hardware.node_mtbf.si / nodes
    state = sum(m.weights + m.optimizer for m in plan.memory) / plan.mesh.pp * hardware.devices_per_node
    writing = state / hardware.checkpoint.si
    interval = max(math.sqrt(2 * writing * between), plan.time.total)
    generator = np.random.default_rng(0)
    useful = clock = 0.0
    while clock < 86400 * DAYS:
        until = generator.exponential(between)
        cycles = int(until // (interval + writing))
        useful += cycles * interval
        clock += until + hardware.restart.si
    return Goodput(86400 / between, interval, useful / clock)


def draw(points: Sequence[Point], path: Path) -> None:
    """The efficiency curve as a PNG: tokens a second and device, the first point 100%."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = [point.plan.mesh.size for point in points]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for label, rates in (
        ("sampled routing", [point.rate for point in points]),
        ("forced uniform routing", [point.rate_uniform for point in points]),
    ):
        axes.plot(sizes, [100 * rate / rates[0] for rate in rates], marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_ylim(0, 105)
    axes.set_xlabel(f"devices ({points[0].plan.hardware.name})")
    axes.set_ylabel("efficiency, %")
    axes.set_title(points[0].plan.config.model.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
