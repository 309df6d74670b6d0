"""What a study leaves: its table on the terminal and in JSON, its curves in the same JSON, and a picture of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.tables import Rows, keep, show
from optimus_compiler.runtime.metrics import read_evaluations

Curve = Sequence[tuple[float, float]]  # points (x, y)


def keep_study(
    name: str,
    title: str,
    machine: str,
    columns: Sequence[str],
    rows: Rows,
    *,
    curves: Mapping[str, Curve],
    draw: Sequence[Callable[[Axes], None]],
    folder: Path,
) -> None:
    """Shows the table; writes folder/name.json with it and `curves`, and folder/name.png with a panel for each draw."""
    show(title, machine, columns, rows)
    keep(name, title, machine, columns, rows, folder)
    path = folder / f"{name}.json"
    kept = json.loads(path.read_text()) | {
        "curves": {label: [list(point) for point in curve] for label, curve in curves.items()}
    }
    path.write_text(json.dumps(kept, indent=1) + "\n")
    figure = Figure(figsize=(5.5 * len(draw), 4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(draw), squeeze=False)[0], draw, strict=True):
        panel(axes)
        axes.grid(alpha=0.3)
    FigureCanvasAgg(figure).print_png(str(folder / f"{name}.png"))
    print(f"{path}, {path.with_suffix('.png')}")


def validation_curve(run: Path) -> Curve:
    """(tokens seen in training, loss on held-out text) of each evaluation of a run."""
    return [(each.tokens, each.validation_loss) for each in read_evaluations(run) if each.validation_loss is not None]
