"""FuseSparseMoE: expert blocks, however they were written, become index_tokens, grouped_mlp, reduce_outputs."""

import itertools
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from optimus_compiler.passes.base import Pass, PassError, PassReport
from optimus_compiler.passes.expert_region import ExpertRegion, Roles, computes_gated_mlp
from optimus_compiler.passes.rewrite import ancestors, insert, module_paths, tensor_of, unpack
from optimus_compiler.program import ParameterSpec, Program, Segment, Source

aten = torch.ops.aten
EXPERTS = re.compile(r"(.*)\.experts(\.\d+)?(?:\.|$)")
BLANKS = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default}
SUMS = {aten.index_add.default, aten.index_add_.default}
VIEWS = {aten.unsqueeze.default, aten.view.default, aten.reshape.default, aten.permute.default, aten.transpose.int}


@dataclass(frozen=True)
class FuseSparseMoE(Pass):
    """The five stages of the paper's Algorithm 1 (section 3.1) in place of any expert block.

    1. Find the regions: the operations traced in a module `<block>.experts` (HF v5's grouped_mm, its fp32 fallback and
       batched_mm, our own model), or, for v4's loop over a ModuleList, everything in the block after the router's
       choice of experts.
    2. Read a region's interface: hidden states x [T, H], routing weights [T, K], expert indices [T, K] -> y [T, H].
    3. Find which parameter is which by shape, and check the region numerically against the reference on random inputs.
    4. Store gate and up as one parameter [E, 2, I, H], down as [E, H, I]; a parameter's `source` says how to build it.
    5. Replace the region: index_tokens (stages 2, 3) -> grouped_mlp (4) -> reduce_outputs (5). Stage 1, the router,
       stays visible: the auxiliary loss reads its logits, and other passes move its results between ranks.
    """

    def run(self, program: Program) -> PassReport:
        matches, notes = 0, []
        for group in program.groups():
            for region in _find_regions(program, group[0]):
                roles = next(
                    (r for r in _possible_roles(program, group[0], region) if computes_gated_mlp(region, r)), None
                )
                if roles is None:
                    raise PassError(
                        f"{region.path}.experts does not compute down(silu(gate(x)) * up(x)) weighted by the router "
                        f"and summed over {region.indices.meta['val'].shape[-1]} experts: looked for that"
                    )
                experts, width, hidden = roles.sizes()
                graph = group[0].graph.graph
                names = [dict(zip(segment.placeholders(), segment.parameters, strict=False)) for segment in group]
                gate_up = _merge(program, graph, names, roles.gate_up, (experts, 2, width, hidden), "gate_up_proj")
                down = _merge(program, graph, names, roles.down, (experts, hidden, width), "down_proj")
                _replace(program, graph, region, roles, gate_up, down)
                for segment, parameter_of in zip(group, names, strict=True):
                    segment.parameters = tuple(parameter_of[n] for n in segment.placeholders() if n in parameter_of)
                matches += len(group)
                form = "a loop" if region.is_loop else "stacked weights"
                notes.append(f"{len(group)} x {experts} experts {hidden} -> {width}, top {roles.top_k}, from {form}")
            _require_fused(group)
        return self.report(matches, *notes or ["no expert block: a dense model"])


def _require_fused(group: list[Segment]) -> None:
    """A top-k router without a fused block means that a block was missed."""
    nodes = group[0].graph.graph.nodes
    if any(n.target is aten.topk.default for n in nodes) and not any(
        n.target is torch.ops.optimus.index_tokens.default for n in nodes
    ):
        raise PassError(f"a {group[0].kind} chooses experts by topk, but no module named 'experts' was found beside it")


# 1. and 2. regions and their interface


def _find_regions(program: Program, segment: Segment) -> list[ExpertRegion]:
    parts: dict[str, set[fx.Node]] = {}
    loops: set[str] = set()
    for node in segment.graph.graph.nodes:
        match = next(filter(None, map(EXPERTS.match, module_paths(node))), None) if node.op == "call_function" else None
        if match:
            parts.setdefault(match.group(1), set()).add(node)
            if match.group(2):
                loops.add(match.group(1))
    regions = []
    for path, nodes in parts.items():
        if path in loops:
            nodes |= _after_choice(segment, path)
        if any(node.target is torch.ops.optimus.index_tokens.default for node in nodes):
            continue  # fused already
        _absorb_feeders(segment, path, nodes)
        regions.append(_interface(program, segment, path, nodes, path in loops))
    return regions


