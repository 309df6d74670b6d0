"""One model twice, ours and transformers', with the same weights; and the comparison of what both compute."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimus_compiler.models import (
    ModelConfig,
    OlmoConfig,
    OlmoeConfig,
    OlmoeForCausalLM,
    OlmoForCausalLM,
    build,
)

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def olmoe_config(**changes: Any) -> OlmoeConfig:
    return OlmoeConfig(
        **({**SIZES, "num_experts": 6, "num_experts_per_tok": 2, "output_router_logits": True} | changes)
    )


def olmo_config(**changes: Any) -> OlmoConfig:
    return OlmoConfig(**(SIZES | changes))


def batch(B: int = 2, S: int = 13, seed: int = 0) -> tuple[Tensor, Tensor]:
    """input_ids [B, S], and labels that are not the same tensor and leave a few positions out."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, SIZES["vocab_size"], (B, S), generator=generator)
    labels = ids.clone()
    labels[:, 5:8] = -100
    return ids, labels


def ours(config: ModelConfig, seed: int = 0) -> OlmoForCausalLM | OlmoeForCausalLM:
    """Our model in training mode, with norms and biases drawn too: at one and zero they would hide mistakes."""
    torch.manual_seed(seed)
    model = build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model.train()


def theirs(config: ModelConfig, experts: str = "eager") -> Any:
    """transformers' model of the same configuration, in training mode."""
    transformers = pytest.importorskip("transformers")
    settings = transformers.OlmoeConfig if isinstance(config, OlmoeConfig) else transformers.OlmoConfig
    model_class = transformers.OlmoeForCausalLM if isinstance(config, OlmoeConfig) else transformers.OlmoForCausalLM
    hf_config = settings(**asdict(config), attn_implementation="sdpa")
    hf_config._experts_implementation = experts
    return model_class(hf_config).train()


def twins(config: ModelConfig, experts: str = "eager") -> tuple[Any, Any]:
    model, reference = ours(config), theirs(config, experts)
    reference.load_state_dict(model.state_dict(), strict=True)
    return model, reference


def relative_error(value: Tensor, reference: Tensor) -> float:
    """||value - reference|| / ||reference|| in fp64; where the reference is zero, the value must be exactly zero."""
    value, reference = value.detach().double(), reference.detach().double()
    difference, norm = (value - reference).norm(), reference.norm()
    return float(difference) if norm == 0 else float(difference / norm)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter's gradient by name; one that is missing fails here."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} got no gradient"
        found[name] = parameter.grad
    return found


def assert_same(config: ModelConfig, tolerance: float = 1e-6, **inputs: Tensor) -> tuple[Any, Any]:
    """Runs both twins forward and backward; logits, losses, router logits and gradients agree within the tolerance."""
    model, reference = twins(config)
    out, expected = model(**inputs), reference(**inputs, use_cache=False)
    for objective in (out, expected):
        (objective.loss if "labels" in inputs else objective.logits.square().mean()).backward()
    assert relative_error(out.logits, expected.logits) <= tolerance
    if "labels" in inputs:
        assert out.loss.dtype == torch.float32
        assert relative_error(out.loss, expected.loss) <= tolerance
    if isinstance(config, OlmoeConfig) and config.output_router_logits:
        assert relative_error(out.aux_loss, expected.aux_loss) <= tolerance
        assert len(out.router_logits) == len(expected.router_logits) == config.num_hidden_layers
        for logits_TE, expected_TE in zip(out.router_logits, expected.router_logits, strict=True):
            assert logits_TE.shape == expected_TE.shape
            assert relative_error(logits_TE, expected_TE) <= tolerance
    grads, expected_grads = gradients(model), gradients(reference)
    assert grads.keys() == expected_grads.keys()
    errors = {name: relative_error(grads[name], expected_grads[name]) for name in grads}
    assert max(errors.values()) <= tolerance, max(errors.items(), key=lambda item: item[1])
    return model, out
