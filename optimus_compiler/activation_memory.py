"""How much memory activations take: read from the forward and backward graphs that AOTAutograd makes of each segment.

Everything is traced on fake tensors: nothing is computed, no process group is needed. The numbers are those of the
backend aot_eager, which runs the graphs as they are; Inductor's fusion needs less for what happens in between.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from optimus_compiler.cost import flop_counter
from optimus_compiler.gradient_buffers import add_gradient_buffers
from optimus_compiler.graphs import copy_graph
from optimus_compiler.lower import gradient_marks, trace
from optimus_compiler.program import Program, Segment, with_outputs
from optimus_compiler.runtime.kernels.linear_logsumexp import PIECE

ops = torch.ops.optimus
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class SegmentMemory:
    """Bytes of one segment and one micro-batch: kept from forward to backward, and beyond that at the worst moment."""

    saved: int
    forward: int
    backward: int  # gradients of its weights and inputs included
    backward_flops: int  # floating-point operations of backward, those done again included


def parse_bytes(text: str) -> int:
    """The bytes of "8 GiB" or "512 MiB". Raises ValueError for what is not a positive number and a unit."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    size = float(match[1]) * UNITS.get(match[2], 0) if match else 0
    if size < 1:
        raise ValueError(f"memory_budget={text!r} is no size: write a number and a unit, such as '8 GiB' or '512 MiB'")
    return int(size)


def activation_bytes(program: Program, stage: int = 0) -> int:
    """The most that a rank of a stage holds in activations during a step, with the micro-batches in flight there."""
    marks = gradient_marks(program)
    segments = [segment for segment in program.segments if segment.kind != "const" and segment.stage == stage]
    return peak(program, stage, [segment_memory(program, segment, marks[id(segment.graph)]) for segment in segments])


def peak(program: Program, stage: int, segments: Sequence[SegmentMemory]) -> int:
    """Bytes at the worst moment of a step, from those of a stage's segments in order.

    That is when the last of the micro-batches in flight is being computed: all others keep what all segments save, it
    keeps what the segments before the current one save, and the current one needs most beyond that. Not counted: the
    buffers in which torch's stages receive, which stay from step to step.
    """
    total = sum(segment.saved for segment in segments)
    before = worst = 0
    for segment in segments:
        worst = max(worst, before + segment.saved + max(segment.forward, segment.backward))
        before += segment.saved
    return (program.in_flight[stage] - 1) * total + worst


_known: dict[tuple[str, tuple[bool, ...], tuple[int, ...]], SegmentMemory] = {}  # a key says all about a graph


def segment_memory(program: Program, segment: Segment, marks: tuple[bool, ...]) -> SegmentMemory:
    """What one segment needs; marks: which of its placeholders need gradients. Equal segments are traced once."""
    segment, marks = _as_trained(program, segment, marks)
    there = _there_anyway(program, segment)
    known = (segment.key, marks, there)
    if known not in _known:
        forward, backward = traced(program, segment, marks)
        placeholders = list(forward.graph.find_nodes(op="placeholder"))
        external = _storages([placeholders[i] for i in (*there, *range(len(marks), len(placeholders)))])
        results: Any = forward.graph.output_node().args[0]
        kept = {s: n for s, n in _sized(results[len(segment.outputs) :]).items() if s not in external}
        in_forward, in_backward, flops = _most_alive(forward, external | set(kept)), 0, 0
        if backward is not None:
            held = list(backward.graph.find_nodes(op="placeholder"))
            tangents = [node for node in held if "tangents" in node.name]
            in_backward = _most_alive(backward, _storages(held)) + sum(_sized(tangents).values())
            flops = _flops(program, segment, backward)
        _known[known] = SegmentMemory(sum(kept.values()), in_forward, in_backward, flops)
    return _known[known]


def traced(program: Program, segment: Segment, marks: tuple[bool, ...]) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """The forward and backward graphs of a segment as a training step runs them, gradient buffers of experts included;
    marks: which of its placeholders need gradients."""
    segment, marks = _as_trained(program, segment, marks)
    run = replace(segment, graph=copy_graph(segment.graph))
    buffers = add_gradient_buffers(run, _expert_tables(program, segment))
    return trace(run.graph, run.placeholders(), (*marks, *(False for _ in buffers)))


