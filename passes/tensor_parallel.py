"""TensorParallel: attention heads, MLP and expert width and the vocabulary divided over the ranks of `tp`."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from optimus_compiler.passes.base import Pass, PassError, PassReport
from optimus_compiler.passes.rewrite import (
    CASTS,
    ancestors,
    chooses_experts,
    insert,
    is_pointwise,
    rank_coordinate,
    tensor_of,
    unpack,
    where,
)
from optimus_compiler.passes.sequence_parallel import divide_sequence
from optimus_compiler.program import ParameterSpec, Program, Segment
from optimus_compiler.verify import propagate

aten, ops, c10d = torch.ops.aten, torch.ops.optimus, torch.ops._c10d_functional
SDPA = aten.scaled_dot_product_attention.default
VIEWS = {aten.view.default, aten.reshape.default, aten.transpose.int, aten._to_copy.default} | CASTS
TP_INDEX = "tp_index"  # the name of a rank's coordinate on tp


@dataclass(frozen=True)
class TensorParallel(Pass):
    """Weights divided over the ranks of `tp`, which all see the same tokens.

    1. Attention: rank r computes some of the heads. Query, key and value projections are cut by rows, the output
       projection by columns, and its products are summed over the ranks. A norm of queries or keys over their full
       width sums its squares over the ranks.
    2. Dense MLPs and experts: gate and up are cut in their width by rows, down by columns, its products summed.
    3. Embedding: a rank looks up the words that it has, and the sum over the ranks has all of them.
    4. Head: the log-sum-exp and the target's logit of a rank's words (FuseLoss) combine over the ranks; whole logits
       are gathered only where they are asked for.
    5. sequence_parallel: between these blocks a rank has a part of the tokens only (sequence_parallel.py).

    Norms and routers are replicated. Only stock collectives: the gradient of a sum is the sum of the gradients, every
    rank's loss counts, and the runtime sums gradients of replicated parameters over tp and divides by it.
    """

    sequence_parallel: bool = False

    def run(self, program: Program) -> PassReport:
        tp = program.mesh.tp
        if tp == 1:
            return self.report(0, "tp is 1: every rank holds all weights")
        blocks: list[str] = []
        parts: set[str] = set()  # values between segments of which a rank has its tokens only (sequence_parallel)
        for group in program.groups():
            divided = _Divided(program, group)
            found = [*_attentions(divided), *_mlps(divided), *_experts(divided), *_vocabulary(divided)]
            divided.refuse_rest()
            divided.propagate_shapes()
            if group[0].kind == "head":
                _gather_logits(divided)
            if self.sequence_parallel:
                divide_sequence(program, group, divided.sums, parts)
            blocks += found * len(group)
        if not blocks:
            raise PassError(
                "TensorParallel found nothing to divide: it looks for attention, MLPs, experts and vocabulary"
            )
        counts = {kind: blocks.count(kind) for kind in dict.fromkeys(blocks)}
        return self.report(len(blocks), ", ".join(f"{count} x {kind}" for kind, count in counts.items()))


@dataclass
class _Divided:
    """The graph of a group of segments while it is being divided."""

    program: Program
    group: list[Segment]
    sums: list[fx.Node] = field(default_factory=list)  # activations that were summed over tp
    sharded: set[fx.Node] = field(default_factory=set)  # parameters

    @property
    def graph(self) -> fx.Graph:
        return self.group[0].graph.graph

    @property
    def tp(self) -> int:
        return self.program.mesh.tp

    @property
    def parameters(self) -> list[fx.Node]:
        return self.group[0].placeholders()[: len(self.group[0].parameters)]

    def specs(self, parameter: fx.Node) -> list[ParameterSpec]:
        """The entries of the table that a placeholder stands for."""
        position = self.group[0].placeholders().index(parameter)
        return [self.program.parameters[segment.parameters[position]] for segment in self.group]

    def shard(self, parameter: Any, axis: int, number: int, what: str) -> None:
        """Cuts a parameter on a dimension; `number` of `what` (heads, words) must be divisible."""
        if not isinstance(parameter, fx.Node) or parameter in self.sharded:
            return
        if number % self.tp:
            raise PassError(f"{self.specs(parameter)[0].name}: tp={self.tp} does not divide its {number} {what}: "
                            "choose a tp that does")  # fmt: skip
        for spec in self.specs(parameter):
            if "tp" not in spec.placement:  # a tied weight is cut once, by the first segment that reads it
                self.program.parameters[spec.name] = replace(spec, placement={**spec.placement, "tp": axis})
        shape = list(tensor_of(parameter).shape)
        shape[axis] //= self.tp
        with self.program.fake_mode:
            parameter.meta["val"] = tensor_of(parameter).new_empty(shape)
        self.sharded.add(parameter)

    def add(self, target: Any, *arguments: Any, like: fx.Node) -> fx.Node:
        return insert(self.program, self.graph, target, *arguments, like=like)

    def reduce(self, value: fx.Node, how: str = "sum") -> fx.Node:
        """A value over all ranks of tp."""
        return self.add(
            c10d.wait_tensor.default, self.add(c10d.all_reduce.default, value, how, "tp", like=value), like=value
        )

    def sum_after(self, node: fx.Node) -> fx.Node:
        """All readers of a node take its sum over the ranks."""
        with self.graph.inserting_after(node):
            reduced = self.add(c10d.all_reduce.default, node, "sum", "tp", like=node)
        with self.graph.inserting_after(reduced):
            total = self.add(c10d.wait_tensor.default, reduced, like=node)
        node.replace_all_uses_with(total, delete_user_cb=lambda user: user is not reduced)
        self.sums.append(total)
        return total

    def row_parallel(self, linear: fx.Node, width: int, what: str) -> None:
        """A linear whose inputs are divided: partial products, summed; the bias is added once."""
        self.shard(linear.args[1], 1, width, what)
        bias = linear.args[2] if len(linear.args) > 2 else None
        linear.args = linear.args[:2]
        total = self.sum_after(linear)
        if isinstance(bias, fx.Node):
            with self.graph.inserting_after(total):
                biased = self.add(aten.add.Tensor, total, bias, like=linear)
            total.replace_all_uses_with(biased, delete_user_cb=lambda user: user is not biased)
            self.sharded.add(bias)  # replicated, and meant to be

    def first(self, local: int, like: fx.Node) -> fx.Node:
        """The number of this rank's first word, of `local` each."""
        index = rank_coordinate(self.program, self.group, TP_INDEX, "tp")
        return self.add(aten.mul.Tensor, index, local, like=like)

    def refuse_rest(self) -> None:
        """A matrix that no step has divided, routers apart, belongs to something this pass does not know."""
        for parameter in self.parameters:
            if (
                tensor_of(parameter).dim() < 2
                or parameter in self.sharded
                or any(map(chooses_experts, parameter.users))
            ):
                continue  # a vector, divided, or a router's
            raise PassError(f"{self.specs(parameter)[0].name} is in no attention, MLP, expert block, embedding or head "
                            "that TensorParallel knows: use tp=1 for this model")  # fmt: skip

    def propagate_shapes(self) -> None:
        """Every node's value anew, from the local weights."""
        try:
            values = propagate(self.program, self.group[0])
        except (RuntimeError, ValueError) as error:
            raise PassError(f"a {self.group[0].kind} fixes sizes that TensorParallel divides: {error}") from error
        for node, value in values.items():
            node.meta["val"] = value


