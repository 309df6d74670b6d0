"""A deep model from a shallow one: layers are one function, so two of them say what all do.

Capturing and fusing 64 layers takes half a minute, two take seconds. The passes that look at one layer at a time run on
two; the others (pipeline, watching, recomputation, optimizer) run on the deepened program, for the real mesh.
"""

from __future__ import annotations

import re
from dataclasses import replace

from optimus_compiler.config import Config
from optimus_compiler.graphs import copy_graph
from optimus_compiler.layout import check_layout
from optimus_compiler.passes import Pass, PassPipeline, SplitPipeline, default_passes
from optimus_compiler.program import ParameterSpec, Program, ProgramError, Segment
from optimus_compiler.runtime.run import abstract_mesh, captured_program, load_model_config, pass_options

SHALLOW = 2


def planned_program(config: Config, front: Program | None = None) -> Program:
    """The program of a configuration after all passes for its mesh, as passed_program gives it.

    front: of front_program for the same model, micro-batch, ep and tp.
    """
    model = load_model_config(config.model)
    check_layout(config, model)
    program = deepen(front or front_program(config), model.num_hidden_layers)
    program.mesh = abstract_mesh(config)
    _, back = _passes(config)
    PassPipeline(back).run(program)
    return program


def front_program(config: Config) -> Program:
    """A program of two layers (or the model's one) after the passes that look at one layer at a time."""
    program, _ = captured_program(config, SHALLOW)
    front, _ = _passes(config)
    PassPipeline(front).run(program)
    return program


def _passes(config: Config) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
    """Those before SplitPipeline, and from it on."""
    passes = default_passes(replace(abstract_mesh(config), pp=2), pass_options(config)).passes
    at = next(index for index, each in enumerate(passes) if isinstance(each, SplitPipeline))
    return passes[:at], passes[at + (config.mesh.pp == 1) :]


def deepen(program: Program, layers: int) -> Program:
    """A copy with so many layers, each like the second: same graph, parameters and values numbered anew.

    Raises ProgramError where the two layers are not one function.
    """
    graphs = {id(segment.graph): copy_graph(segment.graph) for segment in program.segments}
    segments = [replace(segment, graph=graphs[id(segment.graph)]) for segment in program.segments]
    program = replace(
        program,
        history=[],
        watch_points=dict(program.watch_points),
        outputs=dict(program.outputs),
        parameters=dict(program.parameters),
    )
    own = [segment for segment in segments if segment.kind == "layer"]
    if layers <= len(own):
        return replace(program, segments=segments)
    first, second = own
    if first.graph is not second.graph:
        raise ProgramError("the model's layers are not one function: plan it with its real depth")
    chain, parameters = [first], {n: s for n, s in program.parameters.items() if n not in second.parameters}
    outputs = program.outputs
    for number in range(1, layers):
        chain.append(_next_layer(chain[-1], first, second, number))
        for name, like in zip(chain[-1].parameters, second.parameters, strict=True):
            parameters[name] = replace(program.parameters[like], name=name)
        outputs |= {value: value for value in chain[-1].outputs if _number(value) == number}
    last = dict(zip(second.outputs, chain[-1].outputs, strict=True))
    outputs = {role: value if _number(role) is not None else last.get(value, value) for role, value in outputs.items()}
    place = segments.index(first)
    others = [segment for segment in segments if segment.kind != "layer"]
    for segment in others:
        segment.inputs = tuple(last.get(name, name) for name in segment.inputs)
    return replace(
        program,
        segments=[*others[:place], *chain, *others[place:]],
        parameters=_in_order(parameters, [*others[:place], *chain, *others[place:]]),
        outputs=outputs,
    )


def _next_layer(before: Segment, first: Segment, second: Segment, number: int) -> Segment:
    """The layer after another: it reads of it what the second layer reads of the first."""
    reads = dict(zip(first.outputs, before.outputs, strict=True))
    return replace(
        second,
        parameters=tuple(re.sub(r"\blayers\.1\.", f"layers.{number}.", name) for name in second.parameters),
        inputs=tuple(reads.get(name, _numbered(name, number)) for name in second.inputs),
        outputs=tuple(_numbered(name, number, f"{name}@{number}") for name in second.outputs),
    )


def _number(name: str) -> int | None:
    """3 of overflow.3."""
    match = re.fullmatch(r"[a-z]+\.(\d+)", name)
    return int(match[1]) if match else None


def _numbered(name: str, number: int, otherwise: str | None = None) -> str:
    """overflow.1 becomes overflow.number; other names stay, or become `otherwise`."""
    if _number(name) is None:
        return otherwise or name
    return f"{name.split('.')[0]}.{number}"


def _in_order(parameters: dict[str, ParameterSpec], segments: list[Segment]) -> dict[str, ParameterSpec]:
    """By the segment that reads them first."""
    names = dict.fromkeys(name for segment in segments for name in segment.parameters)
    return {name: parameters[name] for name in names}
