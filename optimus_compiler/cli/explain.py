"""`optimus explain`: what the passes did to the model of a configuration."""

from __future__ import annotations

from typing import Annotated

import typer

from optimus_compiler.cli.pretrain import ConfigArgument, SetOption


def explain(
    config: ConfigArgument,
    graph: Annotated[bool, typer.Option("--graph", help="Also print the graph of each distinct segment.")] = False,
    overrides: SetOption = None,
) -> None:
    """Show what the passes do to a model.

    Every pass with what it matched and the nodes before and after, for the [mesh] of the configuration, whatever the
    number of processes; needs no data, allocates no weights and compiles nothing.

    \b
    Example:
      optimus explain mula-7b-a1b --set model.overrides.num_hidden_layers=2 --graph
    """
    from optimus_compiler.config import load_config
    from optimus_compiler.explain import explain as explain_program
    from optimus_compiler.runtime.run import passed_program

    print(explain_program(*passed_program(load_config(config, overrides or ())), graph))
