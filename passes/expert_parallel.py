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
        if program.mesh.ep == 1:
            return self.report(0, "ep is 1: every rank holds all experts")
        matches, notes = 0, []
        for group in program.groups():
            blocks = [_Block.of(program, group, node) for node in group[0].graph.graph.nodes
                      if node.target is ops.index_tokens.default]  # fmt: skip
            for block in blocks:
                _shard_experts(block)
                rows = block.most_rows
                if self.expert_rows != "exact":
                    rows = min(rows, math.ceil(self.expert_rows * block.choices))
                distribute = _all_gather if self.dispatch == "allgather" else _all_to_all
                with block.graph.inserting_before(block.grouped_mlp):
                    out, needed = distribute(block, rows)
                    if rows < block.most_rows:
                        _report_overflow(block, needed, rows)
                block.reduce_outputs.replace_all_uses_with(out)
                matches += len(group)
                notes.append(f"{len(group)} x {block.local_experts} experts a rank, room for {rows:,} rows of at most "
                             f"{block.most_rows:,}")  # fmt: skip
            if not blocks and any(node.target is aten.topk.default for node in group[0].graph.graph.nodes):
                raise PassError(
                    f"a {group[0].kind} chooses experts by topk and has no index_tokens: "
                    "ExpertParallel looks for that, run FuseSparseMoE before it"
                )
        return self.report(matches, *notes or ["no experts: the ep ranks are further data-parallel ranks"])


@dataclass(frozen=True)
class _Block:
    """The three operations of a fused expert block, in the graph that a group of segments shares."""

    program: Program
    group: list[Segment]
    index_tokens: fx.Node
    grouped_mlp: fx.Node
    reduce_outputs: fx.Node

    @classmethod
    def of(cls, program: Program, group: list[Segment], index_tokens: fx.Node) -> "_Block":
        after = {node.target: node for result in index_tokens.users for node in result.users}
        return cls(program, group, index_tokens, after[ops.grouped_mlp.default], after[ops.reduce_outputs.default])

    @property
    def graph(self) -> fx.Graph:
        return self.group[0].graph.graph

    @property
    def tokens(self) -> tuple[fx.Node, fx.Node, fx.Node]:
        """This rank's choices [S, K], hidden states [S, H] and routing weights [S, K]."""
        return self.index_tokens.args[0], *self.grouped_mlp.args[:2]  # type: ignore[return-value]

    @property
    def experts(self) -> tuple[fx.Node, fx.Node]:
        """Gate and up, and down projections; sharded once _shard_experts has run."""
        return self.grouped_mlp.args[2:4]  # type: ignore[return-value]

    @property
    def local_experts(self) -> int:
        return tensor_of(self.experts[1]).shape[0]

    @property
    def choices(self) -> int:
        """S * K."""
        return tensor_of(self.tokens[0]).numel()

    @property
    def most_rows(self) -> int:
        """T * K: every choice of every rank."""
        return self.program.mesh.ep * self.choices

    def add(self, target: Any, *arguments: Any) -> fx.Node:
        return insert(self.program, self.graph, target, *arguments, like=self.index_tokens)

    def results(self, node: fx.Node, count: int) -> list[fx.Node]:
        return unpack(self.program, self.graph, node, count)


def _shard_experts(block: _Block) -> None:
    """Step 1: in the table of parameters, and in the graph."""
    program, experts, ep = block.program, block.local_experts, block.program.mesh.ep
    if experts % ep:
        raise PassError(
            f"{where(block.index_tokens)} has {experts} experts, which cannot be divided over ep={ep} ranks: "
            f"choose an ep that divides {experts}"
        )
    for weight in block.experts:
        position = block.group[0].placeholders().index(weight)
        for name in {segment.parameters[position] for segment in block.group}:
            spec = program.parameters[name]
            program.parameters[name] = replace(spec, placement={**spec.placement, "ep": 0})
        whole = tensor_of(weight)
        with program.fake_mode:
            weight.meta["val"] = whole.new_empty((experts // ep, *whole.shape[1:]))


def _all_gather(block: _Block, rows: int) -> tuple[fx.Node, fx.Node]:
    """Steps 2 to 4; (this rank's outputs [S, H], how many rows the local experts needed)."""

    def with_all_ranks(collective: Any, *arguments: Any) -> fx.Node:
        return block.add(c10d.wait_tensor.default, block.add(collective, *arguments, block.program.mesh.ep, "ep"))

    indices_TK, x_TH, weights_TK = (with_all_ranks(c10d.all_gather_into_tensor.default, own) for own in block.tokens)
    out_TH, needed = _compute(block, indices_TK, x_TH, weights_TK, rows)
    return with_all_ranks(c10d.reduce_scatter_tensor.default, out_TH, "sum"), needed


def _all_to_all(block: _Block, rows: int) -> tuple[fx.Node, fx.Node]:
    """Steps 2 to 4 with each row sent to its expert alone: a row received is a token of one choice."""
    indices_SK, x_SH, weights_SK = block.tokens
    ep = block.program.mesh.ep
    plan = block.add(ops.plan_exchange.default, indices_SK, block.local_experts * ep, rows, ep, "ep")
    token_P, row_SK, counts, indices_R1, needed = block.results(plan, 5)
    sent = block.add(ops.send_tokens.default, x_SH, weights_SK, token_P, row_SK, counts, rows, "ep")
    x_RH, weights_R1 = block.results(sent, 2)
    for node, argument in ((plan, 2), (sent, 5)):
        _note_bound(node, argument, block.most_rows)
    out_RH, _ = _compute(block, indices_R1, x_RH, weights_R1, rows)
    return block.add(ops.return_tokens.default, out_RH, token_P, row_SK, counts, "ep"), needed


def _compute(block: _Block, indices: fx.Node, x: fx.Node, weights: fx.Node, rows: int) -> tuple[fx.Node, fx.Node]:
    """Step 3: the local experts on all tokens that are here; (their outputs, how many rows they needed)."""
    index = rank_coordinate(block.program, block.group, EP_INDEX, "ep")
    first_expert = block.add(aten.mul.Tensor, index, block.local_experts)
    tables = block.add(ops.index_tokens.default, indices, first_expert, block.local_experts, rows)
    _note_bound(tables, 3, block.most_rows)
    token_R, row_TK, offsets_E, needed = block.results(tables, 4)
    mlp = block.add(ops.grouped_mlp.default, x, weights, *block.experts, token_R, row_TK, offsets_E)
    y_RH, _ = block.results(mlp, 2)
    return block.add(ops.reduce_outputs.default, y_RH, row_TK, token_R), needed


def _report_overflow(block: _Block, needed: fx.Node, rows: int) -> None:
    """An output of the program that is True when the local experts needed more rows than there are."""
    block.group[0].add_output(block.add(aten.gt.Scalar, needed, rows))
    for segment in block.group:
        name = f"{OVERFLOW}{len(block.program.overflows())}"
        segment.outputs = (*segment.outputs, name)
        block.program.outputs[name] = name


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