def _as_trained(program: Program, segment: Segment, marks: tuple[bool, ...]) -> tuple[Segment, tuple[bool, ...]]:
    """A training step asks for no logits: the head is compiled without them."""
    logits = program.outputs.get("logits")
    if logits not in segment.outputs or len(segment.outputs) == 1:
        return segment, marks
    return with_outputs(segment, marks, set(segment.outputs) - {logits})


def _expert_tables(program: Program, segment: Segment) -> dict[str, Tensor]:
    """Fake tensors like the trainable expert weights of a segment: backward adds to gradients that are there."""
    nodes = dict(zip(segment.parameters, segment.placeholders(), strict=False))
    experts = [name for name in nodes
               if program.parameters[name].role == "expert" and program.parameters[name].trainable]  # fmt: skip
    with program.fake_mode:
        return {name: torch.empty_like(nodes[name].meta["val"]) for name in experts}


def _there_anyway(program: Program, segment: Segment) -> tuple[int, ...]:
    """Placeholders that are no activations: parameters, inputs of the program, constants."""
    made = {name for other in program.segments if other.kind != "const" for name in other.outputs}
    names = (*segment.parameters, *segment.inputs)
    return tuple(index for index, name in enumerate(names) if name not in made)


def _most_alive(graph: fx.GraphModule, external: set[Any]) -> int:
    """The most bytes alive at one node, of what the graph itself allocates; a value dies after its last reader."""
    last: dict[Any, int] = {}
    nodes = list(graph.graph.nodes)
    for index, node in enumerate(nodes):
        for storage in _storages([node, *node.all_input_nodes]):
            last[storage] = len(nodes) if node.op == "output" else index
    live: dict[Any, int] = {}
    most = 0
    for index, node in enumerate(nodes):
        if node.op == "call_function":
            live.update({s: n for s, n in _sized([node]).items() if s not in external})
            most = max(most, sum(live.values()) + _scratch(node))
        for storage in [storage for storage in live if last[storage] <= index]:
            del live[storage]
    return most


def _scratch(node: fx.Node) -> int:
    """What an operation of ours allocates inside (the CPU kernels)."""
    if node.target in (ops.grouped_mlp_backward.default, ops.grouped_mlp_backward_into.default):
        dy_RH = (node.kwargs.get("dy_RH") or node.args[0]).meta["val"]  # type: ignore[union-attr]
        return dy_RH.numel() * dy_RH.element_size()
    if node.target in (ops.linear_logsumexp.default, ops.linear_logsumexp_backward.default):
        is_forward = node.target is ops.linear_logsumexp.default
        x_TH, w_VH = (argument.meta["val"] for argument in node.args[0 if is_forward else 2 :][:2])  # type: ignore[union-attr]
        # a piece of logits in fp32; with its exponentials, or narrowed for the products
        item = 8 if is_forward else 4 + x_TH.element_size() % 4
        return item * min(PIECE, x_TH.shape[0] * w_VH.shape[0])
    return 0


def _tensors(nodes: Sequence[Any]) -> list[Tensor]:
    values = [node.meta.get("val") for node in nodes if isinstance(node, fx.Node)]
    flat = [part for value in values for part in (value if isinstance(value, (tuple, list)) else (value,))]
    return [value for value in flat if isinstance(value, Tensor)]


def _storages(nodes: Sequence[Any]) -> set[Any]:
    return set(_sized(nodes))


def _sized(nodes: Sequence[Any]) -> dict[Any, int]:
    """The storages behind nodes with their bytes: views of one storage count once."""
    return {StorageWeakRef(value.untyped_storage()): value.untyped_storage().nbytes() for value in _tensors(nodes)}


def _flops(program: Program, segment: Segment, backward: fx.GraphModule) -> int:
    with program.fake_mode, flop_counter(program, segment) as counter:
        inputs = [torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
                  for value in _tensors(list(backward.graph.find_nodes(op="placeholder")))]  # fmt: skip
        fx.Interpreter(backward).run(*inputs)
    return counter.get_total_flops()
