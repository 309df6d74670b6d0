"""`optimus pretrain`: train the model of a configuration on prepared data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from optimus_compiler.compiled import CompiledModel
    from optimus_compiler.runtime.trainer import Run

ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="TOML file, or a bundled one: mula-7b-a1b, ...")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key of the configuration.")
]


def pretrain(
    config: ConfigArgument,
    output: Annotated[Path, typer.Option(help="Run directory: config.toml, metrics.jsonl, compile_cache/.")],
    overrides: SetOption = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write a trace of step 3 of every rank, for chrome://tracing.")
    ] = False,
) -> None:
    """Compile a model and pretrain it.

    The run directory gets config.toml with every default filled in, and metrics.jsonl with one line a step. Started by
    torchrun, mpiexec or srun, the processes are arranged as [mesh] says, and rank 0 alone prints and writes.

    \b
    Example:
      optimus pretrain run.toml --set data.path=data --set train.steps=1000 --output run
      torchrun --nproc-per-node 4 -m optimus_compiler pretrain run.toml --set mesh.dp=2 --set mesh.ep=2 --output run
    """
    from optimus_compiler import processes
    from optimus_compiler.config import load_config
    from optimus_compiler.runtime.trainer import open_run

    run = open_run(load_config(config, overrides or ()), output)
    train_with_progress(run, profile=profile)
    if run.mesh.rank == 0:
        print(f"{output}: {run.config.train.steps:,} steps done; curves: optimus plot {output}")
    processes.stop()


def train_with_progress(run: Run, *, profile: bool = False) -> CompiledModel:
    """Train `run` with rank 0's progress on stdout; returns the trained model."""
    from optimus_compiler.cli.progress import StepProgress
    from optimus_compiler.runtime.trainer import train

    if run.mesh.rank > 0:
        return train(run, profile=profile)
    with StepProgress(run.config.train.steps, every=run.config.log.every) as progress:
        return train(run, progress.show, profile=profile)
