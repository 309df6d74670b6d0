"""What a study leaves: its table on the terminal and in JSON, its curves in the same JSON, and a picture of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.tables import Rows, keep, show
from optimus_compiler.runtime.files import whole_file
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
    points = {label: [[round(x, 6), round(y, 6)] for x, y in curve] for label, curve in curves.items()}
    keep(name, title, machine, columns, rows, folder, curves=points)
    figure = Figure(figsize=(5.5 * len(draw), 4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(draw), squeeze=False)[0], draw, strict=True):
        axes.grid(alpha=0.3)
        panel(axes)
    picture = BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    with whole_file(folder / f"{name}.png") as file:
        file.write(picture.getvalue())
    print(f"{folder / name}.json, .png")


def validation_curve(run: Path) -> Curve:
    """(tokens seen in training, loss on held-out text) of each evaluation of a run."""
    return [(each.tokens, each.validation_loss) for each in read_evaluations(run) if each.validation_loss is not None]
