"""CausalMask: attention masks that are only causal become a flag; masks that depend on an input stay, or are built."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from optimus_compiler.passes.base import Pass, PassError, PassReport
from optimus_compiler.passes.rewrite import ancestors, insert, where
from optimus_compiler.program import Program, Segment

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
MASK, DROPOUT, CAUSAL = 3, 4, 5  # positions of sdpa's arguments


@dataclass(frozen=True)
class CausalMask(Pass):
    """Export writes an explicit [B, 1, S, S] mask into every attention.

    1. Evaluate each mask that depends on no input, once.
    2. If it is the causal mask, attention takes is_causal=True and the mask goes; any other constant is an error.
    3. A mask made from a declared input (attention_mask, position_ids) stays as it is.
    4. If document_ids [B, S] is an input, every causal attention takes the mask "same document, not later".
    """

    def run(self, program: Program) -> PassReport:
        constants = program.constant_values()
        flagged = kept = 0
        causal: list[tuple[list[Segment], fx.Node]] = []
        for group in program.groups():
            for node in group[0].graph.graph.nodes:
                if node.target is not SDPA:
                    continue
                mask = _argument(node, MASK, None)
                if mask is not None:
                    values = [_evaluate(segment, mask, constants) for segment in group]
                    if any(value is None for value in values):
                        kept += len(group)
                        continue
                    if not all(_is_causal(value) for value in values if value is not None):
                        raise PassError(
                            f"{where(node)}: the attention mask is a constant that is not causal; "
                            "looked for a lower-triangular mask or one made from a declared input; a sliding window "
                            "must be None or at least sequence_length"
                        )
                    _set_arguments(node, None, True)
                    flagged += len(group)
                elif not _argument(node, CAUSAL, False) and program.sequence_length > 1:
                    raise PassError(f"{where(node)}: attention sees later tokens; looked for is_causal or a mask")
                if _argument(node, CAUSAL, False):
                    causal.append((group, node))
        if "document_ids" in program.inputs:
            if kept or not causal:
                raise PassError(
                    f"document_ids needs causal attention without another mask, and {kept} layers have one: drop "
                    "attention_mask (for transformers position_ids too, from which it builds a mask of documents)"
                )
            _mask_documents(program, causal)
        return self.report(flagged, f"{flagged} masks became is_causal, {kept} come from a declared input")


def _argument(node: fx.Node, position: int, default: bool | None) -> Any:
    names = {MASK: "attn_mask", CAUSAL: "is_causal"}
    return node.args[position] if len(node.args) > position else node.kwargs.get(names[position], default)


def _set_arguments(node: fx.Node, mask: fx.Node | None, is_causal: bool) -> None:
    dropout = node.args[DROPOUT] if len(node.args) > DROPOUT else node.kwargs.get("dropout_p", 0.0)
    node.args = (*node.args[:MASK], mask, dropout, is_causal)
    node.kwargs = {k: v for k, v in node.kwargs.items() if k not in ("attn_mask", "dropout_p", "is_causal")}


def _evaluate(segment: Segment, mask: fx.Node, constants: dict[str, Tensor]) -> Tensor | None:
    """The value of a mask in one segment; None where it depends on more than constants."""
    names = dict(zip(segment.placeholders(), (*segment.parameters, *segment.inputs), strict=True))
    needed = ancestors(mask)
    sources = [node for node in needed if node.op == "placeholder"]
    if any(names[node] not in constants for node in sources):
        return None
    graph = fx.Graph()
    copy: dict[fx.Node, fx.Node] = {}
    for node in segment.graph.graph.nodes:
        if node in needed:
            copy[node] = (
                graph.placeholder(node.name) if node.op == "placeholder" else graph.node_copy(node, copy.__getitem__)
            )
    graph.output(copy[mask])
    ordered = [node for node in segment.placeholders() if node in needed]
    return fx.GraphModule(torch.nn.Module(), graph)(*(constants[names[node]] for node in ordered))


def _is_causal(mask: Tensor) -> bool:
    """Whether a bool mask, or an additive one, lets position i see exactly 0..i."""
    length = mask.shape[-1]
    expected = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    if mask.dtype == torch.bool:
        seen, hidden = mask, ~mask
    else:
        seen, hidden = mask == 0, mask <= torch.finfo(mask.dtype).min / 2
    return mask.shape[-2] == length and bool(((seen == expected) & (hidden == ~expected)).all())


def _mask_documents(program: Program, causal: list[tuple[list[Segment], fx.Node]]) -> None:
    embed = next((segment for segment in program.segments if segment.kind == "embed"), None)
    if embed is None:
        raise PassError("document_ids needs a model with a module list named 'layers'")
    graph = embed.graph.graph
    device = embed.placeholders()[0].meta["val"].device
    with program.fake_mode:
        ids_value = torch.empty(program.micro_batch_size, program.sequence_length, dtype=torch.int64, device=device)
    ids = embed.add_input("document_ids", ids_value)
    embed.inputs = (*embed.inputs, "document_ids")
    output = graph.output_node()
    length = program.sequence_length
    with graph.inserting_before(output):
        rows = insert(program, graph, aten.unsqueeze.default, ids, 2, like=ids)
        columns = insert(program, graph, aten.unsqueeze.default, ids, 1, like=ids)
        same = insert(program, graph, aten.eq.Tensor, rows, columns, like=ids)
        ones = insert(program, graph, aten.ones_like.default, same, like=ids)
        earlier = insert(program, graph, aten.tril.default, ones, like=ids)
        visible = insert(program, graph, aten.logical_and.default, same, earlier, like=ids)
        mask = insert(program, graph, aten.view.default, visible, [-1, 1, length, length], like=ids)
    output.args = ((*output.args[0], mask),)  # type: ignore[misc]
    embed.outputs = (*embed.outputs, "document_mask")
    placeholders: dict[int, fx.Node] = {}
    for group, node in causal:
        if id(group[0].graph) not in placeholders:
            placeholders[id(group[0].graph)] = group[0].add_input("document_mask", mask.meta["val"])
            for segment in group:
                segment.inputs = (*segment.inputs, "document_mask")
        _set_arguments(node, placeholders[id(group[0].graph)], False)
