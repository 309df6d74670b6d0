"""Plots: every line, mark and label that is drawn, the file that comes out, and that a failure leaves none."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from optimus_compiler.runtime import plot
from optimus_compiler.runtime.history import History
from optimus_compiler.runtime.metrics import Evaluation
from optimus_compiler.runtime.plot import draw, plot_runs, shortest_names, trailing_mean
from tests.runtime.test_metrics import STEP, lines, write

STEPS = [
    replace(STEP, step=i, tokens=64 * i, loss=7.0, ce_loss=6.0 - i, lr=i / 10, grad_norm=i + 0.5, seconds=i * 900.0)
    for i in (1, 2, 3)
]


def history(**fields: Any) -> History:
    empty: dict[str, Any] = {"evaluations": [], "incidents": [], "full": [], "weights_alone": [], "deleted": []}
    return History(**{"steps": STEPS, **empty, **fields})


def drawn(axis: Axes) -> list[tuple[str, list[list[float]]]]:
    """Label and points of each line."""
    return [(str(line.get_label()), np.asarray(line.get_xydata()).tolist()) for line in axis.get_lines()]


def test_curves_of_two_runs_share_the_panels() -> None:
    dense = [replace(step, expert_load_max_over_mean=None) for step in STEPS[:2]]
    figure = draw({"moe": history(), "dense": history(steps=dense)})
    panels = {axis.get_title(): drawn(axis) for axis in figure.axes}
    assert panels == {
        "loss (cross entropy)": [("moe", [[64, 5.0], [128, 4.0], [192, 3.0]]), ("dense", [[64, 5.0], [128, 4.0]])],
        "learning rate": [("moe", [[64, 0.1], [128, 0.2], [192, 0.3]]), ("dense", [[64, 0.1], [128, 0.2]])],
        "gradient norm": [("moe", [[64, 1.5], [128, 2.5], [192, 3.5]]), ("dense", [[64, 1.5], [128, 2.5]])],
        "tokens per second": [
            ("moe", [[64, 640.0], [128, 640.0], [192, 640.0]]),
            ("dense", [[64, 640.0], [128, 640.0]]),
        ],
        "expert load, largest over mean": [
            ("moe", [[64, 1.5], [128, 1.5], [192, 1.5]]),
            ("dense", pytest.approx(np.array([[64, math.nan], [128, math.nan]]), nan_ok=True)),
        ],
    }
    first, second = figure.axes[0].get_lines()
    assert first.get_color() != second.get_color()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["moe", "dense"]
    assert [line.get_color() for line in legend.get_lines()] == [first.get_color(), second.get_color()]


def test_dense_run_has_no_panel_of_expert_load() -> None:
    dense = [replace(step, expert_load_max_over_mean=None) for step in STEPS]
    assert [axis.get_title() for axis in draw({"dense": history(steps=dense)}).axes] == [
        "loss (cross entropy)",
        "learning rate",
        "gradient norm",
        "tokens per second",
    ]


@pytest.mark.parametrize(("x", "positions"), [("steps", [1, 2, 3]), ("hours", [0.25, 1.25, 2.0])])
def test_horizontal_axis(x: plot.XAxis, positions: list[float]) -> None:
    steps = [STEPS[0], replace(STEPS[1], checkpoint_stall=1800.0), STEPS[2]]
    figure = draw({"run": history(steps=steps, incidents=[(2, "hang")])}, x)
    curve, incident = figure.axes[0].get_lines()
    assert np.asarray(curve.get_xdata()).tolist() == positions
    assert np.asarray(incident.get_xdata()).tolist() == [positions[1]] * 2
    assert figure.axes[4].get_xlabel() == x


def test_smoothed_curve_is_strong_and_the_steps_stand_faint_behind() -> None:
    figure = draw({"run": history()}, smooth=2)
    faint, strong = figure.axes[0].get_lines()
    assert np.asarray(faint.get_ydata()).tolist() == [5.0, 4.0, 3.0]
    assert np.asarray(strong.get_ydata()).tolist() == [5.0, 4.5, 3.5]
    assert (faint.get_alpha(), strong.get_alpha()) == (0.3, None)
    assert faint.get_linewidth() < strong.get_linewidth()
    assert faint.get_color() == strong.get_color()
    (learning_rate,) = figure.axes[1].get_lines()
    assert np.asarray(learning_rate.get_ydata()).tolist() == [0.1, 0.2, 0.3]


@pytest.mark.parametrize(("count", "smooth", "curves"), [(199, None, 1), (200, None, 2), (200, 1, 1)])
def test_short_runs_are_not_smoothed_unless_asked(count: int, smooth: int | None, curves: int) -> None:
    steps = [replace(STEP, step=i, tokens=64 * i) for i in range(1, count + 1)]
    assert len(draw({"run": history(steps=steps)}, smooth=smooth).axes[0].get_lines()) == curves


def test_trailing_mean_is_that_of_a_loop() -> None:
    values = np.random.default_rng(0).normal(size=50)
    for count in (1, 7, 50, 80):
        expected = [values[max(0, i - count + 1) : i + 1].mean() for i in range(50)]
        assert trailing_mean(values, count) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_evaluations_are_in_the_loss_panel_and_in_one_for_each_task() -> None:
    evaluations = [
        Evaluation(step=1, tokens=64, validation_loss=5.5, tasks={"arc": 0.25, "average": 0.3}),
        Evaluation(step=2, tokens=128, tasks={"arc": 0.5, "piqa": 0.6, "average": 0.55}),
        Evaluation(step=3, tokens=192, validation_loss=3.5),
    ]
    figure = draw({"run": history(evaluations=evaluations)})
    panels = {axis.get_title(): drawn(axis) for axis in figure.axes}
    assert panels["loss (cross entropy)"][1:] == [("evaluation", [[64, 5.5], [192, 3.5]])]
    assert list(panels)[5:] == ["accuracy: average", "accuracy: arc", "accuracy: piqa"]
    assert panels["accuracy: average"] == [("evaluation", [[64, 0.3], [128, 0.55]])]
    assert panels["accuracy: arc"] == [("evaluation", [[64, 0.25], [128, 0.5]])]
    assert panels["accuracy: piqa"] == [("evaluation", [[128, 0.6]])]
    curve, evaluated = figure.axes[0].get_lines()
    assert evaluated.get_marker() == "o"
    assert evaluated.get_color() == curve.get_color()


def test_incidents_are_lines_through_all_panels() -> None:
    figure = draw({"a": history(incidents=[(2, "hang")]), "b": history(incidents=[(0, "soft"), (2, "hang")])})
    for axis in figure.axes:
        assert [each for each in drawn(axis) if each[0] not in ("a", "b")] == [
            ("hang", [[128, 0], [128, 1]]),  # from the bottom to the top of the panel
            ("soft", [[0, 0], [0, 1]]),  # before the first step
            ("hang", [[128, 0], [128, 1]]),
        ]
    curve_a, hang_a, curve_b, soft_b, hang_b = figure.axes[0].get_lines()
    assert [line.get_linestyle() for line in (hang_a, soft_b, hang_b)] == ["--"] * 3
    assert hang_a.get_color() == hang_b.get_color() != soft_b.get_color()
    assert to_hex(hang_a.get_markerfacecolor()) == to_hex(curve_a.get_color())
    assert to_hex(hang_b.get_markerfacecolor()) == to_hex(curve_b.get_color())
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "hang", "soft"]


def test_checkpoints_are_marked_by_what_they_hold() -> None:
    runs = {"a": history(full=[2, 3], weights_alone=[3], deleted=[1]), "b": history(full=[1])}
    figure = draw(runs)
    marks = [line for line in figure.axes[0].get_lines() if line.get_label() not in runs]
    assert [(line.get_label(), np.asarray(line.get_xdata()).tolist(), line.get_marker()) for line in marks] == [
        ("full checkpoint", [128, 192], "^"),
        ("checkpoint of weights alone", [192], "^"),
        ("checkpoint, deleted since", [64], "|"),
        ("full checkpoint", [64], "^"),
    ]
    assert [line.get_markerfacecolor() for line in marks] == ["C0", "none", "C0", "C1"]
    heights = [float(np.asarray(line.get_ydata())[0]) for line in marks]
    assert heights[0] == heights[1] == heights[2] < heights[3] < 0.1
    assert figure.axes[0].get_ylim()[0] > 2  # the marks do not stretch the axis of the loss
    assert len(figure.axes[1].get_lines()) == 2


def test_names_are_as_short_as_tells_the_runs_apart(tmp_path: Path) -> None:
    dense, moe, other = (tmp_path / name for name in ("dense/run", "moe/run", "moe/other"))
    assert shortest_names([moe]) == {"run": moe}
    assert shortest_names([moe, other]) == {"run": moe, "other": other}
    assert shortest_names([dense, moe, other]) == {"dense/run": dense, "moe/run": moe, "moe/other": other}
    assert shortest_names([moe, moe.parent / ".." / "moe" / "run"]) == {"run": moe}


def test_png_is_written(tmp_path: Path) -> None:
    write(tmp_path / "run", lines(*STEPS))
    plot_runs([tmp_path / "run"], tmp_path / "plots" / "curves.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "plots" / "curves.png").shape
    assert (width, height) == (1800, 800)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["curves.png", "metrics.jsonl", "plots", "run"]


def test_failure_while_drawing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "run", lines(STEP))
    (tmp_path / "curves.png").write_text("old")

    def fail(canvas: object, file: Any) -> None:
        file.write(b"half a file")
        raise OSError("no font")

    monkeypatch.setattr(plot.FigureCanvasAgg, "print_png", fail)
    with pytest.raises(OSError, match="no font"):
        plot_runs([tmp_path / "run"], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "run"]


def test_run_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no metrics.jsonl"):
        plot_runs([tmp_path], tmp_path / "curves.png")
    assert list(tmp_path.iterdir()) == []
