"""FuseLoss: lm_head + cross entropy -> linear_logsumexp, which never holds the whole logits."""

from dataclasses import dataclass

import torch
from torch import fx

from optimus_compiler.passes.base import Pass, PassReport
from optimus_compiler.passes.rewrite import CASTS, insert, tensor_of, unpack
from optimus_compiler.program import Program

aten = torch.ops.aten
SHAPES_AND_CASTS = CASTS | {aten.view.default, aten.reshape.default, aten._to_copy.default}


@dataclass(frozen=True)
class FuseLoss(Pass):
    """Replaces cross_entropy(linear(x, w)) where the fp32 logits would exceed `logits_limit` bytes, or where tp > 1:
    TensorParallel divides the vocabulary, and no rank will have whole logits.

    1. Find cross_entropy_loss (mean, no class weights, no smoothing) whose logits come from a linear without bias,
       through reshapes and casts only.
    2. lse [T], logit [T] = linear_logsumexp(x, w, target); the loss is the mean of lse - logit over the targets that
       are not ignored.
    3. The logits stay in the program as an output: where nobody asks for them, lowering drops them.

    It saves memory and costs a little time (the backward computes the logits again), hence the limit.
    """

    logits_limit: int = 2**30

    def run(self, program: Program) -> PassReport:
        fused, kept = 0, []
        for group in program.groups():
            graph = group[0].graph.graph
            for loss in [node for node in graph.nodes if node.target is aten.cross_entropy_loss.default]:
                linear = _linear_of(loss)
                size, limit = 4 * tensor_of(loss.args[0]).numel(), self.logits_limit
                if linear is None:
                    kept.append("the loss is not a plain mean over linear logits")
                elif size <= limit and program.mesh.tp == 1:
                    kept.append(f"{size / 2**20:.0f} MiB of logits are within the limit of {limit / 2**20:.0f} MiB")
                if linear is None or (size <= limit and program.mesh.tp == 1):
                    continue
                with graph.inserting_before(loss):
                    loss.replace_all_uses_with(self._chunked(program, graph, loss, linear))
                graph.erase_node(loss)
                fused += 1
        return self.report(fused, *kept)

    def _chunked(self, program: Program, graph: fx.Graph, loss: fx.Node, linear: fx.Node) -> fx.Node:
        def add(target: torch._ops.OpOverload, *args: object) -> fx.Node:
            return insert(program, graph, target, *args, like=loss)

        x, weight = linear.args[0], linear.args[1]
        target, ignored = loss.args[1], (loss.args[4] if len(loss.args) > 4 else -100)
        x_TH = add(aten.reshape.default, x, [-1, tensor_of(weight).shape[1]])
        both = add(torch.ops.optimus.linear_logsumexp.default, x_TH, weight, target)
        lse, logit = unpack(program, graph, both, 2)
        counted = add(aten.to.dtype, add(aten.ne.Scalar, target, ignored), torch.float32)
        terms = add(aten.mul.Tensor, add(aten.sub.Tensor, lse, logit), counted)
        return add(aten.div.Tensor, add(aten.sum.default, terms), add(aten.sum.default, counted))


def _linear_of(loss: fx.Node) -> fx.Node | None:
    """The linear that makes the logits of a plain mean cross entropy; None for any other form."""
    arguments = [*loss.args, *(None, 1, -100, 0.0)[len(loss.args) - 2 :]]
    if loss.kwargs or arguments[2] is not None or arguments[3] != 1 or arguments[5] != 0.0:
        return None
    node = loss.args[0]
    while isinstance(node, fx.Node) and node.target in SHAPES_AND_CASTS:
        node = node.args[0]
    if isinstance(node, fx.Node) and node.target is aten.linear.default and len(node.args) == 2:
        return node
    return None
