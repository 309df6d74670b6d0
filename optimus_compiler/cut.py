"""cut: one exported graph -> segments (const, embed, one a decoder layer, head), each node given to one of them."""

import re
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode

from optimus_compiler.graphs import eliminate_dead_code
from optimus_compiler.program import ParameterSpec, Program, Segment

aten = torch.ops.aten
LAYER = re.compile(r"(.*\blayers)\.(\d+)(?:\.|$)")
CONST, EMBED, HEAD = -2, -1, 1 << 30  # segment numbers; layers are 0, 1, 2, ...


@dataclass
class ExportedGraph:
    """What torch.export gave: the graph and what its placeholders and results are."""

    graph: fx.Graph
    parameters: dict[str, ParameterSpec]  # by placeholder
    constants: dict[str, Tensor]  # by placeholder: buffers without a state-dict entry and lifted constants
    inputs: tuple[str, ...]  # names of the remaining placeholders, in order
    outputs: tuple[str, ...]  # names of the results, in order


def cut(
    exported: ExportedGraph,
    *,
    micro_batch_size: int,
    sequence_length: int,
    aliases: dict[str, str],
    extra_inputs: tuple[str, ...] = (),
) -> Program:
    """Cuts the graph into segments.

    1. Assertions and dead code go: they belong to no segment.
    2. Each node is given to a segment (assign).
    3. Each segment becomes a graph of its own, its parameters and the values it reads as placeholders.
    4. Segments with equal keys share one graph.
    """
    graph = exported.graph
    for node in list(graph.nodes):
        if node.target in (aten._assert_tensor_metadata.default, aten._assert_scalar.default):
            graph.erase_node(node)
    eliminate_dead_code(graph)

    names = _name_values(exported)
    segment_of = assign(exported)
    results = dict(zip(exported.outputs, graph.output_node().args[0], strict=True))  # type: ignore[arg-type]
    outputs = {role: names[node] for role, node in results.items() if node is not None}
    kept = {node for node in results.values() if node is not None}
    segments = [_extract(exported, number, segment_of, names, kept) for number in sorted(set(segment_of.values()))]
    mode = detect_fake_mode([node.meta["val"] for node in graph.nodes if isinstance(node.meta.get("val"), Tensor)])
    assert mode is not None, "an exported graph has fake values"
    program = Program(
        segments=segments,
        parameters={spec.name: spec for spec in exported.parameters.values()},
        inputs=exported.inputs + extra_inputs,
        outputs=outputs,
        constants=exported.constants,
        aliases=aliases,
        micro_batch_size=micro_batch_size,
        sequence_length=sequence_length,
        fake_mode=mode,
    )
    program.prune()
    program.deduplicate()
    return program


def _name_values(exported: ExportedGraph) -> dict[fx.Node, str]:
    """Program inputs keep their own names, everything else its node's."""
    given = iter(exported.inputs)
    names = {}
    for node in exported.graph.nodes:
        is_input = (
            node.op == "placeholder" and node.name not in exported.parameters and node.name not in exported.constants
        )
        names[node] = next(given) if is_input else node.name
    return names


@dataclass
class _Reach:
    """What a node depends on."""

    layers: set[int] = field(default_factory=set)
    inputs: set[str] = field(default_factory=set)
    parameters: bool = False


