"""The curves of one or more runs as a PNG: loss, learning rate, gradient norm, tokens per second."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from optimus_compiler.runtime.metrics import StepMetrics, read_metrics

_PANELS = (
    ("loss", "loss"),
    ("lr", "learning rate"),
    ("grad_norm", "gradient norm"),
    ("tokens_per_second", "tokens per second"),
)


def plot_runs(runs: Sequence[Path], output: Path) -> None:
    """Draw the curves of `runs` into the PNG `output`, over tokens seen; several runs share the axes.

    The file appears whole or not at all. Raises ValueError for a folder without metrics or a broken line.
    """
    curves = {run: read_metrics(run) for run in runs}
    partial = output.with_name(f".{output.name}.part")
    try:
        FigureCanvasAgg(draw(curves)).print_png(str(partial))
        os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)


def draw(curves: dict[Path, list[StepMetrics]]) -> Figure:
    """One panel a metric, one line a run."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    for axis, (key, title) in zip(axes.flat, _PANELS, strict=True):
        for run, steps in curves.items():
            axis.plot([m.tokens for m in steps], [getattr(m, key) for m in steps], label=str(run), linewidth=1)
        axis.set_title(title)
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("tokens")
    if len(curves) > 1:
        axes.flat[0].legend()
    return figure
