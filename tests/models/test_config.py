"""Configurations: Hugging Face's defaults and files, and what is refused."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from optimus_compiler.models import OlmoConfig, OlmoeConfig, from_hf
from tests.models.twins import olmo_config, olmoe_config

# The published config.json of OLMoE-1B-7B-0924, as transformers 4 wrote it.
PUBLISHED = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 50304,
}


@pytest.mark.parametrize(("config_class", "name"), [(OlmoConfig, "OlmoConfig"), (OlmoeConfig, "OlmoeConfig")])
def test_defaults_and_files_of_transformers(config_class: Any, name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = getattr(transformers, name)()
    assert from_hf(reference.to_dict()) == config_class()

    changed = getattr(transformers, name)(rope_theta=5e5, num_key_value_heads=8, clip_qkv=8.0, hidden_size=1024)
    changed.save_pretrained(tmp_path)
    expected = config_class(rope_theta=500000, num_key_value_heads=8, clip_qkv=8, hidden_size=1024)
    assert from_hf(tmp_path) == from_hf(str(tmp_path)) == expected
    back = getattr(transformers, name)(**asdict(expected))
    assert from_hf(back.to_dict()) == expected


def test_the_published_file() -> None:
    assert from_hf(PUBLISHED) == OlmoeConfig(intermediate_size=1024)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 26}, r"OlmoConfig: hidden_size = 26 must be divisible by num_attention_heads = 4\."),
        ({"hidden_size": 12}, "hidden_size = 12 must be an even multiple of num_attention_heads = 4"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 must be a divisor of num_attention_heads = 4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0 must be positive"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 must be positive"),
        ({"num_hidden_layers": 2.0}, r"num_hidden_layers = 2\.0 must be of type int"),
        ({"vocab_size": True}, "vocab_size = True must be of type int"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false' must be of type bool"),
        ({"rope_theta": "1e4"}, "rope_theta = '1e4' must be of type float"),
        ({"rope_theta": 0}, r"rope_theta = 0\.0 must be positive"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' must be 'silu'"),
        ({"attention_dropout": 0.1}, r"attention_dropout = 0\.1 must be 0, as dropout is not implemented"),
        ({"clip_qkv": -1.0}, r"clip_qkv = -1\.0 must be positive or None"),
        ({"initializer_range": 0.0}, r"initializer_range = 0\.0 must be positive"),
        ({"pad_token_id": 97}, "pad_token_id = 97 must be None or a token id below vocab_size = 97"),
    ],
)
def test_values_no_model_can_have(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        olmo_config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok = 7 must be at most num_experts = 6"),
        ({"num_experts": 0}, "num_experts = 0 must be positive"),
        ({"router_aux_loss_coef": -0.1}, r"router_aux_loss_coef = -0\.1 must be zero or positive"),
        ({"rms_norm_eps": 0.0}, r"rms_norm_eps = 0\.0 must be positive"),
        ({"attention_dropout": 0.5}, r"OlmoeConfig: attention_dropout = 0\.5 must be 0"),
    ],
)
def test_values_no_sparse_model_can_have(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        olmoe_config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not implemented; known: 'olmo', 'olmoe'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling asks for RoPE of type 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters asks for RoPE of type 'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters sets 'partial_rotary_factor'"),
        ({"num_expert": 8}, "does not implement the setting 'num_expert'; did you mean 'num_experts'?"),
        ({"sliding_window": 4096}, "does not implement the setting 'sliding_window'"),
        ({"attention_dropout": 0.1}, "dropout is not implemented"),
    ],
)
def test_files_of_other_models_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_hf(PUBLISHED | changes)
    if "model_type" not in changes:
        with pytest.raises(ValueError, match=message):
            OlmoeConfig.from_dict(PUBLISHED | changes)


def test_a_class_refuses_the_other_type() -> None:
    with pytest.raises(ValueError, match="model_type 'olmoe' is not 'olmo', which OlmoConfig describes"):
        OlmoConfig.from_dict(PUBLISHED)


def test_a_folder_without_a_usable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        from_hf(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "olmo",')
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        from_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(["olmo"]))
    with pytest.raises(ValueError, match=r"config\.json holds a list"):
        from_hf(tmp_path)