def _after_choice(segment: Segment, path: str) -> set[fx.Node]:
    """v4: the loop lives in the block itself, as everything that follows from the indices of its last topk."""
    block = [n for n in segment.graph.graph.nodes if n.op == "call_function" and path in module_paths(n)]
    choices = [n for n in block if n.target is aten.topk.default]
    indices = [n for n in block if choices and n.target is operator.getitem and n.args == (choices[-1], 1)]
    if not indices:
        raise PassError(f"{path} loops over its experts without a topk before the loop: looked for one")
    after: set[fx.Node] = set()
    for node in block:
        if any(source is indices[0] or source in after for source in node.all_input_nodes):
            after.add(node)
    # the sum over experts ends the region: a shared expert may be added to it
    last_sum = next((n for n in reversed(block) if n in after and n.target in SUMS), None)
    return after & ancestors(last_sum) if last_sum else after


def _absorb_feeders(segment: Segment, path: str, nodes: set[fx.Node]) -> None:
    """Adds what feeds only the region: blanks (zeros, arange, zeros_like) and views within the block."""
    for node in reversed(segment.graph.graph.nodes):
        if node.op != "call_function" or node in nodes or not node.users or not all(u in nodes for u in node.users):
            continue
        if not node.all_input_nodes or (node.target in VIEWS | BLANKS and path in module_paths(node)):
            nodes.add(node)


def _interface(program: Program, segment: Segment, path: str, nodes: set[fx.Node], is_loop: bool) -> ExpertRegion:
    ordered = [node for node in segment.graph.graph.nodes if node in nodes]
    inputs = list(dict.fromkeys(source for node in ordered for source in node.all_input_nodes if source not in nodes))
    outputs = [node for node in ordered if any(user not in nodes for user in node.users)]
    parameters = [node for node in inputs if node in segment.placeholders()[: len(segment.parameters)]]
    values = [node for node in inputs if node not in parameters]
    indices = [node for node in values if not tensor_of(node).dtype.is_floating_point]
    if len(outputs) != 1 or len(indices) != 1 or len(values) != 3:
        raise PassError(
            f"{path}.experts reads {[n.name for n in values]} and returns {[n.name for n in outputs]}: looked for "
            "hidden states, routing weights and expert indices in, one tensor out"
        )
    floating = tuple(node for node in values if node not in indices)
    return ExpertRegion(path, ordered, parameters, indices[0], floating, outputs[0], is_loop,
                        program.micro_batch_size, program.sequence_length)  # fmt: skip


# 3. which parameter is which


def _possible_roles(program: Program, segment: Segment, region: ExpertRegion) -> Iterator[Roles]:
    """Every assignment of hidden states, routing weights and expert parameters that the shapes allow."""
    name_of = dict(zip(segment.placeholders(), segment.parameters, strict=False))
    for weights, x in itertools.permutations(region.floating):
        if tensor_of(weights).shape != tensor_of(region.indices).shape:
            continue
        hidden = tensor_of(x).shape[-1]
        if region.is_loop:
            experts: dict[int, list[fx.Node]] = {}
            for node in region.parameters:
                match = re.search(r"\.experts\.(\d+)\.", name_of[node])
                if match:
                    experts.setdefault(int(match.group(1)), []).append(node)
            if sorted(experts) != list(range(len(experts))) or any(len(three) != 3 for three in experts.values()):
                continue
            for order in itertools.permutations(range(3)):
                gate, up, down = ([experts[e][i] for e in range(len(experts))] for i in order)
                if _fits(gate, down, hidden) and _fits(up, down, hidden):
                    yield Roles(x, weights, [n for pair in zip(gate, up, strict=True) for n in pair], down)
        else:
            for both, last in itertools.permutations(region.parameters, 2):
                stacked, narrow = tensor_of(both).shape, tensor_of(last).shape
                if len(region.parameters) == 2 and len(stacked) == len(narrow) == 3 and (
                    stacked[1] == 2 * narrow[2] and stacked[2] == narrow[1] == hidden
                ):  # fmt: skip
                    yield Roles(x, weights, [both], [last])