def _attentions(divided: _Divided) -> Iterator[str]:
    """Step 1."""
    for sdpa in [node for node in divided.graph.nodes if node.target is SDPA]:
        tp, q_heads = divided.tp, tensor_of(sdpa.args[0]).shape[1]
        projections = [_projection(operand, sdpa) for operand in sdpa.args[:3]]
        if len(set(projections)) < 3:
            raise PassError(f"{where(sdpa)}: one matrix makes queries, keys and values: TensorParallel needs three")
        for operand, linear in zip(sdpa.args[:3], projections, strict=True):
            width = tensor_of(linear).shape[-1]
            heads = width // tensor_of(operand).shape[-1]
            if heads % tp:
                what = "attention heads" if heads == q_heads else "key-value heads"
                raise PassError(f"{where(sdpa)}: tp={tp} does not divide its {heads} {what}: choose a tp that does")
            for parameter in linear.args[1:]:
                divided.shard(parameter, 0, heads, "heads")
            _divide_norm(divided, linear, operand, width)
        divided.row_parallel(_next_linear(sdpa), q_heads, "attention heads")
        yield "attention"


def _projection(operand: Any, sdpa: fx.Node) -> fx.Node:
    """The linear that makes queries, keys or values."""
    found: set[fx.Node] = set()
    pending, seen = [operand], set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target is aten.linear.default:
            found.add(node)
        else:
            pending += node.all_input_nodes
    if len(found) != 1:
        raise PassError(f"{where(sdpa)}: {len(found)} linears make one operand of attention: TensorParallel knows "
                        "attention with one projection each of queries, keys and values")  # fmt: skip
    return found.pop()


