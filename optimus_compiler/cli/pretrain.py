"""`optimus pretrain`: train the model of a configuration on prepared data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from optimus_compiler.compiled import CompiledModel
    from optimus_compiler.runtime.run import Run

ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="TOML file, or a bundled one: mula-7b-a1b, ...")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key of the configuration.")
]


def pretrain(
    config: ConfigArgument,
    output: Annotated[
        Path, typer.Option(help="Run directory: config.toml, metrics.jsonl, checkpoints/, compile_cache/.")
    ],
    overrides: SetOption = None,
    allow_changed: Annotated[
        list[str] | None,
        typer.Option("--allow-changed", metavar="SECTION.KEY", help="Continue although this setting has changed."),
    ] = None,
    start_from: Annotated[
        str | None,
        typer.Option("--from", metavar="NAME", help="Continue from this checkpoint of the run (step-N, model-N)."),
    ] = None,
    skip_steps: Annotated[
        int, typer.Option(min=0, help="Pass over the data of so many steps, on which the run diverged.")
    ] = 0,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write a trace of the third step of every rank, for chrome://tracing.")
    ] = False,
) -> None:
    """Compile a model and pretrain it.

    The run directory gets config.toml with every default filled in, metrics.jsonl with one line a step, and
    checkpoints; the same command continues a run that was stopped, in any layout. Started by torchrun, mpiexec or srun,
    the processes are arranged as [mesh] says, and rank 0 alone prints and writes.

    \b
    Example:
      optimus pretrain run.toml --set data.path=data --set train.steps=1000 --output run
      torchrun --nproc-per-node 4 -m optimus_compiler pretrain run.toml --set mesh.dp=2 --set mesh.ep=2 --output run
      optimus pretrain run.toml --set optimizer.lr=2e-4 --allow-changed optimizer.lr --from model-5000 --output run
    """
    from optimus_compiler import processes
    from optimus_compiler.config import load_config
    from optimus_compiler.runtime.run import open_run

    settings = load_config(config, overrides or ())
    run = open_run(
        settings,
        output,
        allow_changed=allow_changed or (),
        start_from=start_from,
        skip_steps=skip_steps,
        say=print,
    )
    if run.is_done:
        if run.mesh.rank == 0:
            print(f"{output}: all {run.config.train.steps:,} steps are done: raise train.steps to go on")
    else:
        train_with_progress(run, profile=profile)
    processes.stop()


def train_with_progress(run: Run, *, profile: bool = False) -> CompiledModel:
    """Train `run` with rank 0's progress on stdout; returns the trained model."""
    from optimus_compiler.cli.progress import StepProgress
    from optimus_compiler.runtime.trainer import train

    if run.mesh.rank > 0:
        return train(run, profile=profile)
    with StepProgress(run.config.train.steps, done=run.steps_done, every=run.config.log.every) as progress:
        compiled = train(run, progress.show, profile=profile, say=progress.say, on_evaluating=progress.evaluating)
    if progress.step == run.config.train.steps:
        print(f"{run.directory}: {progress.step:,} steps done; curves: optimus plot {run.directory}")
    return compiled
