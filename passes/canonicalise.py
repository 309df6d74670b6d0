"""Canonicalise: drops what export leaves behind and makes in-place operations functional where that is safe."""

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from optimus_compiler.graphs import is_view, storage_root, writes_in_place
from optimus_compiler.passes.base import Pass, PassReport
from optimus_compiler.passes.rewrite import CASTS
from optimus_compiler.program import Program

aten = torch.ops.aten

COPIES = {aten._to_copy.default, aten.lift_fresh_copy.default, aten.clone.default}
VIEWS = (aten.view.default, aten.reshape.default)
CHECKS = {aten._assert_tensor_metadata.default, aten._assert_scalar.default, aten.sym_constrain_range_for_size.default}


@dataclass(frozen=True)
class Canonicalise(Pass):
    """Gives later passes one form to match.

    1. Run-time checks of dtype, device and range go: shapes are static and were checked at capture.
    2. An alias, a cast to the dtype a value has already, a `contiguous` of a contiguous value: readers take the value.
       A copy goes too, unless something writes to it or to what it was copied from.
    3. A later pass may divide a dimension: a view leaves open (-1) the first size that is not its argument's, an expand
       all sizes that are.
    4. `x.op_(...)` becomes `x.op(...)` where nothing later reads x's storage under another name. Where something does
       (DeepSeek-V3 copies into slices), the write stays and AOTAutograd functionalises it with the aliasing in view.
    """

    def run(self, program: Program) -> PassReport:
        matches = 0
        for group in program.groups():
            graph = group[0].graph.graph
            written = {storage_root(node) for node in graph.nodes if writes_in_place(node)}
            for node in list(graph.nodes):
                if node.target in CHECKS:
                    graph.erase_node(node)
                elif (node.target in CASTS or node.target in COPIES) and _is_identity(node, written):
                    node.replace_all_uses_with(node.args[0])
                    graph.erase_node(node)
                elif writes_in_place(node) and _is_last_reader(graph, node):
                    node.target = _functional(node.target)
                elif (sizes := _open_sizes(node)) is not None:
                    node.args = (node.args[0], sizes)
                else:
                    continue
                matches += 1
        return self.report(matches)


def _is_identity(node: fx.Node, written: set[fx.Node]) -> bool:
    """Whether readers of the node may read its argument instead."""
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    before, after = source.meta["val"], node.meta["val"]
    if not isinstance(before, Tensor):
        return False
    if (node.target in COPIES or _argument(node, "copy")) and {storage_root(source), node} & written:
        return False
    same = before.dtype == after.dtype and before.device == after.device and before.shape == after.shape
    return same and before.stride() == after.stride()


def _open_sizes(node: fx.Node) -> list[int] | None:
    """The sizes of a view or an expand with -1 where a size may change; None where nothing is to be done."""
    if node.target not in (*VIEWS, aten.expand.default) or len(node.args) < 2:
        return None
    sizes: list[int] = list(node.args[1])  # type: ignore[arg-type]
    before = list(node.args[0].meta["val"].shape)  # type: ignore[union-attr]
    if any(not isinstance(size, int) for size in (*sizes, *before)) or -1 in sizes or 0 in sizes:
        return None
    if node.target is aten.expand.default:
        opened = [-1 if i < len(before) and size == before[-1 - i] else size for i, size in enumerate(reversed(sizes))]
        return opened[::-1] if -1 in opened else None
    first = next((i for i, (a, b) in enumerate(zip(before, sizes, strict=False)) if a != b), None)
    return None if first is None else [*sizes[:first], -1, *sizes[first + 1 :]]


def _argument(node: fx.Node, name: str) -> object:
    """The value of an operation's argument, given by position or by name; None where it is left out."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    position = names.index(name) if name in names else len(node.args)
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _functional(target: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """aten.div_.Tensor -> aten.div.Tensor"""
    name = target._schema.name.split("::")[1].removesuffix("_")
    return getattr(getattr(aten, name), target._overloadname)


def _is_last_reader(graph: fx.Graph, node: fx.Node) -> bool:
    """Whether everything after the write reads the storage only through the write's own result."""
    root = storage_root(node)
    if root.op == "placeholder":
        return False
    order = {n: i for i, n in enumerate(graph.nodes)}
    written = _views_through(node)
    later = [other for other in graph.nodes if order[other] > order[node]]
    read = {source for other in later for source in other.all_input_nodes}
    return not any(storage_root(source) is root for source in read - written)


def _views_through(node: fx.Node) -> set[fx.Node]:
    """The write's result and every view taken of it."""
    found, pending = {node}, [node]
    while pending:
        for user in pending.pop().users:
            if user not in found and is_view(user):
                found.add(user)
                pending.append(user)
    return found
