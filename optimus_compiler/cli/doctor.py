"""`optimus doctor`: what this machine can do, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    folder: Annotated[Path, typer.Argument(help="Where runs are to be written.")] = Path(),
) -> None:
    """Check this machine.

    Versions, device, arithmetic, collectives (right sums, and how fast), file system, clock and locks. Under a launcher
    all ranks check their collectives together. The exit code is 1 when something is wrong.

    \b
    Example:
      optimus doctor
      mpiexec -n 24 -ppn 12 optimus doctor /lus/flare/projects/mine
    """
    from rich.console import Console
    from rich.table import Table

    from optimus_compiler import processes
    from optimus_compiler.runtime.doctor import examine

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
