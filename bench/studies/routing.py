"""Routing health: how evenly the experts are used over time, with and without the auxiliary load-balancing loss.

Example:
  python -m bench.studies.routing --corpus corpus
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from bench.studies.options import Options, parse_options
from bench.studies.results import Curve, keep_study, validation_curve
from bench.studies.trainings import Training, configuration, train_all
from bench.tables import machine
from optimus_compiler.mesh import Mesh
from optimus_compiler.models.olmoe import OlmoeTopKRouter
from optimus_compiler.runtime.data.dataset import PreparedData
from optimus_compiler.runtime.evaluate.open import open_model
from optimus_compiler.runtime.metrics import read_metrics

STEPS = 244  # 1 M tokens
COEFFICIENTS = {"with auxiliary loss (0.01)": 0.01, "without": 0.0}
MODEL = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}
SEQUENCES = 64  # of held-out text, over which the shares are counted
IDLE = 0.1  # an expert is idle with less than this much of an even share


def study(options: Options) -> None:
    """Trains the same model with and without the auxiliary loss, and counts its experts' tokens layer by layer."""
    steps = options.scaled(STEPS)
    trainings = {
        name: Training(
            options.work / "routing" / f"coefficient-{coefficient}",
            configuration(
                options,
                model=MODEL | {"router_aux_loss_coef": coefficient},
                steps=steps,
                checkpoint={"every": steps, "persistent_every": max(1, steps // 8)},
            ),
        )
        for name, coefficient in COEFFICIENTS.items()
    }
    train_all(list(trainings.values()))

    data = PreparedData.open(options.corpus.validation)
    ids_BS = data.read(np.arange(min(SEQUENCES, len(data))))
    curves: dict[str, Curve] = {}
    last: dict[str, Tensor] = {}
    rows = []
    for name, training in trainings.items():
        metrics = read_metrics(training.directory)
        loads = [(each.tokens, each.expert_load_max_over_mean or 0.0) for each in metrics]
        curves[f"max over mean, {name}"] = loads[:: max(1, len(loads) // 60)]
        shares = {step: shares_of(path, ids_BS) for step, path in _checkpoints(training.directory)}
        tokens = metrics[0].tokens
        for what, of_layer in (("busiest", _busiest), ("idle", _idle)):
            curves[f"{what}, {name}"] = [(step * tokens, of_layer(shares_LE)) for step, shares_LE in shares.items()]
        last[name] = shares[max(shares)]
        rows.append(
            [
                name,
                f"{_busiest(last[name]):.1f} x",
                f"{_idle(last[name]):.1%}",
                f"{loads[-1][1]:.2f}",
                f"{validation_curve(training.directory)[-1][1]:.3f}",
            ]
        )
    keep_study(
        "study-routing",
        f"Routing after {steps} steps, {MODEL['num_experts']} experts, held-out text: shares by layer",
        machine(),
        [
            "run",
            "busiest expert of a layer, of an even share",
            "idle experts",
            "max over mean, pooled",
            "held-out loss",
        ],
        rows,
        curves=curves,
        draw=[
            lambda axes: _draw_load(axes, {k: v for k, v in curves.items() if k.startswith("busiest")}),
            *(lambda axes, name=name: _draw_shares(axes, name, last[name]) for name in last),
        ],
        folder=options.results,
    )


@torch.no_grad()
def shares_of(checkpoint: Path, ids_BS: Tensor) -> Tensor:
    """How many tokens each expert of each layer gets, of an even share: [layers, experts]."""
    module = open_model(checkpoint, Mesh()).model.module
    counts: list[Tensor] = []

    def count(router: OlmoeTopKRouter, _: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        counts.append(torch.bincount(output[2].flatten(), minlength=router.weight.shape[0]).double())

    for router in module.modules():
        if isinstance(router, OlmoeTopKRouter):
            router.register_forward_hook(count)
    module(ids_BS)
    counts_LE = torch.stack(counts)
    return counts_LE / counts_LE.mean(dim=1, keepdim=True)


def _checkpoints(run: Path) -> list[tuple[int, Path]]:
    return sorted((int(path.name.removeprefix("model-")), path) for path in (run / "checkpoints").glob("model-*"))


def _busiest(shares_LE: Tensor) -> float:
    """The busiest expert's share, the mean over layers."""
    return shares_LE.max(dim=1).values.mean().item()


def _idle(shares_LE: Tensor) -> float:
    """The part of the experts that is idle."""
    return (shares_LE < IDLE).double().mean().item()


def _draw_load(axes: Axes, curves: dict[str, Curve]) -> None:
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), "o-", label=name.removeprefix("busiest, "))
    axes.set_xlabel("tokens")
    axes.set_ylabel("busiest expert, of an even share")
    axes.legend()


def _draw_shares(axes: Axes, name: str, shares_LE: Tensor) -> None:
    shares = shares_LE.sort(dim=1, descending=True).values.numpy()
    image = axes.imshow(shares, aspect="auto", vmin=0, vmax=4, cmap="viridis", interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label="of an even share")
    axes.set_title(name, fontsize="medium")
    axes.set_xlabel("experts, busiest first")
    axes.set_ylabel("layer")
    axes.set_yticks(range(len(shares)))


if __name__ == "__main__":
    study(parse_options(__doc__ or ""))