def _divide_norm(divided: _Divided, linear: fx.Node, operand: fx.Node, width: int) -> None:
    """What works on the full width of queries or keys before they are split into heads."""
    needed = ancestors(operand)
    pending, seen = list(linear.users), {linear}
    while pending:
        node = pending.pop()
        if node in seen or node not in needed:
            continue
        seen.add(node)
        if node.target in (aten.view.default, aten.reshape.default):
            continue  # heads from here on
        if node.target is aten.mean.dim and tensor_of(node.args[0]).shape[-1] == width and node.args[1] == [-1]:
            node_after = _mean_over_ranks(divided, node, width)
            pending += list(node_after.users)
            continue
        if not is_pointwise(node) and node.target not in VIEWS:
            raise PassError(f"{where(node)}: {node.target} works on the full width of queries or keys: TensorParallel "
                            "knows RMS norms there")  # fmt: skip
        for parameter in node.all_input_nodes:
            if parameter in divided.parameters and tensor_of(parameter).shape[-1] == width:
                divided.shard(parameter, 0, width, "columns")
        pending += list(node.users)


def _mean_over_ranks(divided: _Divided, mean: fx.Node, width: int) -> fx.Node:
    with divided.graph.inserting_before(mean):
        own = divided.add(aten.sum.dim_IntList, mean.args[0], [-1], *mean.args[2:3], like=mean)
        total = divided.add(aten.mul.Tensor, divided.reduce(own), 1.0 / width, like=mean)
    mean.replace_all_uses_with(total)
    divided.graph.erase_node(mean)
    return total


def _next_linear(sdpa: fx.Node) -> fx.Node:
    """The output projection: the linear that attention's result goes to, through views only."""
    node = sdpa
    while node.target is not aten.linear.default:
        users = list(node.users)
        if len(users) != 1 or (users[0].target not in VIEWS and users[0].target is not aten.linear.default):
            raise PassError(f"{where(sdpa)}: TensorParallel looks for one linear after attention and found "
                            f"{', '.join(str(user.target) for user in users) or 'nothing'}")  # fmt: skip
        node = users[0]
    return node


def _mlps(divided: _Divided) -> Iterator[str]:
    """Step 2, dense: down(activation(gate(x)) * up(x))."""
    for down in [node for node in divided.graph.nodes if node.target is aten.linear.default]:
        product = _through_pointwise(down.args[0])
        if product is None or down.args[1] in divided.sharded:
            continue
        width = tensor_of(product[0]).shape[-1]
        for linear in product:
            for parameter in linear.args[1:]:
                divided.shard(parameter, 0, width, "columns of the MLP")
        divided.row_parallel(down, width, "columns of the MLP")
        yield "MLP"


def _through_pointwise(node: Any) -> list[fx.Node] | None:
    """The two linears whose results, through pointwise operations, are multiplied to make a value; None if others."""
    if not isinstance(node, fx.Node) or node.target is not aten.mul.Tensor:
        return None
    linears = []
    for source in node.args:
        while isinstance(source, fx.Node) and len(source.all_input_nodes) == 1 and is_pointwise(source):
            source = source.all_input_nodes[0]
        if not isinstance(source, fx.Node) or source.target is not aten.linear.default:
            return None
        linears.append(source)
    return linears if linears[0] is not linears[1] else None


def _experts(divided: _Divided) -> Iterator[str]:
    """Step 2, sparse: gate and up [E, 2, I, H], down [E, H, I]; summed where the tokens are back on their own rank."""
    for mlp in [node for node in divided.graph.nodes if node.target is ops.grouped_mlp.default]:
        gate_up, down = mlp.args[2:4]
        width = tensor_of(down).shape[2]
        divided.shard(gate_up, 2, width, "columns of an expert")
        divided.shard(down, 2, width, "columns of an expert")
        out = next(user for result in mlp.users for user in result.users if user.target is ops.reduce_outputs.default)
        for user in list(out.users):
            if user.target is c10d.reduce_scatter_tensor.default:
                (out,) = user.users
            elif user.target is ops.return_tokens.default:
                out = user
        divided.sum_after(out)
        yield "experts"


