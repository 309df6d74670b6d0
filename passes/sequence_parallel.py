"""Sequence parallelism: between the blocks that TensorParallel divides, a rank has a part of the tokens only."""

from typing import Any

import torch
from torch import fx

from optimus_compiler.passes.base import PassError
from optimus_compiler.passes.rewrite import insert, is_pointwise, tensor_of
from optimus_compiler.program import Program, Segment
from optimus_compiler.verify import propagate

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
BY_TOKEN = {aten.mean.dim, aten.layer_norm.default, aten.rms_norm.default, aten._to_copy.default}
RESHAPES = {aten.view.default, aten.reshape.default, aten.view_as.default}


def divide_sequence(program: Program, group: list[Segment], sums: list[fx.Node], parts: set[str]) -> None:
    """Norms and residual additions on T / tp tokens a rank, [T / tp, H]: the tokens of rank r are the r-th part.

    1. A block's sum over tp becomes a reduce-scatter: rank r gets the sums of its tokens.
    2. What is done token by token to such a part gives a part.
    3. Whatever else reads a part (a projection, a router, the head) reads all tokens, all-gathered once.

    sums: the activations that TensorParallel has summed in this graph. parts: names of values between segments that are
    parts; those of this group's segments are added.
    """
    graph = group[0].graph.graph
    divided: set[fx.Node] = set()
    whole: dict[fx.Node, fx.Node] = {}  # part -> all tokens
    shape = [program.micro_batch_size, program.sequence_length]
    tokens, tp = shape[0] * shape[1], program.mesh.tp
    if tokens % tp:
        raise PassError(f"sequence_parallel: tp={tp} does not divide the {tokens} tokens of a micro-batch: change "
                        "micro_batch_size, sequence_length or tp")  # fmt: skip
    for node, name in zip(group[0].placeholders()[len(group[0].parameters) :], group[0].inputs, strict=True):
        if name in parts:
            divided.add(node)
            with program.fake_mode:
                node.meta["val"] = tensor_of(node).new_empty(tokens // tp, tensor_of(node).shape[-1])

    def add(target: Any, *arguments: Any, like: fx.Node) -> fx.Node:
        return insert(program, graph, target, *arguments, like=like)

    def gathered(part: fx.Node, reader: fx.Node) -> fx.Node:
        if part not in whole:
            hidden = tensor_of(part).shape[-1]
            with graph.inserting_before(reader):
                rows = add(c10d.all_gather_into_tensor.default, part, tp, "tp", like=part)
                rows = add(c10d.wait_tensor.default, rows, like=part)
                whole[part] = add(aten.view.default, rows, [*shape, hidden], like=part)
        return whole[part]

    for node in list(graph.nodes):
        if node in sums:
            divided.add(_scatter(program, graph, node, tp))
            continue
        of_parts = [source for source in node.all_input_nodes if source in divided]
        if not of_parts or node.op == "output":
            continue
        if node.target in RESHAPES and node.args[0] in divided and list(tensor_of(node).shape[:2]) == shape:
            node.replace_all_uses_with(node.args[0])  # the block's result in the shape of its input: a part as it is
            graph.erase_node(node)
        elif is_pointwise(node) or node.target in BY_TOKEN:
            divided.add(node)
            with program.fake_mode, torch.no_grad():
                values = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
                node.meta["val"] = node.target(*values[0], **values[1])
        else:
            for part in of_parts:
                node.replace_input_with(part, gathered(part, node))
    for value, found in propagate(program, group[0]).items():
        value.meta["val"] = found
    results = group[0].results()
    parts.update(segment.outputs[i] for segment in group for i, result in enumerate(results) if result in divided)


def _scatter(program: Program, graph: fx.Graph, total: fx.Node, tp: int) -> fx.Node:
    """Step 1: the sum's own part in place of the whole sum."""
    (reduced,) = total.all_input_nodes
    (partial,) = reduced.all_input_nodes
    with graph.inserting_before(reduced):
        rows = insert(program, graph, aten.reshape.default, partial, [-1, tensor_of(partial).shape[-1]], like=partial)
        part = insert(program, graph, c10d.reduce_scatter_tensor.default, rows, "sum", tp, "tp", like=partial)
        part = insert(program, graph, c10d.wait_tensor.default, part, like=partial)
    total.replace_all_uses_with(part)
    graph.erase_node(total)
    graph.erase_node(reduced)
    return part
