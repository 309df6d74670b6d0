"""`optimus doctor`: what this machine can do, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    folder: Annotated[Path, typer.Argument(help="Where runs are to be written.")] = Path(),
    tune: Annotated[
        str | None,
        typer.Option(metavar="CONFIG", help="First find the fastest tiles of the Triton kernels for this run's sizes."),
    ] = None,
) -> None:
    """Check this machine.

    Versions, device, arithmetic, collectives (right sums, and how fast), file system, clock and locks. Under a launcher
    all ranks check their collectives together. The exit code is 1 when something is wrong.

    --tune takes minutes on a GPU and keeps what it finds in ~/.cache/optimus_compiler for every later run there.

    \b
    Example:
      optimus doctor
      optimus doctor --tune run.toml
      mpiexec -n 24 -ppn 12 optimus doctor /lus/flare/projects/mine
    """
    from rich.console import Console
    from rich.table import Table

    from optimus_compiler import processes
    from optimus_compiler.runtime.doctor import examine

    if tune:
        _tune(tune)
    table = Table("", "", "")
    colours = {"ok": "green", "note": "yellow", "wrong": "red"}
    findings = list(examine(folder))
    for finding in findings:
        table.add_row(finding.what, f"[{colours[finding.state]}]{finding.state}", finding.detail)
    rank = processes.launch().rank
    wrong = [finding for finding in findings if finding.state == "wrong"]
    if rank == 0:
        Console().print(table)
    elif wrong:
        print(f"rank {rank}: {wrong[0].what}: {wrong[0].detail}")
    processes.stop()
    if wrong:
        raise typer.Exit(1)


def _tune(config: str) -> None:
    """Tunes for the expert blocks of a run, and says what that brought."""
    from optimus_compiler import processes
    from optimus_compiler.cli.stages import StageProgress
    from optimus_compiler.config import load_config
    from optimus_compiler.runtime.kernels.dispatch import require
    from optimus_compiler.runtime.run import DTYPES, block_sizes, passed_program

    settings = load_config(config)
    device = processes.device()
    require("triton", device)
    from optimus_compiler.runtime.kernels.triton.tune import PRODUCTS, tune

    dtype, lines = DTYPES[settings.train.precision], []
    with StageProgress() as progress:
        progress.show("tuning", 0, len(PRODUCTS))
        for product, tile, seconds, before in tune(device, dtype, **block_sizes(passed_program(settings)[0])):
            lines.append(f"{product}: {1e3 * seconds:.3f} ms, by default {1e3 * before:.3f} ms; {tile}")
            progress.show("tuning", len(lines), len(PRODUCTS))
    print(*lines, sep="\n")
