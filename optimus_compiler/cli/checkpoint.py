"""`optimus checkpoint`: look at the checkpoints of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from optimus_compiler.cli.stages import StageProgress
    from optimus_compiler.runtime.checkpoint.folder import Checkpoint

app = typer.Typer(help="Look at the checkpoints of a run.", rich_markup_mode=None)


@app.callback()
def checkpoint() -> None:
    """Look at the checkpoints of a run."""


@app.command()
def verify(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, or one checkpoint of it.")],
) -> None:
    """Read every byte of a run's checkpoints.

    Compares all files with the sizes and checksums of their manifests. A damaged checkpoint is named, and the exit code
    is 2 then; a resumed run passes over it. One that a crash left half-written is listed and harms nothing.

    \b
    Example:
      optimus checkpoint verify run
      optimus checkpoint verify run/checkpoints/step-1000
    """
    from rich.console import Console
    from rich.table import Table

    from optimus_compiler.cli.stages import StageProgress
    from optimus_compiler.runtime.checkpoint.folder import Checkpoint, CheckpointFolder, open_checkpoint
    from optimus_compiler.runtime.checkpoint.manifest import CheckpointError

    folder = CheckpointFolder(run)
    checkpoints = folder.found() if folder.path.is_dir() else [open_checkpoint(run)]
    torn = folder.torn()
    if not checkpoints and not torn:
        print(f"{folder.path} holds no checkpoint")
        return
    table = Table("checkpoint", "step", "kind", "tensors", "files", "GiB", "state")
    faults = []
    with StageProgress() as progress:
        for each in checkpoints:
            if not isinstance(each, Checkpoint):
                faults.append(each.fault)
                table.add_row(each.path.name, "", each.kind, "", "", "", "damaged")
                continue
            fault = fault_with_progress(each, progress)
            if fault is not None:
                faults.append(f"{each.path} is damaged: {fault}")
            step, tensors = f"{each.manifest.progress.step:,}", f"{len(each.manifest.parameters):,}"
            files, size = f"{len(each.manifest.files):,}", f"{each.manifest.bytes / 2**30:.3f}"
            state = "whole" if fault is None else "damaged"
            table.add_row(each.path.name, step, each.kind, tensors, files, size, state)
    for path in torn:
        table.add_row(path.name, "", "", "", "", "", "half-written, never loaded")
    Console(width=None if Console().is_terminal else 120).print(table)
    for fault in faults:
        print(fault)
    if faults:
        raise CheckpointError(
            f"{run}: damaged checkpoints: {len(faults)} of {len(checkpoints)}: delete or restore them"
        )


def fault_with_progress(checkpoint: Checkpoint, progress: StageProgress) -> str | None:
    """The first file of a checkpoint that is not what was written, in words, as its bytes are read."""
    read = 0

    def on_bytes(count: int) -> None:
        nonlocal read
        read += count
        progress.show(f"verifying {checkpoint.path.name}", read, checkpoint.manifest.bytes)

    return checkpoint.manifest.fault(checkpoint.path, on_bytes=on_bytes)
