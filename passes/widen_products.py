"""WidenProducts: on a CPU without bf16 arithmetic, matrix products of bf16 values run in fp32."""

from dataclasses import dataclass

import torch
from torch import fx

from optimus_compiler.passes.base import Pass, PassReport
from optimus_compiler.passes.rewrite import insert, tensor_of
from optimus_compiler.program import Program
from optimus_compiler.runtime.kernels import matmul_dtype

aten = torch.ops.aten
PRODUCTS = {aten.linear.default, aten.matmul.default, aten.bmm.default, aten.mm.default,
            aten.scaled_dot_product_attention.default}  # fmt: skip

TRANSPOSED = {aten.linear.default, aten.scaled_dot_product_attention.default}  # the second operand is [N, K]


@dataclass(frozen=True)
class WidenProducts(Pass):
    """torch multiplies bf16 matrices in scalar code on most CPUs, 5 to 50 times slower than fp32 ones.

    1. Find the matrix products and attentions whose operands are in a dtype that this machine has no fast product for.
    2. Cast the operands to fp32, multiply, cast the result back: rounded once, so never less exact. Backward follows.

    What is saved for backward stays bf16: the partitioner casts again instead of saving fp32 copies. Products of fewer
    than `smallest` multiplications are left alone: they cost nothing either way.
    """

    smallest: int = 2**22

    def run(self, program: Program) -> PassReport:
        matches = 0
        for group in program.groups():
            graph = group[0].graph.graph
            for node in [n for n in graph.nodes if n.target in PRODUCTS]:
                dtype = tensor_of(node).dtype
                wide = matmul_dtype(tensor_of(node))
                if wide == dtype or _multiplications(node) < self.smallest:
                    continue
                with graph.inserting_before(node):
                    node.args = tuple(self._cast(program, graph, argument, dtype, wide) for argument in node.args)
                with program.fake_mode, torch.no_grad():
                    values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
                    node.meta["val"] = node.target(*values, **node.kwargs)
                with graph.inserting_after(node):
                    narrow = insert(program, graph, aten.to.dtype, node, dtype, like=node)
                node.replace_all_uses_with(narrow, delete_user_cb=lambda user, narrow=narrow: user is not narrow)
                matches += len(group)
        return self.report(matches)

    def _cast(
        self, program: Program, graph: fx.Graph, argument: fx.node.Argument, narrow: torch.dtype, wide: torch.dtype
    ) -> fx.node.Argument:
        if isinstance(argument, fx.Node) and tensor_of(argument).dtype == narrow:
            return insert(program, graph, aten.to.dtype, argument, wide, like=argument)
        return argument


def _multiplications(node: fx.Node) -> int:
    """Of a product [..., M, K] x [K, N], M * K * N and so on; of attention, those of queries with keys."""
    first, second = (tensor_of(argument) for argument in node.args[:2])
    return first.numel() * (second.shape[-2] if node.target in TRANSPOSED else second.shape[-1])