def assign(exported: ExportedGraph) -> dict[fx.Node, int]:
    """Gives every operation to a segment.

    - An operation of a module under `layers.N` belongs to layer N.
    - An operation of a module beside the layer list (final norm, lm_head) that depends on a layer belongs to the head,
      and so does whatever reads a value of the head.
    - An operation of the model itself that depends on one layer belongs to it; one that depends on several belongs to
      the last of them if it adds to an accumulator (the two router statistics), else to the head.
    - Before any layer: what depends on no input and no parameter is const, the rest embed; what only the head reads
      is the head's.
    """
    names = _name_values(exported)
    reach: dict[fx.Node, _Reach] = {}
    segment: dict[fx.Node, int] = {}
    accumulators: set[fx.Node] = set()
    container = _layer_container(exported.graph)
    for node in exported.graph.nodes:
        if node.op == "output":
            continue
        reach[node] = _reach(node, exported, names, reach)
        if node.op == "placeholder":
            continue
        depends = reach[node].layers
        layer, path = _layer(node), _path(node)
        beside = bool(path) and not container.startswith(path)
        reads_head = any(segment.get(i) == HEAD for i in node.all_input_nodes)
        from_zero = any(i in accumulators or i.target is aten.zeros.default for i in node.all_input_nodes)
        accumulates = from_zero and node.target is aten.add.Tensor and not reads_head and not beside
        if layer is not None:
            reach[node].layers = {layer}
            segment[node] = layer
        elif not depends:
            segment[node] = EMBED if reach[node].inputs or reach[node].parameters else CONST
        elif accumulates:
            accumulators.add(node)
            segment[node] = max(depends)
        elif beside or reads_head or len(depends) > 1 or any(i in accumulators for i in node.all_input_nodes):
            segment[node] = HEAD
        else:
            segment[node] = max(depends)
    _move_to_head(exported.graph, segment)
    return segment


def _reach(node: fx.Node, exported: ExportedGraph, names: dict[fx.Node, str], reach: dict[fx.Node, _Reach]) -> _Reach:
    if node.op == "placeholder":
        given = names[node] in exported.inputs
        return _Reach(inputs={names[node]} if given else set(), parameters=node.name in exported.parameters)
    found = _Reach()
    for source in node.all_input_nodes:
        found.layers |= reach[source].layers
        found.inputs |= reach[source].inputs
        found.parameters |= reach[source].parameters
    return found


def _move_to_head(graph: fx.Graph, segment: dict[fx.Node, int]) -> None:
    """What only the head reads (the shifted labels, a count of tokens) is computed there."""
    for node in reversed(graph.nodes):
        if segment.get(node) in (EMBED, CONST):
            readers = [segment.get(user, HEAD) for user in node.users]
            if all(reader == HEAD for reader in readers):
                segment[node] = HEAD


def _layer_container(graph: fx.Graph) -> str:
    """Path of the module list that holds the decoder layers."""
    for node in graph.nodes:
        if node.op == "call_function":
            for path, _ in (node.meta.get("nn_module_stack") or {}).values():
                if match := LAYER.match(path):
                    return match.group(1)
    return ""


def _layer(node: fx.Node) -> int | None:
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        if match := LAYER.match(path):
            return int(match.group(2))
    return None


def _path(node: fx.Node) -> str:
    """Path of the innermost module that a node was traced in; empty for the loss around the model."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0] if stack else ""


def _extract(
    exported: ExportedGraph, number: int, segment_of: dict[fx.Node, int], names: dict[fx.Node, str], kept: set[fx.Node]
) -> Segment:
    """One segment's nodes as a graph of their own."""
    body = [node for node in exported.graph.nodes if segment_of.get(node) == number]
    own = set(body)
    read = list(dict.fromkeys(source for node in body for source in node.all_input_nodes if source not in own))
    parameters = [node for node in read if node.name in exported.parameters]
    inputs = [node for node in read if node.name not in exported.parameters]
    returned = [
        node for node in body if node in kept or any(segment_of.get(user, number) != number for user in node.users)
    ]

    graph, copy = fx.Graph(), {}
    for index, node in enumerate(parameters + inputs):
        copy[node] = graph.placeholder(f"p{index}" if index < len(parameters) else f"x{index - len(parameters)}")
        copy[node].meta["val"] = node.meta["val"]
    for node in body:
        copy[node] = graph.node_copy(node, lambda source: copy[source])
    graph.output(tuple(copy[node] for node in returned))
    return Segment(
        kind={CONST: "const", EMBED: "embed", HEAD: "head"}.get(number, "layer"),  # type: ignore[arg-type]
        graph=fx.GraphModule(nn.Module(), graph),
        parameters=tuple(exported.parameters[node.name].name for node in parameters),
        inputs=tuple(names[node] for node in inputs),
        outputs=tuple(names[node] for node in returned),
    )
