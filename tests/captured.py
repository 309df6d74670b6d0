"""Captured programs that tests share: a capture takes seconds, a copy of one nothing."""

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import optimus_compiler as optimus
from optimus_compiler.capture import capture
from optimus_compiler.graphs import copy_graph
from optimus_compiler.passes import PassOptions, default_passes
from optimus_compiler.program import Program
from tests.models.twins import olmo_config, olmoe_config, ours

B, S, V = 2, 8, 96
OURS = ("optimus_compiler.models.", "torch.nn.")


def captured(kind: str, layers: int = 2, inputs: tuple[str, ...] = (), **settings: object) -> Program:
    """A program of a small model to run passes on; the caller may change it. settings: of the model."""
    sizes: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": 32, "vocab_size": V, **settings}
    with torch.device("meta"):
        model = ours(olmoe_config(num_experts=8, **sizes) if kind == "olmoe" else olmo_config(**sizes))
    return capture_once(model, sequence_length=S, micro_batch_size=B, inputs=("input_ids", "labels", *inputs))


def copy_of(program: Program) -> Program:
    """A program that may be changed; segments that share a graph share a copy of it."""
    copies = {id(segment.graph): copy_graph(segment.graph) for segment in program.segments}
    return replace(
        program,
        segments=[replace(segment, graph=copies[id(segment.graph)]) for segment in program.segments],
        parameters=dict(program.parameters),
        outputs=dict(program.outputs),
        constants=dict(program.constants),
        watch_points=dict(program.watch_points),
        history=[],
    )


_seen: dict[tuple[object, ...], Program] = {}


def capture_once(model: nn.Module, **settings: Any) -> Program:
    """capture, but models of ours that are equal in all that it reads are captured once in this process."""
    if any(not type(m).__module__.startswith(OURS) or "forward" in vars(m) for m in model.modules()):
        return capture(model, **settings)
    weights = [(n, p.shape, p.dtype, p.device, p.requires_grad) for n, p in model.named_parameters()]
    key = (type(model), repr(model), repr(model.config), *weights, *sorted(settings.items()))
    if key not in _seen:
        _seen[key] = capture(model, **settings)
    return copy_of(_seen[key])


def share_captures() -> None:
    """Lets optimus.compile use capture_once in this process."""
    sys.modules["optimus_compiler.compile"].capture = capture_once  # type: ignore[attr-defined]


def compiled_program(kind: str, mesh: optimus.Mesh, layers: int = 2, **options: object) -> Program:
    """The same after the default passes with these options, on a mesh that may be abstract."""
    program = captured(kind, layers)
    program.mesh = mesh
    default_passes(mesh, PassOptions(**options)).run(program)  # type: ignore[arg-type]
    return program
