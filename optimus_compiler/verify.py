"""The rules of a program, checked after every pass (Program.verify)."""

from itertools import pairwise
from typing import NoReturn

import torch
from torch import Tensor, fx

from optimus_compiler.graphs import storage_root, writes_in_place
from optimus_compiler.program import Program, ProgramError, Segment


def verify(program: Program) -> list[str]:
    """Raises ProgramError for the first broken rule; returns remarks. See Program.verify."""
    for segment in program.segments:
        _check_interface(program, segment)
    for group in program.groups():
        _check_graph(program, group[0])
    _check_values(program)
    _check_parameters(program)
    return _why_layers_differ(program)


def _fail(where: str, what: str) -> NoReturn:
    raise ProgramError(f"{where}: {what}")


def _label(program: Program, segment: Segment) -> str:
    return f"segment {program.segments.index(segment)} ({segment.kind})"


def _check_interface(program: Program, segment: Segment) -> None:
    where = _label(program, segment)
    expected, found = len(segment.parameters) + len(segment.inputs), len(segment.placeholders())
    if expected != found:
        _fail(where, f"the graph has {found} placeholders for {expected} parameters and inputs")
    if len(segment.outputs) != len(segment.results()):
        _fail(where, f"the graph returns {len(segment.results())} values for {len(segment.outputs)} outputs")
    for name, node in zip(segment.parameters, segment.placeholders(), strict=False):
        if name not in program.parameters:
            _fail(where, f"parameter {name} is not in the program's table")
        spec = program.parameters[name]
        value = node.meta["val"]
        if tuple(value.shape) != spec.local_shape(program.mesh) or value.dtype != spec.dtype:
            _fail(where, f"parameter {name} is {spec.dtype} {spec.local_shape(program.mesh)} in the table and "
                         f"{value.dtype} {tuple(value.shape)} in the graph")  # fmt: skip


def _check_graph(program: Program, segment: Segment) -> None:
    """Lints, writes into inputs, and shape propagation under FakeTensor."""
    where, graph = _label(program, segment), segment.graph.graph
    try:
        graph.lint()
    except RuntimeError as error:
        _fail(where, f"the graph does not lint: {error}")
    for node in graph.nodes:
        if writes_in_place(node) and storage_root(node).op == "placeholder":
            _fail(where, f"{node.name} ({node.target}) writes into {storage_root(node).name}, a segment's input")
    found = propagate(program, segment)
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor):
            continue
        if _has_symbols(value):
            continue
        if tuple(found[node].shape) != tuple(value.shape) or found[node].dtype != value.dtype:
            _fail(where, f"{node.name} is recorded as {value.dtype} {tuple(value.shape)} and computes "
                         f"{found[node].dtype} {tuple(found[node].shape)}")  # fmt: skip


def propagate(program: Program, segment: Segment) -> dict[fx.Node, Tensor]:
    """Runs a segment's graph on fake tensors; the value of every node."""
    found: dict[fx.Node, Tensor] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Tensor:
            found[n] = super().run_node(n)
            return found[n]

    shape_env = program.fake_mode.shape_env
    with program.fake_mode, torch.no_grad():
        values = [node.meta["val"] for node in segment.placeholders()]
        if shape_env is None:
            Recorder(segment.graph).run(*values)
        else:
            with shape_env.ignore_fresh_unbacked_symbols():
                Recorder(segment.graph).run(*values)
    return found


def _has_symbols(value: Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in value.shape)


def _check_values(program: Program) -> None:
    """Every value is defined once, before it is read, with the shape its readers expect."""
    defined: dict[str, Tensor | None] = dict.fromkeys([*program.inputs, *program.constants])
    for segment in program.segments:
        where = _label(program, segment)
        for name, node in zip(segment.inputs, segment.placeholders()[len(segment.parameters) :], strict=True):
            if name not in defined:
                _fail(where, f"reads {name}, which nothing before it defines")
            made, read = defined[name], node.meta["val"]
            if made is not None and (made.shape != read.shape or made.dtype != read.dtype):
                _fail(where, f"reads {name} as {read.dtype} {tuple(read.shape)}, which is made as "
                             f"{made.dtype} {tuple(made.shape)}")  # fmt: skip
        for name, node in zip(segment.outputs, segment.results(), strict=True):
            if name in defined:
                _fail(where, f"defines {name} a second time")
            defined[name] = node.meta["val"]
    for role, name in program.outputs.items():
        if name not in defined:
            _fail("program", f"the output {role} ({name}) is not defined by any segment")


def _check_parameters(program: Program) -> None:
    """Every trainable parameter reaches the loss through floating-point values."""
    reaching = {program.outputs["loss"]} if "loss" in program.outputs else set(program.outputs.values())
    reached: set[str] = set()
    for segment in reversed(program.segments):
        live: set[fx.Node] = {
            node for name, node in zip(segment.outputs, segment.results(), strict=True) if name in reaching
        }
        for node in reversed(segment.graph.graph.nodes):
            if node in live and node.op == "call_function":
                live.update(node.all_input_nodes)
        placeholders = segment.placeholders()
        names = (*segment.parameters, *segment.inputs)
        for name, node in zip(names, placeholders, strict=True):
            if node in live:
                (reached if name in segment.parameters else reaching).add(name)
    for name, spec in program.parameters.items():
        if spec.trainable and name not in reached:
            _fail("program", f"the trainable parameter {name} does not reach the loss")


def _why_layers_differ(program: Program) -> list[str]:
    """One remark for each layer that is not the same function as the layer before it."""
    remarks = []
    layers = [segment for segment in program.segments if segment.kind == "layer"]
    if not layers:
        remarks.append(
            "no module list named 'layers': the model is one function, and compile time grows with its depth"
        )
    for index, (before, after) in enumerate(pairwise(layers), 1):
        if before.graph is not after.graph:
            pairs = zip(before.lines(), after.lines(), strict=False)
            number = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(before.lines()), len(after.lines())))
            a, b = ([*segment.lines(), "(end)"][number].strip() for segment in (before, after))
            remarks.append(
                f"layer {index} is not the same function as layer {index - 1}: node {number} is {b!r}, not {a!r}"
            )
    return remarks
