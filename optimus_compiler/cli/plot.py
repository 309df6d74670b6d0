"""`optimus plot`: the curves of runs as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories; several share the axes.")],
    output: Annotated[Path | None, typer.Option(help="PNG to write; default: metrics.png in the first RUN.")] = None,
    smooth: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="STEPS", help="Mean over so many steps; 1: none; default: a hundredth of the longest run."
        ),
    ] = None,
    x: Annotated[
        Literal["tokens", "steps", "hours"],
        typer.Option(help="Horizontal axis: tokens seen, steps, or hours spent in these steps."),
    ] = "tokens",
) -> None:
    """Draw the curves of runs.

    Training and validation loss, learning rate, gradient norm, tokens per second, expert load, and the accuracy on each
    task; with the incidents of the run and its checkpoints. A curve is a mean over the last --smooth steps, with each
    step faint behind it.

    \b
    Example:
      optimus plot run
      optimus plot dense moe --output compare.png --x hours
    """
    from optimus_compiler.runtime.plot import plot_runs

    target = output or runs[0] / "metrics.png"
    plot_runs(runs, target, x=x, smooth=smooth)
    print(target)
