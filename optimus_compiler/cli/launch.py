"""`optimus launch`: a run under supervision, with spare nodes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from optimus_compiler.cli.pretrain import ConfigArgument, SetOption


def launch(
    config: ConfigArgument,
    output: Annotated[Path, typer.Option(help="Run directory, as of `optimus pretrain`.")],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that train.")] = 1,
    spares: Annotated[int, typer.Option(min=0, help="Nodes that wait to replace one that fails.")] = 0,
    procs_per_node: Annotated[
        int | None, typer.Option(min=1, help="Training processes on a node; default 1, in a job the profile's.")
    ] = None,
    launcher: Annotated[
        Literal["local", "torchrun", "mpiexec", "srun"],
        typer.Option(help="What starts processes; local: all nodes are on this machine."),
    ] = "local",
    hostfile: Annotated[
        Path | None, typer.Option(help="Hosts, one a line; default: PBS_NODEFILE or the Slurm job's.")
    ] = None,
    launcher_args: Annotated[
        str, typer.Option(metavar="ARGS", help="Further arguments of the launcher, such as how it binds to cores.")
    ] = "",
    inject: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="A fault on purpose: step=7,node=1,kind=kill|stop|hang|nan|nan-all|slow|exit|oom|diskfull.",
        ),
    ] = None,
    write_job: Annotated[
        Literal["pbs"] | None, typer.Option(help="Write a job script to RUN/job.sh instead of starting.")
    ] = None,
    job_profile: Annotated[str, typer.Option(help="Site: aurora, or a TOML file like it.")] = "aurora",
    project: Annotated[str | None, typer.Option(help="Project that the job is charged to.")] = None,
    walltime: Annotated[str, typer.Option(metavar="HH:MM:SS", help="Of the job.")] = "1:00:00",
    queue: Annotated[str | None, typer.Option(help="Default: the profile's first that takes the job.")] = None,
    overrides: SetOption = None,
    allow_changed: Annotated[
        list[str] | None,
        typer.Option("--allow-changed", metavar="SECTION.KEY", help="Continue although this setting has changed."),
    ] = None,
) -> None:
    """Pretrain under supervision.

    A supervisor starts the training processes, watches them, finds out which node failed, replaces it by a spare and
    goes on from the newest whole checkpoint. What happened, and on what evidence, is in RUN/incidents.jsonl.

    \b
    Example:
      optimus launch run.toml --output run --nodes 3 --spares 2 --procs-per-node 2 --set mesh.dp=6
      optimus launch mula-7b-a1b --output run --nodes 64 --spares 2 --procs-per-node 12 --launcher mpiexec
      optimus launch mula-7b-a1b --output run --nodes 64 --spares 2 --write-job pbs --project MINE --walltime 6:00:00
    """
    from optimus_compiler.config import load_config
    from optimus_compiler.runtime.resilience.hosts import LOCAL, Node, find_nodes
    from optimus_compiler.runtime.resilience.inject import Injection
    from optimus_compiler.runtime.resilience.plan import Plan
    from optimus_compiler.runtime.resilience.supervisor import Supervisor

    settings = load_config(config, overrides or ())
    for specification in inject or ():
        Injection.parse(specification)
    arguments = ["pretrain", config, "--output", str(output)]
    for override in overrides or ():
        arguments += ["--set", override]
    for key in allow_changed or ():
        arguments += ["--allow-changed", key]
    if write_job is not None:
        _write_job(
            output,
            [*arguments[1:], *(word for each in inject or () for word in ("--inject", each))],
            job_profile,
            (nodes, spares, procs_per_node),
            project=project,
            walltime=walltime,
            queue=queue,
        )
        return
    local = [Node(f"node{number}", LOCAL) for number in range(nodes + spares)]
    found = local if launcher == "local" and hostfile is None else find_nodes(nodes + spares, hostfile)
    resilience = settings.resilience
    plan = Plan(
        arguments=tuple(arguments),
        run=output,
        nodes=tuple(found),
        training=nodes,
        per_node=procs_per_node or 1,
        launcher=launcher,
        launcher_arguments=tuple(shlex.split(launcher_args)),
        injections=tuple(inject or ()),
        max_restarts=100 if resilience.max_restarts is None else resilience.max_restarts,
        heartbeat_timeout=resilience.heartbeat_timeout,
        on_divergence=resilience.on_divergence,
    )
    output.mkdir(parents=True, exist_ok=True)
    code = Supervisor(plan, lambda sentence: print(sentence, flush=True)).run()
    raise typer.Exit(code)


def _write_job(
    output: Path,
    arguments: list[str],
    profile_name: str,
    sizes: tuple[int, int, int | None],
    *,
    project: str | None,
    walltime: str,
    queue: str | None,
) -> None:
    """RUN/job.sh: this very launch, inside a job of the site."""
    from optimus_compiler.runtime.resilience.job import JobError, load_profile, pbs_script

    if project is None:
        raise JobError("--write-job pbs: name the project that the job is charged to, with --project")
    profile = load_profile(profile_name)
    nodes, spares, per_node = sizes
    launch = ["launch", *arguments, "--nodes", str(nodes), "--spares", str(spares)]
    launch += ["--procs-per-node", str(per_node or profile.procs_per_node), "--launcher", profile.launcher]
    launch += [f"--launcher-args={profile.launcher_args}"] if profile.launcher_args else []
    script = pbs_script(
        profile, launch, name=output.name, nodes=nodes + spares, project=project, walltime=walltime, queue=queue
    )
    output.mkdir(parents=True, exist_ok=True)
    (output / "job.sh").write_text(script, encoding="utf-8")
    print(f"{output / 'job.sh'}: submit it with qsub {output / 'job.sh'}")
