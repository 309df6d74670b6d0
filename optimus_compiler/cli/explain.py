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
    from optimus_compiler.capture import capture
    from optimus_compiler.config import load_config
    from optimus_compiler.explain import explain as explain_program
    from optimus_compiler.layout import check_layout
    from optimus_compiler.mesh import Mesh
    from optimus_compiler.passes import default_passes
    from optimus_compiler.runtime.run import load_model_config, pass_options, plain_model

    settings = load_config(config, overrides or ())
    model_config = load_model_config(settings.model)
    check_layout(settings, model_config)
    program = capture(
        plain_model(settings, model_config),
        sequence_length=settings.train.sequence_length or model_config.max_position_embeddings,
        micro_batch_size=settings.train.micro_batch_size,
    )
    wanted = settings.mesh
    program.mesh = Mesh.abstract(pp=wanted.pp, dp=wanted.dp, ep=wanted.ep, tp=wanted.tp)
    pipeline = default_passes(program.mesh, pass_options(settings))
    pipeline.run(program)
    print(explain_program(program, pipeline, graph))
