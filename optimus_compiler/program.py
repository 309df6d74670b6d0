"""Program: the object that passes transform: segments cut from one FX graph, a parameter table, a mesh, a history."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from optimus_compiler.graphs import copy_graph, eliminate_dead_code
from optimus_compiler.mesh import Mesh

Kind = Literal["const", "embed", "layer", "head"]
Role = Literal["expert", "dense"]

OVERFLOW = "overflow."  # begins the roles of outputs that say whether a row buffer was too small
WATCH, PROBE = "watch.", "probe."  # begin outputs and inputs by which values are watched (passes/watch_finite.py)
TRAINING = ("loss", "ce_loss", "aux_loss", "expert_counts")  # the outputs that a training step needs


class ProgramError(RuntimeError):
    """A program that breaks one of its own rules; the message names the segment and the rule."""


@dataclass(frozen=True)
class WatchPoint:
    """A watched value: what it is, and whether this rank has computed it or got it from others."""

    what: str
    is_local: bool


@dataclass(frozen=True)
class Source:
    """How a parameter is built from tensors of the model it was captured from, and back.

    The parameter is the concatenation, in row-major order of its leading dimensions, of the named tensors: one name is
    a plain reshape (the identity included), 2 * E names are per-expert gate and up projections to be stacked.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]  # of each named tensor

    def build(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        """The full parameter, of the given shape; a view of the model's own tensor when there is only one."""
        self.check(tensors)
        if len(self.names) == 1:
            return tensors[self.names[0]].detach().reshape(shape)
        return torch.stack([tensors[name].detach() for name in self.names]).reshape(shape)

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ValueError for a tensor that has another shape than the parameter is built from."""
        for name in self.names:
            if tuple(tensors[name].shape) != self.shape:
                raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}, the program needs {self.shape}")

    def split(self, full: Tensor) -> dict[str, Tensor]:
        """The model's tensors by name, as views of the full parameter."""
        return dict(zip(self.names, full.reshape(len(self.names), *self.shape), strict=True))


@dataclass(frozen=True)
class ParameterSpec:
    """Everything that is known about one weight: there is no other place where weight layout is kept."""

    name: str  # Hugging Face v5's, whatever the source
    shape: tuple[int, ...]  # full, not local
    dtype: torch.dtype
    source: Source
    role: Role = "dense"
    trainable: bool = True
    placement: Mapping[str, int] = field(default_factory=dict)  # mesh dimension -> sharded tensor dimension
    state: tuple[str, ...] = ()  # mesh dimensions over which the optimizer's state may be sharded
    stages: tuple[int, ...] = (0,)

    def replicated(self) -> tuple[str, ...]:
        """Mesh dimensions whose ranks hold the same values: over these the gradient is summed."""
        return tuple(name for name in ("dp", "ep", "tp") if name not in self.placement)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Shape of one rank's shard; ValueError where a placement does not divide the shape."""
        shape = list(self.shape)
        for dimension, axis in self.placement.items():
            parts = mesh.sizes()[dimension]
            if shape[axis] % parts:
                raise ProgramError(f"{self.name} {self.shape} cannot be cut in {parts} on dimension {axis}")
            shape[axis] //= parts
        return tuple(shape)

    def box(self, mesh: Mesh) -> tuple[slice, ...]:
        """This rank's shard of the full parameter, a slice for each tensor dimension."""
        starts = [0] * len(self.shape)
        local = self.local_shape(mesh)
        for dimension, axis in self.placement.items():
            starts[axis] = mesh.coordinate(dimension) * local[axis]
        return tuple(slice(start, start + size) for start, size in zip(starts, local, strict=True))


@dataclass
class Segment:
    """One function of the program applied to its own parameters. Segments of equal key share one graph object.

    The graph's placeholders are the parameters, then the inputs; its outputs are a tuple. Inputs and outputs are value
    names: a value is defined once, by a program input or by an earlier segment.
    """

    kind: Kind
    graph: fx.GraphModule
    parameters: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    stage: int = 0  # of the pipeline, counted over all ranks

    @property
    def key(self) -> str:
        """A hash of operations, arguments, shapes, dtypes and recompute tags: equal keys are the same function."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()[:12]

    def lines(self) -> list[str]:
        """The function as text without names, one line a node."""
        number = {node: i for i, node in enumerate(self.graph.graph.nodes)}

        def text(argument: Any) -> str:
            return str(fx.node.map_arg(argument, lambda node: _Numbered(number[node])))

        lines = []
        for node in self.graph.graph.nodes:
            value = node.meta.get("val") if node.op == "placeholder" else None
            what = f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}" if value is not None else ""
            what += f" {node.meta['recompute'].name}" if "recompute" in node.meta else ""
            lines.append(f"{node.op} {node.target if node.op == 'call_function' else ''} {what} "
                         f"{text(node.args)} {text(node.kwargs)}")  # fmt: skip
        return lines

    def placeholders(self) -> list[fx.Node]:
        """The graph's placeholders: parameters first, then inputs."""
        return [node for node in self.graph.graph.nodes if node.op == "placeholder"]

    def results(self) -> list[fx.Node]:
        """The nodes that the graph returns, in the order of `outputs`."""
        return list(self.graph.graph.output_node().args[0])  # type: ignore[arg-type]

    def add_input(self, name: str, value: Tensor) -> fx.Node:
        """Appends a placeholder to the graph (once for all segments that share it, by the caller) and returns it."""
        last = self.placeholders()[-1] if self.placeholders() else None
        graph = self.graph.graph
        with graph.inserting_after(last) if last else graph.inserting_before(next(iter(graph.nodes))):
            node = graph.placeholder(name)
        node.meta["val"] = value
        return node

    def add_output(self, node: fx.Node) -> None:
        """Appends a result to the graph (once for all segments that share it); the caller extends their `outputs`."""
        output = self.graph.graph.output_node()
        output.args = ((*output.args[0], node),)  # type: ignore[misc]


class _Numbered(str):
    """A node's number in the text of a segment."""

    def __new__(cls, number: int) -> "_Numbered":
        return super().__new__(cls, f"%{number}")

    __repr__ = str.__str__


@dataclass
class Program:
    """An ordered list of segments (const, embed, one a decoder layer, head) with the table of parameters."""

    segments: list[Segment]
    parameters: dict[str, ParameterSpec]
    inputs: tuple[str, ...]  # names of the values a caller gives
    outputs: dict[str, str]  # loss, ce_loss, aux_loss, expert_counts, logits, overflow.N -> value name
    constants: dict[str, Tensor]  # values of buffers that the const segment reads
    aliases: dict[str, str]  # further state-dict names of tied weights -> the name in a spec's source
    micro_batch_size: int
    sequence_length: int
    fake_mode: FakeTensorMode
    mesh: Mesh = field(default_factory=Mesh.abstract)
    schedule: str = "1f1b"  # of the pipeline, where there is one
    stage_ranks: tuple[int, ...] = (0,)  # of each pipeline stage, the coordinate on pp that runs it
    in_flight: tuple[int, ...] = (1,)  # of each stage, how many micro-batches' activations it holds at most
    watch_points: dict[int, tuple[WatchPoint, ...]] = field(default_factory=dict)  # of outputs watch.N, forward's order
    history: list[Any] = field(default_factory=list)  # PassReport, in order

    def groups(self) -> list[list[Segment]]:
        """Segments that share one graph, in program order: what a pass has to look at."""
        groups: dict[int, list[Segment]] = {}
        for segment in self.segments:
            groups.setdefault(id(segment.graph), []).append(segment)
        return list(groups.values())

    def deduplicate(self) -> None:
        """Lets segments of equal key share one graph object."""
        first: dict[str, fx.GraphModule] = {}
        for segment in self.segments:
            segment.graph = first.setdefault(segment.key, segment.graph)

    def node_count(self) -> int:
        """Operations in the program, each layer counted."""
        return sum(sum(node.op == "call_function" for node in s.graph.graph.nodes) for s in self.segments)

    def constant_values(self) -> dict[str, Tensor]:
        """Runs the const segment: rope tables, masks and zero accumulators, which depend on no input and no weight."""
        values: dict[str, Tensor] = {}
        for segment in self.segments:
            if segment.kind == "const":
                with torch.no_grad():
                    results = segment.graph(*(self.constants[name] for name in segment.inputs))
                values.update(zip(segment.outputs, results, strict=True))
        return values

    def overflows(self) -> tuple[str, ...]:
        """The outputs (0-d bool) that say of each bounded row buffer whether it was too small."""
        return tuple(role for role in self.outputs if role.startswith(OVERFLOW))

    def watched(self) -> tuple[str, ...]:
        """The outputs ([points] fp32) whose elements are finite where the watched values are."""
        return tuple(f"{WATCH}{number}" for number in self.watch_points)

    def stages_here(self) -> tuple[int, ...]:
        """The pipeline stages that this rank runs."""
        return self.stages_on(self.mesh.coordinate("pp"))

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The pipeline stages that run at a coordinate on pp."""
        return tuple(stage for stage, at in enumerate(self.stage_ranks) if at == rank)

    def is_here(self, spec: ParameterSpec) -> bool:
        """Whether a stage of this rank reads a parameter."""
        return any(stage in self.stages_here() for stage in spec.stages)

    def ranks_of(self, spec: ParameterSpec) -> tuple[int, ...]:
        """The coordinates on pp that hold a parameter: two for a tied weight whose stages are on different ranks."""
        return tuple(sorted({self.stage_ranks[stage] for stage in spec.stages}))

    def carried_into(self, stage: int) -> tuple[str, ...]:
        """The values that enter a stage from the one before: made earlier by a segment, read here or later."""
        segments = [segment for segment in self.segments if segment.kind != "const"]
        read = {name for segment in segments if segment.stage >= stage for name in segment.inputs}
        made = [name for segment in segments if segment.stage < stage for name in segment.outputs]
        return tuple(name for name in made if name in read)

    def example(self, name: str) -> Tensor:
        """The fake tensor of a value that a segment makes."""
        for segment in self.segments:
            if name in segment.outputs:
                return segment.results()[segment.outputs.index(name)].meta["val"]
        raise KeyError(name)

    def replace_parameters(self, old: Iterable[str], new: ParameterSpec) -> None:
        """Replaces entries of the parameter table by one new entry, in place of the first."""
        old = list(old)
        table: dict[str, ParameterSpec] = {}
        for name, spec in self.parameters.items():
            if name == old[0]:
                table[new.name] = new
            elif name not in old:
                table[name] = spec
        self.parameters = table

    def prune(self) -> None:
        """Drops what nobody reads: dead nodes, outputs, inputs and parameters of segments, until nothing changes."""
        while True:
            size = sum(len(s.graph.graph.nodes) + len(s.outputs) for s in self.segments)
            self._forward_passed_values()
            used = set(self.outputs.values()).union(*(segment.inputs for segment in self.segments))
            for group in self.groups():
                keep_outputs(
                    group, [i for i in range(len(group[0].outputs)) if any(s.outputs[i] in used for s in group)]
                )
            self.segments = [segment for segment in self.segments if segment.outputs]
            if size == sum(len(s.graph.graph.nodes) + len(s.outputs) for s in self.segments):
                break
        read = {name for segment in self.segments for name in segment.parameters}
        self.parameters = {name: spec for name, spec in self.parameters.items() if name in read}

    def _forward_passed_values(self) -> None:
        """A segment that returns one of its inputs unchanged: readers take the input itself."""
        for group in self.groups():
            placeholders = group[0].placeholders()
            passed = {i: placeholders.index(r) for i, r in enumerate(group[0].results()) if r.op == "placeholder"}
            for segment in group:
                rename = {segment.outputs[i]: segment.inputs[j - len(segment.parameters)] for i, j in passed.items()
                          if j >= len(segment.parameters)}  # fmt: skip
                for other in self.segments:
                    other.inputs = tuple(rename.get(name, name) for name in other.inputs)
                self.outputs = {role: rename.get(name, name) for role, name in self.outputs.items()}

    def verify(self) -> list[str]:
        """Checks every rule of a program; returns remarks, such as why two layers are not the same function.

        Raises ProgramError: a graph that does not lint or whose shapes do not propagate, a value that is read before it
        is defined, a trainable parameter that cannot reach the loss, a placement that does not divide its shape, an
        operation that writes into a segment's input.
        """
        from optimus_compiler.verify import verify

        return verify(self)


def keep_outputs(group: list[Segment], keep: list[int]) -> None:
    """Keeps some outputs of segments that share a graph, and what is needed to compute them."""
    graph = group[0].graph.graph
    output = graph.output_node()
    output.args = (tuple(output.args[0][i] for i in keep),)  # type: ignore[index]
    eliminate_dead_code(graph)
    placeholders, parameters = group[0].placeholders(), len(group[0].parameters)
    used = [i for i, node in enumerate(placeholders) if node.users]
    for node in placeholders:
        if not node.users:
            graph.erase_node(node)
    for segment in group:
        segment.outputs = tuple(segment.outputs[i] for i in keep)
        segment.parameters, segment.inputs = (
            tuple(segment.parameters[i] for i in used if i < parameters),
            tuple(segment.inputs[i - parameters] for i in used if i >= parameters),
        )
    group[0].graph.recompile()


def with_outputs(segment: Segment, marks: tuple[bool, ...], results: set[str]) -> tuple[Segment, tuple[bool, ...]]:
    """A copy of a segment that computes only some of its outputs, with the gradient marks that remain."""
    names = (*segment.parameters, *segment.inputs)
    copy = replace(segment, graph=copy_graph(segment.graph))
    keep_outputs([copy], [i for i, name in enumerate(segment.outputs) if name in results])
    mark_of = dict(zip(names, marks, strict=True))
    return copy, tuple(mark_of[name] for name in (*copy.parameters, *copy.inputs))
