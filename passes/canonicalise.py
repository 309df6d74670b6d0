"""Canonicalise: drops what export leaves behind and makes in-place operations functional where that is safe."""

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from optimus_compiler.graphs import is_view, storage_root, writes_in_place
from optimus_compiler.passes.base import Pass, PassReport
from optimus_compiler.program import Program

aten = torch.ops.aten

CASTS = {
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten._to_copy.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
    aten.contiguous.default,
}
CHECKS = {aten._assert_tensor_metadata.default, aten._assert_scalar.default, aten.sym_constrain_range_for_size.default}


@dataclass(frozen=True)
class Canonicalise(Pass):
    """Gives later passes one form to match.

    1. Run-time checks of dtype, device and range go: shapes are static and were checked at capture.
    2. An alias, a cast to the dtype a value has already, a `contiguous` of a contiguous value: readers take the value.
    3. `x.op_(...)` becomes `x.op(...)` where nothing later reads x's storage under another name. Where something does
       (DeepSeek-V3 copies into slices), the write stays and AOTAutograd functionalises it with the aliasing in view.
    """

    def run(self, program: Program) -> PassReport:
        matches = 0
        for group in program.groups():
            graph = group[0].graph.graph
            for node in list(graph.nodes):
                if node.target in CHECKS:
                    graph.erase_node(node)
                elif node.target in CASTS and _is_identity(node):
                    node.replace_all_uses_with(node.args[0])
                    graph.erase_node(node)
                elif writes_in_place(node) and _is_last_reader(graph, node):
                    node.target = _functional(node.target)
                else:
                    continue
                matches += 1
        return self.report(matches)


def _is_identity(node: fx.Node) -> bool:
    before, after = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    if not isinstance(before, Tensor) or node.kwargs.get("copy"):
        return False
    same = before.dtype == after.dtype and before.device == after.device and before.shape == after.shape
    return same and before.stride() == after.stride()


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