def _vocabulary(divided: _Divided) -> Iterator[str]:
    """Steps 3 and 4."""
    for node in list(divided.graph.nodes):
        if node.target is aten.embedding.default and node.args[0] in divided.parameters:
            _look_up_own_words(divided, node)
            yield "embedding"
        elif node.target is ops.linear_logsumexp.default:
            _combine_logsumexp(divided, node)
            yield "head"


def _look_up_own_words(divided: _Divided, lookup: fx.Node) -> None:
    weight, ids = lookup.args[:2]
    padding = lookup.args[2] if len(lookup.args) > 2 else -1
    divided.shard(weight, 0, tensor_of(weight).shape[0], "words of the vocabulary")
    local = tensor_of(weight).shape[0]

    def add(target: Any, *arguments: Any) -> fx.Node:
        return divided.add(target, *arguments, like=lookup)

    with divided.graph.inserting_before(lookup):
        own = add(aten.sub.Tensor, ids, divided.first(local, lookup))
        inside = add(aten.logical_and.default, add(aten.ge.Scalar, own, 0), add(aten.lt.Scalar, own, local))
        found = add(aten.embedding.default, weight, add(aten.clamp.default, own, 0, local - 1))
        if padding != -1:  # its row gets no gradient, and is on one rank only
            kept = add(aten.unsqueeze.default, add(aten.ne.Scalar, ids, padding), -1)
            found = add(aten.where.self, kept, found, add(aten.detach.default, found))
        part = add(aten.mul.Tensor, found, add(aten.unsqueeze.default, inside, -1))
    lookup.replace_all_uses_with(part)
    divided.graph.erase_node(lookup)
    divided.sum_after(part)


def _combine_logsumexp(divided: _Divided, fused: fx.Node) -> None:
    x, weight, target = fused.args
    divided.shard(weight, 0, tensor_of(weight).shape[0], "words of the vocabulary")
    lse, logit = (next(user for user in fused.users if user.args[1] == i) for i in range(2))

    def add(operation: Any, *arguments: Any) -> fx.Node:
        return divided.add(operation, *arguments, like=fused)

    with divided.graph.inserting_before(fused):
        own_target = add(aten.sub.Tensor, target, divided.first(tensor_of(weight).shape[0], fused))
        own_lse, own_logit = unpack(divided.program, divided.graph, add(fused.target, x, weight, own_target), 2)
        most = divided.reduce(add(aten.detach.default, own_lse), "max")
        both = add(aten.stack.default, [add(aten.exp.default, add(aten.sub.Tensor, own_lse, most)), own_logit])
        total = divided.reduce(both)
        whole_lse = add(aten.add.Tensor, add(aten.log.default, add(aten.select.int, total, 0, 0)), most)
        whole_logit = add(aten.select.int, total, 0, 1)
    for old, new in ((lse, whole_lse), (logit, whole_logit)):
        old.replace_all_uses_with(new)
        divided.graph.erase_node(old)
    divided.graph.erase_node(fused)


def _gather_logits(divided: _Divided) -> None:
    """The program's output `logits` [B, S, V] from those of every rank's words."""
    segment, output = divided.group[0], divided.graph.output_node()
    name = divided.program.outputs.get("logits")
    if name not in segment.outputs:
        return
    position = segment.outputs.index(name)
    own = segment.results()[position]
    B, S, V = tensor_of(own).shape

    def add(target: Any, *arguments: Any) -> fx.Node:
        return divided.add(target, *arguments, like=own)

    with divided.graph.inserting_before(output):
        gathered = add(c10d.all_gather_into_tensor.default, own, divided.tp, "tp")
        parts = add(aten.view.default, add(c10d.wait_tensor.default, gathered), [divided.tp, B, S, V])
        whole = add(aten.reshape.default, add(aten.permute.default, parts, [1, 2, 0, 3]), [B, S, divided.tp * V])
    results = list(segment.results())
    results[position] = whole
    output.args = (tuple(results),)
