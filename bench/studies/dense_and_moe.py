"""Dense or mixture of experts, at equal active compute (the paper's figures 1a and 2a): loss on held-out text.

The dense model's MLP is as wide as the experts that a token of the MoE meets together, as OLMo-1B's (8,192) is beside
OLMoE-1B-7B's (8 of 64 experts of 1,024): here 512 beside 4 of 32 experts of 128. Three seeds, which change the initial
weights and the order of the data.

Example:
  python -m bench.studies.dense_and_moe --corpus corpus
"""

from __future__ import annotations

from itertools import pairwise
from statistics import mean
from typing import Any

from matplotlib.axes import Axes

from bench.studies.corpus import CONTEXT_LENGTH
from bench.studies.options import Options, parse_options
from bench.studies.results import Curve, keep_study, validation_curve
from bench.studies.trainings import Training, configuration, train_all
from bench.tables import machine
from optimus_compiler.models import parameter_count
from optimus_compiler.runtime.metrics import flops_per_token

STEPS, SEEDS = 1220, (0, 1, 2)  # 5 M tokens
COMMON: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "dense": COMMON | {"name": "olmo-tiny", "intermediate_size": 512},
    "MoE": COMMON | {"intermediate_size": 128, "num_experts": 32, "num_experts_per_tok": 4},
}


def study(options: Options) -> None:
    """Trains both models with every seed, and compares their losses at equal tokens and at equal FLOPs."""
    trainings = {
        (kind, seed): Training(
            options.work / "dense-and-moe" / f"{kind}-seed{seed}",
            configuration(options, model=model, steps=options.scaled(STEPS), train={"seed": seed}),
        )
        for seed in SEEDS
        for kind, model in MODELS.items()
    }
    train_all(list(trainings.values()))

    curves: dict[str, Curve] = {
        f"{kind}, seed {seed}": validation_curve(training.directory) for (kind, seed), training in trainings.items()
    }
    per_token = {kind: flops_per_token(trainings[kind, SEEDS[0]].model, CONTEXT_LENGTH) for kind in MODELS}
    dense_ends = [curves[f"dense, seed {seed}"][-1] for seed in SEEDS]
    target, tokens = mean(loss for _, loss in dense_ends), dense_ends[0][0]
    rows = []
    for kind in MODELS:
        total, active = parameter_count(trainings[kind, SEEDS[0]].model)
        ends = [curves[f"{kind}, seed {seed}"][-1][1] for seed in SEEDS]
        reached = [tokens_to_reach(curves[f"{kind}, seed {seed}"], target) for seed in SEEDS]
        known = [each for each in reached if each is not None]
        share = f"{mean(known) / tokens:.0%}" if kind == "MoE" and len(known) == len(SEEDS) else "-"
        rows.append(
            [
                kind,
                f"{total / 1e6:.1f} M / {active / 1e6:.1f} M",
                f"{per_token[kind] / 1e6:.1f} M",
                f"{mean(ends):.3f}",
                f"{min(ends):.3f} to {max(ends):.3f}",
                share,
            ]
        )
    keep_study(
        "study-dense-and-moe",
        f"Dense and MoE at equal active compute, {tokens / 1e6:.1f} M tokens, {len(SEEDS)} seeds: held-out loss",
        machine(),
        [
            "model",
            "parameters / active",
            "FLOPs a token",
            "final loss (mean)",
            "range",
            "tokens to the dense model's loss",
        ],
        rows,
        curves=curves,
        draw=[
            lambda axes: _draw(axes, curves, dict.fromkeys(MODELS, 1.0), "tokens"),
            lambda axes: _draw(axes, curves, per_token, "training FLOPs"),
        ],
        folder=options.results,
    )


def tokens_to_reach(curve: Curve, loss: float) -> float | None:
    """Where a curve first comes down to `loss`, between its points in a straight line; None where it does not."""
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y1 <= loss <= y0:
            return x1 if y0 == y1 else x0 + (y0 - loss) / (y0 - y1) * (x1 - x0)
    return None


def _draw(axes: Axes, curves: dict[str, Curve], per_token: dict[str, float], xlabel: str) -> None:
    colours = {"dense": "tab:blue", "MoE": "tab:orange"}
    for label, curve in curves.items():
        kind, _, seed = label.partition(", ")
        points = [(tokens * per_token[kind], loss) for tokens, loss in curve]
        axes.plot(*zip(*points, strict=True), color=colours[kind], alpha=0.7, label=kind if seed == "seed 0" else None)
    axes.set_xlabel(xlabel)
    axes.set_ylabel("validation loss")
    axes.legend()


if __name__ == "__main__":
    study(parse_options(__doc__ or ""))
