"""ExpertParallel: every rank of `ep` holds some of the experts; tokens travel to them and back inside the graph."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from optimus_compiler.passes.base import Pass, PassError, PassReport
from optimus_compiler.passes.rewrite import EP_INDEX, insert, rank_coordinate, tensor_of, unpack, where
from optimus_compiler.program import OVERFLOW, Program, Segment

aten, ops, c10d = torch.ops.aten, torch.ops.optimus, torch.ops._c10d_functional


@dataclass(frozen=True)
class ExpertParallel(Pass):
    """Experts divided over the ranks of `ep` (paper, Algorithm 1, stages 1 and 5).

    Letters: S tokens of this rank, T = ep * S tokens of all, K choices a token, N experts, E = N / ep of them here.

    1. Shard every expert weight [N, ...] on `ep`: rank r holds experts r * E to (r + 1) * E - 1.
    2. All-gather the choices [S, K], the hidden states [S, H] and the routing weights [S, K] before index_tokens.
    3. index_tokens numbers the rows of the local experts, at most min(T * K, expert_rows * S * K) of them; what
       exceeds the bound sets an output `overflow.N` of the program, and the step is done again with T * K rows.
    4. Reduce-scatter the outputs [T, H] after reduce_outputs: a rank gets the sums of its own S tokens.
    5. Backward needs no work: the gradient of an all-gather is a reduce-scatter, and the other way round.

    dispatch="alltoall" sends each row to the rank of its expert alone (2 and 4 become all-to-alls): fewer bytes, but
    messages of irregular sizes, which cost one host read a layer.
    """

    expert_rows: float | Literal["exact"] = 2.0
    dispatch: Literal["allgather", "alltoall"] = "allgather"

    def run(self, program: Program) -> PassReport:
        matches, notes = 0, []
        for group in program.groups():
            blocks = [_block(node) for node in group[0].graph.graph.nodes if node.target is ops.index_tokens.default]
            for block in blocks:
                _shard_experts(program, group, block)
                first_expert = _first_expert(program, group, block)
                distribute = _all_gather if self.dispatch == "allgather" else _all_to_all
                needed, rows, most = distribute(program, group[0], block, first_expert, self.expert_rows)
                if rows < most:
                    _report_overflow(program, group, needed, rows)
                matches += len(group)
                local = tensor_of(block.grouped_mlp.args[3]).shape[0]  # type: ignore[arg-type]
                notes.append(f"{len(group)} x {local} experts a rank, room for {rows:,} rows of at most {most:,}")
            if not blocks and any(node.target is aten.topk.default for node in group[0].graph.graph.nodes):
                raise PassError(
                    f"a {group[0].kind} chooses experts by topk and has no index_tokens: "
                    "ExpertParallel looks for that, run FuseSparseMoE before it"
                )
        return self.report(matches, *notes or ["no experts: the ep ranks are further data-parallel ranks"])


@dataclass(frozen=True)
class _Block:
    """The three operations of a fused expert block."""

    index_tokens: fx.Node
    grouped_mlp: fx.Node
    reduce_outputs: fx.Node


def _block(index_tokens: fx.Node) -> _Block:
    after = {node.target: node for result in index_tokens.users for node in result.users}
    mlp = after[ops.grouped_mlp.default]
    return _Block(index_tokens, mlp, after[ops.reduce_outputs.default])


def _shard_experts(program: Program, group: list[Segment], block: _Block) -> None:
    experts, ep = tensor_of(block.grouped_mlp.args[3]).shape[0], program.mesh.ep  # type: ignore[arg-type]
    if experts % ep:
        raise PassError(
            f"{where(block.index_tokens)} has {experts} experts, which cannot be divided over ep={ep} ranks: "
            f"choose an ep that divides {experts}"
        )
    for weight in block.grouped_mlp.args[2:4]:
        position = group[0].placeholders().index(weight)  # type: ignore[arg-type]
        for name in {segment.parameters[position] for segment in group}:
            spec = program.parameters[name]
            program.parameters[name] = replace(spec, placement={**spec.placement, "ep": 0})
        whole = tensor_of(weight)  # type: ignore[arg-type]
        with program.fake_mode:
            weight.meta["val"] = whole.new_empty((experts // ep, *whole.shape[1:]))  # type: ignore[union-attr]


def _first_expert(program: Program, group: list[Segment], block: _Block) -> fx.Node:
    """The number of this rank's first expert, 0-d, computed from the rank's coordinate."""
    index = rank_coordinate(program, group, EP_INDEX, "ep")
    experts = tensor_of(block.grouped_mlp.args[3]).shape[0]  # type: ignore[arg-type]
    graph = group[0].graph.graph
    with graph.inserting_before(block.index_tokens):
        return insert(program, graph, aten.mul.Tensor, index, experts, like=block.index_tokens)


def _bounded(expert_rows: float | Literal["exact"], choices: int, ep: int) -> int:
    """Rows of a buffer for tokens of `choices` choices on each of `ep` ranks."""
    return ep * choices if expert_rows == "exact" else min(ep * choices, math.ceil(expert_rows * choices))


def _all_gather(
    program: Program, segment: Segment, block: _Block, first_expert: fx.Node, expert_rows: float | Literal["exact"]
) -> tuple[fx.Node, int, int]:
    """Steps 2 to 4; (the node that counts the rows needed, the rows there are, the most there can be)."""
    graph, ep = segment.graph.graph, program.mesh.ep
    index_tokens, mlp, reduce_outputs = block.index_tokens, block.grouped_mlp, block.reduce_outputs
    choices = tensor_of(index_tokens.args[0]).numel()  # type: ignore[arg-type]
    rows, most = _bounded(expert_rows, choices, ep), ep * choices

    def add(target: Any, *arguments: Any) -> fx.Node:
        return insert(program, graph, target, *arguments, like=index_tokens)

    def everywhere(collective: Any, value: Any, *arguments: Any) -> fx.Node:
        return add(c10d.wait_tensor.default, add(collective, value, *arguments, ep, "ep"))

    with graph.inserting_before(mlp):
        local_experts = tensor_of(mlp.args[3]).shape[0]  # type: ignore[arg-type]
        gather = c10d.all_gather_into_tensor.default
        indices, x, weights = (everywhere(gather, v) for v in (index_tokens.args[0], *mlp.args[:2]))
        tables = add(ops.index_tokens.default, indices, first_expert, local_experts, rows)
        _note_bound(tables, 3, most)
        *rows_of, needed = unpack(program, graph, tables, 4)
        both = add(ops.grouped_mlp.default, x, weights, *mlp.args[2:4], *rows_of)
        y_RH, _ = unpack(program, graph, both, 2)
        out = add(ops.reduce_outputs.default, y_RH, rows_of[1], rows_of[0])
        own = everywhere(c10d.reduce_scatter_tensor.default, out, "sum")
    reduce_outputs.replace_all_uses_with(own)
    return needed, rows, most


def _all_to_all(
    program: Program, segment: Segment, block: _Block, first_expert: fx.Node, expert_rows: float | Literal["exact"]
) -> tuple[fx.Node, int, int]:
    """Steps 2 to 4 with each row sent to its expert alone: a row received is a token of one choice."""
    graph, ep = segment.graph.graph, program.mesh.ep
    index_tokens, mlp, reduce_outputs = block.index_tokens, block.grouped_mlp, block.reduce_outputs
    choices = tensor_of(index_tokens.args[0]).numel()  # type: ignore[arg-type]
    rows, most = _bounded(expert_rows, choices, ep), ep * choices

    def add(target: Any, *arguments: Any) -> fx.Node:
        return insert(program, graph, target, *arguments, like=index_tokens)

    with graph.inserting_before(mlp):
        local_experts = tensor_of(mlp.args[3]).shape[0]  # type: ignore[arg-type]
        plan = add(ops.plan_exchange.default, index_tokens.args[0], local_experts * ep, rows, ep, "ep")
        _note_bound(plan, 2, most)
        token_P, row_SK, counts, indices_R1, needed = unpack(program, graph, plan, 5)
        sent = add(ops.send_tokens.default, *mlp.args[:2], token_P, row_SK, counts, rows, "ep")
        _note_bound(sent, 5, most)
        x_RH, weights_R1 = unpack(program, graph, sent, 2)
        tables = add(ops.index_tokens.default, indices_R1, first_expert, local_experts, None)
        token_R, row_R1, offsets_E, _ = unpack(program, graph, tables, 4)
        both = add(ops.grouped_mlp.default, x_RH, weights_R1, *mlp.args[2:4], token_R, row_R1, offsets_E)
        y_RH, _ = unpack(program, graph, both, 2)
        out = add(ops.reduce_outputs.default, y_RH, row_R1, token_R)
        own = add(ops.return_tokens.default, out, token_P, row_SK, counts, "ep")
    reduce_outputs.replace_all_uses_with(own)
    return needed, rows, most


def _report_overflow(program: Program, group: list[Segment], needed: fx.Node, rows: int) -> None:
    """An output of the program that is True when the local experts needed more rows than there are."""
    graph = group[0].graph.graph
    with graph.inserting_after(needed):
        flag = insert(program, graph, aten.gt.Scalar, needed, rows, like=needed)
    group[0].add_output(flag)
    for segment in group:
        name = f"{OVERFLOW}{len(program.overflows())}"
        segment.outputs = (*segment.outputs, name)
        program.outputs[name] = name


def _note_bound(node: fx.Node, argument: int, most: int) -> None:
    """Remembers which argument of a node bounds its rows, and the bound that always suffices."""
    node.meta["row_bound"] = (argument, most)


def lift_row_bounds(graph: fx.GraphModule) -> None:
    """Makes row buffers as large as they can ever need to be: a step that overflowed is done again with those."""
    for node in graph.graph.nodes:
        if "row_bound" in node.meta:
            argument, most = node.meta["row_bound"]
            node.args = (*node.args[:argument], most, *node.args[argument + 1 :])
    graph.recompile()
