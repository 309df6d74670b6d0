"""`optimus explain`: what the passes did to the model of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optimus_compiler.cli.pretrain import ConfigArgument, SetOption

if TYPE_CHECKING:
    from optimus_compiler.config import Config


def explain(
    config: ConfigArgument,
    graph: Annotated[bool, typer.Option("--graph", help="Also print the graph of each distinct segment.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one page instead: graphs, placements, timeline, memory.")
    ] = None,
    hardware: Annotated[str, typer.Option(help="For --html: aurora, h200, or a TOML file like theirs.")] = "aurora",
    overrides: SetOption = None,
) -> None:
    """Show what the passes do to a model.

    Every pass with what it matched and the nodes before and after, for the [mesh] of the configuration, whatever the
    number of processes; needs no data, allocates no weights and compiles nothing.

    \b
    Example:
      optimus explain mula-7b-a1b --set model.overrides.num_hidden_layers=2 --graph
      optimus explain mula-220b-a10b --html mula.html
    """
    from optimus_compiler.config import load_config
    from optimus_compiler.explain import explain as explain_program
    from optimus_compiler.runtime.run import passed_program

    settings = load_config(config, overrides or ())
    if html is None:
        print(explain_program(*passed_program(settings), graph))
    else:
        _write_page(settings, hardware, html)


def _write_page(settings: Config, hardware: str, file: Path) -> None:
    from rich.console import Console

    from optimus_compiler.runtime.files import whole_file
    from optimus_compiler.runtime.plan.estimate import estimate
    from optimus_compiler.runtime.plan.hardware import load_hardware
    from optimus_compiler.runtime.plan.page import page, run_with_snapshots
    from optimus_compiler.runtime.run import captured_program

    machine = load_hardware(hardware)
    with Console(stderr=True).status("capturing the model and running the passes"):
        program, pipeline = captured_program(settings)
        snapshots = run_with_snapshots(program, pipeline)
        text = page(estimate(program, settings, machine), program, snapshots)
    with whole_file(file) as writer:
        writer.write(text.encode())
    print(f"{file}: open it in a browser")