def _fits(projection: list[fx.Node], down: list[fx.Node], hidden: int) -> bool:
    """Whether all are [I, H] beside a down projection [H, I]."""
    return all(tuple(tensor_of(p).shape) == (tensor_of(d).shape[1], hidden) and tensor_of(d).shape[0] == hidden
               for p, d in zip(projection, down, strict=True))  # fmt: skip


# 4. parameters


def _merge(
    program: Program,
    graph: fx.Graph,
    names: list[dict[fx.Node, str]],
    old: list[fx.Node],
    shape: tuple[int, ...],
    name: str,
) -> fx.Node:
    """One placeholder for parameters that become one; its entry in the table is built from the same tensors.

    names: of every segment that shares the graph, the parameter that each placeholder is.
    """
    like = tensor_of(old[0])
    with graph.inserting_before(old[0]):
        merged = graph.placeholder(f"{name}_{len(graph.nodes)}")  # a name of its own: a graph may hold several blocks
    with program.fake_mode:
        merged.meta["val"] = torch.empty(shape, dtype=like.dtype, device=like.device)
    for parameter_of in names:
        missing = [parameter_of[node] for node in old if parameter_of[node] not in program.parameters]
        if missing:
            raise PassError(
                f"{missing[0]} belongs to two expert blocks: experts shared between layers are not supported"
            )
        specs = [program.parameters[parameter_of[node]] for node in old]
        if len({spec.trainable for spec in specs}) > 1:
            raise PassError(
                f"{specs[0].name} and the experts beside it are stored as one parameter: freeze all or none"
            )
        block = specs[0].name.rpartition(".experts.")[0]
        parameter_of[merged] = f"{block}.experts.{name}"
        program.replace_parameters([spec.name for spec in specs], ParameterSpec(
            name=parameter_of[merged],
            shape=shape,
            dtype=like.dtype,
            source=Source(tuple(n for spec in specs for n in spec.source.names), specs[0].source.shape),
            role="expert",
            trainable=specs[0].trainable,
        ))  # fmt: skip
    return merged


# 5. the rewrite


def _replace(
    program: Program, graph: fx.Graph, region: ExpertRegion, roles: Roles, gate_up: fx.Node, down: fx.Node
) -> None:
    old, ops = region.output, torch.ops.optimus
    hidden = tensor_of(roles.x).shape[-1]
    with graph.inserting_before(old):
        x_TH = roles.x
        if tensor_of(x_TH).dim() != 2:
            x_TH = insert(program, graph, aten.reshape.default, x_TH, [-1, hidden], like=old)
        if tensor_of(x_TH).dtype != tensor_of(gate_up).dtype:
            x_TH = insert(program, graph, aten.to.dtype, x_TH, tensor_of(gate_up).dtype, like=old)
        tables = insert(
            program, graph, ops.index_tokens.default, region.indices, None, tensor_of(gate_up).shape[0], like=old
        )
        token_R, row_TK, offsets_E, _ = unpack(program, graph, tables, 4)
        mlp = insert(program, graph, ops.grouped_mlp.default, x_TH, roles.weights, gate_up, down, token_R, row_TK,
                     offsets_E, like=old)  # fmt: skip
        y_RH, _ = unpack(program, graph, mlp, 2)
        new = insert(program, graph, ops.reduce_outputs.default, y_RH, row_TK, token_R, like=old)
        if tensor_of(new).shape != tensor_of(old).shape:
            new = insert(program, graph, aten.reshape.default, new, list(tensor_of(old).shape), like=old)
        if tensor_of(new).dtype != tensor_of(old).dtype:
            new = insert(program, graph, aten.to.dtype, new, tensor_of(old).dtype, like=old)
    old.replace_all_uses_with(new)
    for node in reversed(region.nodes):
        graph.erase_node(node)
    for node in region.parameters:
        if not node.users:
            graph.erase_node(node)
