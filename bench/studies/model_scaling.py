"""Four sizes of mixture of experts, which grow as the Mula family does (the paper's figure 1b): loss on held-out text.

The sizes are Mula's with layers 1/16, hidden sizes 1/32, experts and chosen experts 1/4 of theirs, the width of all
chosen experts together four times the hidden size as there; the same tokens, and one seed.

Example:
  python -m bench.studies.model_scaling --corpus corpus
"""

from __future__ import annotations

from itertools import pairwise

from matplotlib.axes import Axes

from bench.studies.corpus import CONTEXT_LENGTH
from bench.studies.options import Options, parse_options
from bench.studies.results import Curve, keep_study, validation_curve
from bench.studies.trainings import Training, configuration, train_all
from bench.tables import machine
from optimus_compiler.models import parameter_count
from optimus_compiler.runtime.metrics import flops_per_token

STEPS = 2930  # 12 M tokens
SIZES = {  # as in the paper's table of models: layers, hidden size, heads, experts
    "like Mula-7B-A1B": (1, 64, 2, 16),
    "like Mula-20B-A2B": (2, 64, 2, 24),
    "like Mula-100B-A7B": (3, 96, 3, 36),
    "like Mula-220B-A10B": (4, 96, 3, 60),
}


def study(options: Options) -> None:
    """Trains every size on the same tokens and compares their losses."""
    trainings = {name: _training(options, name) for name in SIZES}
    train_all(list(trainings.values())[::-1])  # the longest first
    curves = {name: validation_curve(training.directory) for name, training in trainings.items()}
    rows = []
    for name, training in trainings.items():
        total, active = parameter_count(training.model)
        flops = flops_per_token(training.model, CONTEXT_LENGTH)
        rows.append(
            [name, f"{total / 1e6:.1f} M / {active / 1e6:.2f} M", f"{flops / 1e6:.1f} M", f"{curves[name][-1][1]:.3f}"]
        )
    ends = [curve[-1][1] for curve in curves.values()]
    order = "every larger model is better" if all(a > b for a, b in pairwise(ends)) else "the order is not that of size"
    keep_study(
        "study-model-scaling",
        f"MoE sizes that grow as Mula's, {curves[next(iter(SIZES))][-1][0] / 1e6:.1f} M tokens: {order}",
        machine(),
        ["model", "parameters / active", "FLOPs a token", "held-out loss"],
        rows,
        curves=curves,
        draw=[lambda axes: _draw_curves(axes, curves), lambda axes: _draw_ends(axes, trainings, curves)],
        folder=options.results,
    )


def _training(options: Options, name: str) -> Training:
    layers, hidden, heads, experts = SIZES[name]
    model = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": 2 * hidden,
        "num_experts": experts,
        "num_experts_per_tok": 2,
    }
    directory = options.work / "model-scaling" / name.removeprefix("like ").lower()
    return Training(directory, configuration(options, model=model, steps=options.scaled(STEPS)))


def _draw_curves(axes: Axes, curves: dict[str, Curve]) -> None:
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), label=name)
    axes.set_xlabel("tokens")
    axes.set_ylabel("validation loss")
    axes.legend(fontsize="small")


def _draw_ends(axes: Axes, trainings: dict[str, Training], curves: dict[str, Curve]) -> None:
    active = [parameter_count(training.model)[1] for training in trainings.values()]
    axes.plot(active, [curve[-1][1] for curve in curves.values()], "o-")
    axes.set_xscale("log")
    axes.set_xlabel("active parameters")
    axes.set_ylabel("final validation loss")


if __name__ == "__main__":
    study(parse_options(__doc__ or ""))
