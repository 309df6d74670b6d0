"""Plots: what is drawn, the file that comes out, and that a failure leaves none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from optimus_compiler.runtime import plot
from optimus_compiler.runtime.plot import draw, plot_runs
from tests.runtime.test_metrics import STEP, lines, write


def test_curves_are_the_metrics_over_tokens() -> None:
    steps = [replace(STEP, step=i, tokens=64 * i, loss=6.0 - i, lr=i / 10, grad_norm=i + 0.5) for i in (1, 2, 3)]
    figure = draw({Path("a"): steps, Path("b"): steps[:2]})
    drawn = {
        axis.get_title(): [np.asarray(line.get_xydata()).tolist() for line in axis.get_lines()] for axis in figure.axes
    }
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["a", "b"]
    assert drawn == {
        "loss": [[[64, 5.0], [128, 4.0], [192, 3.0]], [[64, 5.0], [128, 4.0]]],
        "learning rate": [[[64, 0.1], [128, 0.2], [192, 0.3]], [[64, 0.1], [128, 0.2]]],
        "gradient norm": [[[64, 1.5], [128, 2.5], [192, 3.5]], [[64, 1.5], [128, 2.5]]],
        "tokens per second": [[[64, 640.0], [128, 640.0], [192, 640.0]], [[64, 640.0], [128, 640.0]]],
    }


def test_png_is_written(tmp_path: Path) -> None:
    write(tmp_path / "run", lines(STEP, replace(STEP, step=2, tokens=128, loss=1.0)))
    plot_runs([tmp_path / "run"], tmp_path / "curves.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "curves.png").shape
    assert (width, height) == (1200, 800)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "run"]


def test_failure_while_drawing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "run", lines(STEP))
    (tmp_path / "curves.png").write_text("old")

    def disk_full(canvas: object, path: str) -> None:
        Path(path).write_text("half a file")
        raise OSError("disk full")

    monkeypatch.setattr(plot.FigureCanvasAgg, "print_png", disk_full)
    with pytest.raises(OSError, match="disk full"):
        plot_runs([tmp_path / "run"], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "run"]


def test_run_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no metrics.jsonl"):
        plot_runs([tmp_path], tmp_path / "curves.png")
    assert list(tmp_path.iterdir()) == []
