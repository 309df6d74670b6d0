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
    procs_per_node: Annotated[int, typer.Option(min=1, help="Training processes on a node.")] = 1,
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
    """
    from optimus_compiler.config import load_config
    from optimus_compiler.runtime.resilience.hosts import LOCAL, Node, find_nodes
    from optimus_compiler.runtime.resilience.inject import Injection
    from optimus_compiler.runtime.resilience.supervisor import Plan, Supervisor

    settings = load_config(config, overrides or ())
    for specification in inject or ():
        Injection.parse(specification)
    arguments = ["pretrain", config, "--output", str(output)]
    for override in overrides or ():
        arguments += ["--set", override]
    for key in allow_changed or ():
        arguments += ["--allow-changed", key]
    local = [Node(f"node{number}", LOCAL) for number in range(nodes + spares)]
    found = local if launcher == "local" and hostfile is None else find_nodes(nodes + spares, hostfile)
    resilience = settings.resilience
    plan = Plan(
        arguments=tuple(arguments),
        run=output,
        nodes=tuple(found),
        training=nodes,
        per_node=procs_per_node,
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
