"""The models export strictly, in one graph whose size does not depend on the number of experts."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from optimus_compiler.models import ModelConfig, build
from tests.models.twins import batch, gradients, olmo_config, olmoe_config, ours, relative_error


class Loss(nn.Module):
    """What a capture wraps: the loss of token ids and labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.model(input_ids, labels=labels, attention_mask=attention_mask).loss


CONFIGS: dict[str, ModelConfig] = {
    "olmo": olmo_config(num_hidden_layers=1),
    "olmoe-4-experts": olmoe_config(num_hidden_layers=1, num_key_value_heads=2, clip_qkv=0.5, num_experts=4),
    "olmoe-16-experts": olmoe_config(num_hidden_layers=1, num_key_value_heads=2, clip_qkv=0.5, num_experts=16),
}
DTYPES = [torch.float32, torch.bfloat16]


@cache
def export(name: str, dtype: torch.dtype) -> torch.export.ExportedProgram:
    return torch.export.export(Loss(ours(CONFIGS[name]).to(dtype)), batch(), strict=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_exported_graph_computes_the_same(name: str, dtype: torch.dtype) -> None:
    model, exported = ours(CONFIGS[name]).to(dtype), export(name, dtype).module()
    ids, labels = batch()
    expected, loss = model(ids, labels=labels).loss, exported(ids, labels)
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    found = gradients(exported)
    for gradient_name, gradient in gradients(model).items():
        assert relative_error(found[f"model.{gradient_name}"], gradient) <= 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_node_count_does_not_depend_on_the_number_of_experts(dtype: torch.dtype) -> None:
    few, many = (len(export(f"olmoe-{E}-experts", dtype).graph.nodes) for E in (4, 16))
    assert few == many


def test_nodes_carry_the_class_names_that_passes_look_for() -> None:
    classes = {
        str(module_class).rsplit(".", 1)[-1]
        for node in export("olmoe-4-experts", torch.float32).graph.nodes
        for _, module_class in node.meta.get("nn_module_stack", {}).values()
    }
    assert {"OlmoeExperts", "OlmoeTopKRouter", "OlmoeSparseMoeBlock", "OlmoeAttention", "OlmoeRMSNorm"} <= classes


@pytest.mark.parametrize("name", CONFIGS)
def test_without_a_mask_attention_is_causal_by_flag(name: str) -> None:
    """The one attention says is_causal and is given no mask."""
    (node,) = [n for n in export(name, torch.float32).graph.nodes if "scaled_dot_product" in str(n.target)]
    arguments = dict(zip(("q", "k", "v", "attn_mask", "dropout_p", "is_causal"), node.args, strict=False))
    arguments |= node.kwargs
    assert arguments["is_causal"] is True
    assert arguments.get("attn_mask") is None


def test_a_padding_mask_is_an_input_like_any_other() -> None:
    model = Loss(ours(CONFIGS["olmoe-4-experts"]))
    ids, labels = batch()
    full, padded = torch.ones_like(ids), torch.ones_like(ids).tril(4)
    exported = torch.export.export(model, (ids, labels, full), strict=True).module()
    assert torch.equal(exported(ids, labels, padded), model(ids, labels, padded))
    assert not torch.equal(exported(ids, labels, padded), exported(ids, labels, full))


@pytest.mark.parametrize("config", [olmoe_config(), olmo_config()])
def test_a_model_on_the_meta_device_holds_parameters_only(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = build(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert list(model.buffers()) == []
