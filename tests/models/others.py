"""Small MoE models of transformers that are not OLMoE, two of their layers sparse."""

from typing import Any

import pytest
import torch

from tests.models.twins import SIZES


def other_model(name: str, **changes: Any) -> Any:
    """Mixtral, Qwen3-MoE or DeepSeek-V3 (dense first layer, shared expert), with routers that tell experts apart."""
    kind, config = _kinds(changes)[name]
    torch.manual_seed(0)
    config._experts_implementation = "eager"
    model = kind(config).train()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("gate.weight"):
                parameter.normal_(std=0.3)  # zero at first: all experts would tie
    return model


def _kinds(changes: dict[str, Any]) -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    sizes = {
        **SIZES,
        "num_key_value_heads": 2,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        **changes,
    }
    mixtral = transformers.MixtralConfig(**{**sizes, "intermediate_size": 16}, num_local_experts=4)
    qwen = transformers.Qwen3MoeConfig(
        **sizes, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
    )
    deepseek = transformers.DeepseekV3Config(
        **{**sizes, "num_key_value_heads": 4, "num_hidden_layers": 3}, moe_intermediate_size=16, n_routed_experts=8,
        num_experts_per_tok=2, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    return {
        "Mixtral": (transformers.MixtralForCausalLM, mixtral),
        "Qwen3-MoE": (transformers.Qwen3MoeForCausalLM, qwen),
        "DeepSeek-V3": (transformers.DeepseekV3ForCausalLM, deepseek),
    }
