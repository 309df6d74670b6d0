"""`optimus plot`: the curves of runs as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories; several share the axes.")],
    output: Annotated[Path | None, typer.Option(help="PNG to write; default: metrics.png in the first RUN.")] = None,
) -> None:
    """Draw the curves of runs.

    Loss, learning rate, gradient norm and tokens per second, over tokens seen.

    \b
    Example:
      optimus plot run
      optimus plot dense moe --output compare.png
    """
    from optimus_compiler.runtime.plot import plot_runs

    target = output or runs[0] / "metrics.png"
    plot_runs(runs, target)
    print(target)
