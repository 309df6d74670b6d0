"""The curves of one or more runs as a PNG: losses, learning rate, gradient norm, speed, expert load, tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike, NDArray

from optimus_compiler.runtime.files import whole_file
from optimus_compiler.runtime.history import History, read_history

XAxis = Literal["tokens", "steps", "hours"]
Scale: TypeAlias = Callable[[Sequence[int]], NDArray[np.float64]]  # where steps lie on the horizontal axis

LOSS = "loss (cross entropy)"
_METRICS = {
    LOSS: "ce_loss",  # without the auxiliary loss: what dense runs, MoE runs and validation have in common
    "learning rate": "lr",
    "gradient norm": "grad_norm",
    "tokens per second": "tokens_per_second",
    "expert load, largest over mean": "expert_load_max_over_mean",
}

EVALUATION = "evaluation"
FULL, WEIGHTS_ALONE, DELETED = "full checkpoint", "checkpoint of weights alone", "checkpoint, deleted since"
# What stands beside the curves, in the colour of its run where it has none.
_CHECKPOINT = {"linestyle": "none", "marker": "^", "markersize": 7}
_INCIDENT = {"linestyle": "--", "linewidth": 1}
_MARKS: dict[str, dict[str, Any]] = {
    EVALUATION: {"linestyle": ":", "linewidth": 1, "marker": "o", "markersize": 4},
    FULL: _CHECKPOINT,
    WEIGHTS_ALONE: {**_CHECKPOINT, "markerfacecolor": "none"},
    DELETED: {**_CHECKPOINT, "marker": "|"},
    "hard": {**_INCIDENT, "color": "firebrick"},
    "hang": {**_INCIDENT, "color": "purple"},
    "soft": {**_INCIDENT, "color": "darkorange"},
    "divergence": {**_INCIDENT, "color": "black"},
    "slow": {**_INCIDENT, "color": "goldenrod"},
    "unknown": {**_INCIDENT, "color": "dimgray"},
}


def plot_runs(runs: Sequence[Path], output: Path, *, x: XAxis = "tokens", smooth: int | None = None) -> None:
    """Draw the curves of `runs` into the PNG `output`; several runs share the axes.

    x: tokens seen, steps, or hours spent in the steps that count. smooth: curves are means over the last so many steps,
    with each step faint behind; 1 draws the steps alone; by default a hundredth of the longest run. The file appears
    whole or not at all. Raises ValueError for a folder without metrics or a broken line.
    """
    figure = draw({name: read_history(run) for name, run in shortest_names(runs).items()}, x, smooth)
    png = BytesIO()
    FigureCanvasAgg(figure).print_png(png)
    output.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(output) as file:
        file.write(png.getvalue())


def shortest_names(runs: Sequence[Path]) -> dict[str, Path]:
    """Each run under the last parts of its path, as few as tell all apart; a run that is given twice is there once."""
    paths = list(dict.fromkeys(run.resolve() for run in runs))
    parts = 1
    while len(names := {str(Path(*path.parts[-parts:])): path for path in paths}) < len(paths):
        parts += 1
    return names


def draw(runs: dict[str, History], x: XAxis = "tokens", smooth: int | None = None) -> Figure:
    """One panel a metric and a task, one colour a run."""
    smooth = smooth or max(len(run.steps) for run in runs.values()) // 100
    figure, panels = _panels(runs, x)
    for number, (name, run) in enumerate(runs.items()):
        at, colour = _scale(run, x), f"C{number}"
        _draw_curves(panels, name, run, at, colour, smooth)
        _draw_evaluations(panels, run, at, colour)
        _draw_checkpoints(panels[LOSS], run, at, colour, height=0.02 + 0.03 * number)
        _draw_incidents(panels, run, at, colour)
    drawn = {line.get_label() for axis in panels.values() for line in axis.get_lines()}
    legend = [Line2D([], [], color=f"C{number}", label=name) for number, name in enumerate(runs)]
    legend += [
        Line2D([], [], **{"color": "0.3", **style}, label=mark) for mark, style in _MARKS.items() if mark in drawn
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=5)
    return figure


def trailing_mean(values: ArrayLike, count: int) -> NDArray[np.float64]:
    """At each place the mean of the last `count` values, of as many as there are near the start."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - count, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def _panels(runs: dict[str, History], x: XAxis) -> tuple[Figure, dict[str, Axes]]:
    """A figure with an empty panel for each title."""
    first_steps = [run.steps[0] for run in runs.values()]
    titles = [title for title, key in _METRICS.items() if any(getattr(step, key) is not None for step in first_steps)]
    tasks = dict.fromkeys(task for run in runs.values() for each in run.evaluations for task in each.tasks)
    titles += [_accuracy(task) for task in sorted(tasks, key=lambda task: task != "average")]  # which is the first

    columns = 2 if len(titles) <= 4 else 3
    rows = math.ceil(len(titles) / columns)
    figure = Figure(figsize=(6 * columns, 4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True).flatten()
    for axis in axes[len(titles) :]:
        axis.remove()
    for title, axis in zip(titles, axes, strict=False):
        axis.set_title(title)
        axis.grid(alpha=0.3)
    for axis in axes[len(titles) - columns : len(titles)]:  # those with none below
        axis.set_xlabel(x)
        axis.tick_params(labelbottom=True)
    return figure, dict(zip(titles, axes, strict=False))


def _accuracy(task: str) -> str:
    return f"accuracy: {task}"


def _scale(run: History, x: XAxis) -> Scale:
    steps = [step.step for step in run.steps]
    values: ArrayLike
    match x:
        case "tokens":
            values = [step.tokens for step in run.steps]
        case "steps":
            values = steps
        case "hours":
            values = np.cumsum([step.seconds + step.checkpoint_stall for step in run.steps]) / 3600
    return lambda wanted: np.interp(wanted, [0, *steps], np.concatenate([[0.0], values]))


def _draw_curves(panels: dict[str, Axes], name: str, run: History, at: Scale, colour: str, smooth: int) -> None:
    xs = at([step.step for step in run.steps])
    for title, key in _METRICS.items():
        if title not in panels:
            continue
        values = np.array([getattr(step, key) for step in run.steps], dtype=float)  # nan for None
        if smooth > 1 and key != "lr":  # which has no noise
            panels[title].plot(xs, values, color=colour, linewidth=0.5, alpha=0.3)
            values = trailing_mean(values, smooth)
        panels[title].plot(xs, values, color=colour, linewidth=1, label=name)


def _draw_evaluations(panels: dict[str, Axes], run: History, at: Scale, colour: str) -> None:
    curves: dict[str, dict[int, float]] = {}  # panel -> step -> value
    for each in run.evaluations:
        if each.validation_loss is not None:
            curves.setdefault(LOSS, {})[each.step] = each.validation_loss
        for task, accuracy in each.tasks.items():
            curves.setdefault(_accuracy(task), {})[each.step] = accuracy
    for title, curve in curves.items():
        style = {"color": colour, **_MARKS[EVALUATION]}
        panels[title].plot(at(list(curve)), list(curve.values()), **style, label=EVALUATION)


def _draw_checkpoints(axis: Axes, run: History, at: Scale, colour: str, height: float) -> None:
    """In a row at `height` of the panel, 0 to 1."""
    kinds = {FULL: run.full, WEIGHTS_ALONE: run.weights_alone, DELETED: run.deleted}
    for kind, steps in kinds.items():
        if steps:
            style = {"color": colour, **_MARKS[kind]}
            axis.plot(at(steps), [height] * len(steps), transform=axis.get_xaxis_transform(), **style, label=kind)


def _draw_incidents(panels: dict[str, Axes], run: History, at: Scale, colour: str) -> None:
    """Lines through all panels; the colour of the run is at their upper end."""
    head = {"marker": "v", "markevery": [1], "markeredgecolor": colour, "markerfacecolor": colour, "clip_on": False}
    for step, kind in run.incidents:
        style: dict[str, Any] = {**_MARKS[kind], **head}
        for axis in panels.values():
            axis.axvline(at([step])[0], **style, label=kind)
