"""Small edits of FX graphs that several passes share."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from optimus_compiler.program import Program, Segment

aten = torch.ops.aten

EP_INDEX = "ep_index"  # the name of a rank's coordinate on ep

# operations that may change a value's dtype, device or strides, or nothing at all
CASTS = {
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.alias.default,
    aten.contiguous.default,
}


def insert(
    program: Program, graph: fx.Graph, target: Callable[..., Any], *args: Any, like: fx.Node, **kwargs: Any
) -> fx.Node:
    """Adds a call at the graph's insertion point, with its fake value, as part of the module that `like` is part of."""
    node = graph.call_function(target, args, kwargs)
    node.meta["nn_module_stack"] = dict(like.meta.get("nn_module_stack") or {})
    with program.fake_mode, torch.no_grad():
        node.meta["val"] = target(*fx.node.map_arg(args, lambda source: source.meta["val"]), **kwargs)
    return node


def unpack(program: Program, graph: fx.Graph, node: fx.Node, count: int) -> list[fx.Node]:
    """The results of an operation that returns a tuple."""
    return [insert(program, graph, operator.getitem, node, i, like=node) for i in range(count)]


def module_paths(node: fx.Node) -> list[str]:
    """Paths of the modules a node was traced in, outermost first."""
    return [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def where(node: fx.Node) -> str:
    """The module a node was traced in, for messages; its own name where none is recorded."""
    return (module_paths(node) or [node.name])[-1]


def tensor_of(node: Any) -> Tensor:
    """The fake tensor of a node."""
    return node.meta["val"]


def is_pointwise(node: fx.Node) -> bool:
    """Whether an operation takes element by element, casts included."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in CASTS


def ancestors(node: fx.Node) -> set[fx.Node]:
    """A node and everything it depends on."""
    found, pending = {node}, [node]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                pending.append(source)
    return found


def chooses_experts(linear: fx.Node, steps: int = 12) -> bool:
    """Whether a linear makes the scores that experts are chosen by (or, under forced routing, weighted by)."""
    frontier = {linear} if linear.target is aten.linear.default else set()
    for _ in range(steps):
        frontier = {user for source in frontier for user in source.users}
        if any(user.target in (aten.topk.default, aten.gather.default) for user in frontier):
            return True
    return False


def rank_coordinate(program: Program, group: list[Segment], name: str, dimension: str) -> fx.Node:
    """The placeholder of this rank's coordinate (0-d int64) in segments that share a graph; added where it is missing.

    The coordinate is an input and not a number in the graph, so that all ranks run one graph.
    """
    if name in group[0].inputs:
        return group[0].placeholders()[len(group[0].parameters) + group[0].inputs.index(name)]
    program.constants[name] = torch.tensor(program.mesh.coordinate(dimension))
    with program.fake_mode:
        node = group[0].add_input(name, torch.empty((), dtype=torch.int64))
    for segment in group:
        segment.inputs = (*segment.inputs, name)
    return node
