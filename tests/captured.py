"""Captured programs that tests share: a capture takes seconds, a copy of one nothing."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch

import optimus_compiler as optimus
from optimus_compiler.capture import capture
from optimus_compiler.graphs import copy_graph
from optimus_compiler.passes import PassOptions, default_passes
from optimus_compiler.program import Program
from tests.models.twins import olmo_config, olmoe_config, ours

B, S, V = 2, 8, 96


@cache
def _captured(kind: str, layers: int, inputs: tuple[str, ...], settings: tuple[tuple[str, object], ...]) -> Program:
    sizes: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": 32, "vocab_size": V, **dict(settings)}
    with torch.device("meta"):
        model = ours(olmoe_config(num_experts=8, **sizes) if kind == "olmoe" else olmo_config(**sizes))
    return capture(model, sequence_length=S, micro_batch_size=B, inputs=("input_ids", "labels", *inputs))


def captured(kind: str, layers: int = 2, inputs: tuple[str, ...] = (), **settings: object) -> Program:
    """A program of a small model to run passes on; the caller may change it. settings: of the model."""
    return copy_of(_captured(kind, layers, inputs, tuple(sorted(settings.items()))))


def copy_of(program: Program) -> Program:
    """A program that may be changed; segments that share a graph share a copy of it."""
    copies = {id(segment.graph): copy_graph(segment.graph) for segment in program.segments}
    return replace(
        program,
        segments=[replace(segment, graph=copies[id(segment.graph)]) for segment in program.segments],
        parameters=dict(program.parameters),
        outputs=dict(program.outputs),
        constants=dict(program.constants),
        history=[],
    )


def compiled_program(kind: str, mesh: optimus.Mesh, layers: int = 2, **options: object) -> Program:
    """The same after the default passes with these options, on a mesh that may be abstract."""
    program = captured(kind, layers)
    program.mesh = mesh
    default_passes(mesh, PassOptions(**options)).run(program)  # type: ignore[arg-type]
    return program
