"""ForceUniformRouting (FUR): every expert receives the same number of tokens, to measure what imbalance costs."""

from dataclasses import dataclass

import torch
from torch import fx

from optimus_compiler.passes.base import Pass, PassError, PassReport
from optimus_compiler.passes.rewrite import EP_INDEX, insert, rank_coordinate, tensor_of, where
from optimus_compiler.program import Program

aten = torch.ops.aten


@dataclass(frozen=True)
class ForceUniformRouting(Pass):
    """Token g takes experts (g + j) mod N, j < K, weighted by their own probabilities (paper, section 4.3).

    Replaces every topk, the router's and the auxiliary loss's: both must see the same choice. Under expert parallelism
    tokens are counted over the ranks of ep, so that every expert receives the same number from all of them together.
    """

    def run(self, program: Program) -> PassReport:
        matches = 0
        for group in program.groups():
            graph = group[0].graph.graph
            for node in [n for n in graph.nodes if n.target is aten.topk.default]:
                probabilities, top_k = node.args[:2]
                if tensor_of(probabilities).dim() != 2 or (len(node.args) > 2 and node.args[2] not in (-1, 1)):
                    raise PassError(f"{where(node)}: a topk over something else than expert probabilities [T, N]")
                tokens, experts = tensor_of(probabilities).shape
                with graph.inserting_before(node):
                    token = _arange(program, graph, tokens, node)
                    if program.mesh.ep > 1:
                        index = rank_coordinate(program, group, EP_INDEX, "ep")
                        before = insert(program, graph, aten.mul.Tensor, index, tokens, like=node)
                        token = insert(program, graph, aten.add.Tensor, token, before, like=node)
                    column = insert(program, graph, aten.unsqueeze.default, token, 1, like=node)
                    choice = _arange(program, graph, top_k, node)
                    total = insert(program, graph, aten.add.Tensor, column, choice, like=node)
                    indices = insert(program, graph, aten.remainder.Scalar, total, experts, like=node)
                    values = insert(program, graph, aten.gather.default, probabilities, 1, indices, like=node)
                for user in list(node.users):
                    user.replace_all_uses_with((values, indices)[user.args[1]])
                    graph.erase_node(user)
                graph.erase_node(node)
                matches += len(group)
        if not matches:
            raise PassError("ForceUniformRouting found no router: looked for topk over expert probabilities")
        return self.report(matches)


def _arange(program: Program, graph: fx.Graph, count: int, topk: fx.Node) -> fx.Node:
    device = tensor_of(topk.all_input_nodes[0]).device
    node = graph.call_function(aten.arange.default, (count,), {"device": device})
    node.meta["nn_module_stack"] = dict(topk.meta.get("nn_module_stack") or {})
    with program.fake_mode:
        node.meta["val"] = torch.arange(count, device=device)
    return node
