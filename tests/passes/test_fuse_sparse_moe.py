"""FuseSparseMoE: what it emits (golden), which weights it merges and how they go back, and what it refuses."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import optimus_compiler as optimus
from optimus_compiler.models import OlmoeForCausalLM
from optimus_compiler.passes import Canonicalise, CausalMask, FuseSparseMoE, PassError, PassPipeline
from optimus_compiler.passes.expert_region import _reduced_sizes
from optimus_compiler.program import Program
from tests.models.twins import olmoe_config, ours
from tests.v4_block import with_v4_blocks

PIPELINE = PassPipeline((Canonicalise(), CausalMask(), FuseSparseMoE()))

BLOCK = """
mlp reshape
mlp.gate linear
mlp.gate softmax
mlp.gate topk
mlp.experts index_tokens
mlp.experts grouped_mlp
mlp.experts reduce_outputs
mlp view_as
"""


def sparse(**changes: Any) -> Any:
    return ours(olmoe_config(**changes))


def captured(model: Any, **options: Any) -> Program:
    return optimus.capture(model, sequence_length=8, micro_batch_size=2, **options)


def block(program: Program) -> list[str]:
    """Module and operation of everything in a layer's SparseMoE block but tuple indexing."""
    layer = next(s for s in program.segments if s.kind == "layer")
    lines = []
    for node in layer.graph.graph.nodes:
        paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        if node.op == "call_function" and paths and ".mlp" in paths[-1] and hasattr(node.target, "_schema"):
            lines.append(f"mlp{paths[-1].partition('.mlp')[2]} {node.target._schema.name.partition('::')[2]}")
    return lines


def test_golden_block() -> None:
    program = captured(ours(olmoe_config()))
    PIPELINE.run(program)
    assert block(program) == BLOCK.split("\n")[1:-1]


def test_layers_stay_one_function_and_the_head_stays_alone() -> None:
    program = captured(ours(olmoe_config(num_hidden_layers=4)))
    PIPELINE.run(program)
    assert [segment.kind for segment in program.segments] == [
        "const",
        "embed",
        "layer",
        "layer",
        "layer",
        "layer",
        "head",
    ]
    assert len(program.groups()) == 4
    assert program.verify() == []


def test_parameters_are_merged_and_split_back() -> None:
    model = with_v4_blocks(sparse())
    program = captured(model)
    PIPELINE.run(program)
    spec = program.parameters["model.layers.1.mlp.experts.gate_up_proj"]
    assert (spec.shape, spec.role) == ((6, 2, 20, 24), "expert")
    assert spec.source.names[:2] == (
        "model.layers.1.mlp.experts.0.gate_proj.weight",
        "model.layers.1.mlp.experts.0.up_proj.weight",
    )
    state = model.state_dict()
    full = spec.source.build(state, spec.shape)
    assert torch.equal(full[3, 0], state["model.layers.1.mlp.experts.3.gate_proj.weight"])
    assert torch.equal(full[3, 1], state["model.layers.1.mlp.experts.3.up_proj.weight"])
    back = spec.source.split(full)
    assert all(torch.equal(back[name], state[name]) for name in spec.source.names)
    assert not any("experts.0" in name for name in program.parameters)


def test_big_regions_are_checked_at_reduced_sizes() -> None:
    """A block that would take 100 GFLOP to run is recognised in no time, and one with a wrong activation refused."""
    config = olmoe_config(
        hidden_size=1024,
        intermediate_size=1024,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    with torch.device("meta"):
        model = OlmoeForCausalLM(config)
    program = optimus.capture(model, sequence_length=4095, micro_batch_size=2)
    assert PIPELINE.run(program)[-1].matches == 1
    layers: Any = model.model.layers
    layers[0].mlp.experts = OtherExperts(layers[0].mlp.experts, "gelu")
    with pytest.raises(PassError, match=r"^model.layers.0.mlp.experts does not compute"):
        PIPELINE.run(optimus.capture(model, sequence_length=1024, micro_batch_size=2))  # as many tokens as elements


@pytest.mark.parametrize("sizes", [(64, 1024, 2048), (96, 1024, 2048), (144, 1536, 3072), (240, 1536, 3072)], ids=str)
def test_every_batch_of_the_mula_models_can_be_checked_at_reduced_sizes(sizes: tuple[int, int, int]) -> None:
    """Also where tokens, sequence, hidden size and width are the same numbers: else it takes minutes and 14 GB."""
    for batch, length in itertools.product((1, 2, 3, 4, 6, 8, 16), (512, 1024, 2048, 4096, 8192)):
        region: Any = SimpleNamespace(micro_batch_size=batch, sequence_length=length)
        roles: Any = SimpleNamespace(sizes=lambda: sizes, top_k=8)
        smaller = _reduced_sizes(region, roles)
        assert smaller
        experts, width, hidden = sizes
        assert (smaller[experts], smaller[8]) == (experts, 8)
        assert smaller[2 * width] == 2 * smaller[width]
        assert smaller[batch * length] == batch * smaller[length]
        assert 6 * smaller[batch * length] * 8 * smaller[width] * smaller[hidden] < 10**10  # a second or two


class OtherExperts(nn.Module):
    """Experts that compute something else than down(silu(gate(x)) * up(x))."""

    def __init__(self, inner: Any, kind: str) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.kind = inner.gate_up_proj, inner.down_proj, kind

    def forward(self, x_TH: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> Tensor:
        if self.kind == "detached":
            x_TH = x_TH.detach()
        weights_TE = torch.zeros(x_TH.shape[0], self.down_proj.shape[0]).scatter(1, indices_TK, weights_TK)
        gate, up = torch.bmm(x_TH.expand(self.down_proj.shape[0], -1, -1), self.gate_up_proj.transpose(1, 2)).chunk(
            2, -1
        )
        if self.kind == "up first":
            gate, up = up, gate
        if self.kind == "clamped":
            gate = gate.clamp(max=7)
        hidden = (F.gelu(gate) if self.kind == "gelu" else F.silu(gate)) * up
        if self.kind == "square weights":
            weights_TE = weights_TE**2
        return (torch.bmm(hidden, self.down_proj.transpose(1, 2)) * weights_TE.t()[..., None]).sum(0)


@pytest.mark.parametrize("kind", ["gelu", "up first", "square weights", "clamped", "detached"])
def test_experts_that_compute_something_else_are_refused(kind: str) -> None:
    model = sparse()
    for layer in model.model.layers:
        layer.mlp.experts = OtherExperts(layer.mlp.experts, kind)
    with pytest.raises(PassError, match=r"^model.layers.0.mlp.experts does not compute down\(silu"):
        PIPELINE.run(captured(model))


def test_equal_code_with_the_right_mathematics_is_accepted() -> None:
    model = sparse()
    for layer in model.model.layers:
        layer.mlp.experts = OtherExperts(layer.mlp.experts, "silu")
    assert PIPELINE.run(captured(model))[-1].matches == 2


def test_a_router_without_experts_module_is_an_error() -> None:
    model = sparse()
    for layer in model.model.layers:
        layer.mlp.specialists = layer.mlp.experts
        del layer.mlp.experts
        layer.mlp.forward = _with_specialists.__get__(layer.mlp)
    with pytest.raises(PassError, match="no module named 'experts' was found"):
        PIPELINE.run(captured(model))


def _with_specialists(self: Any, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
    x_TH = x_BSH.reshape(-1, x_BSH.shape[-1])
    logits, weights, indices = self.gate(x_TH)
    return self.specialists(x_TH, indices, weights).view_as(x_BSH), logits
