"""`optimus slot`: what launchers start for `optimus launch` on every node; not for people."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def slot(
    address: Annotated[str, typer.Argument(help="Where the supervisor listens, host:port.")],
    node: Annotated[str, typer.Argument(help="The name of this node.")],
    run: Annotated[Path, typer.Argument(help="Run directory.")],
) -> None:
    """Stand for a rank of a node until the supervisor hangs up (started by `optimus launch`).

    \b
    Example:
      mpiexec -n 2 -hosts nid001 optimus slot 10.0.0.1:4711 nid001 run
    """
    from optimus_compiler import processes
    from optimus_compiler.runtime.resilience.slot import preload, run_slot

    preload()
    run_slot(address, node, processes.launch().local_rank, run)
