"""Named models, Intel's tags and the parameter counts of the paper's table."""

import math
import re
from typing import Any

import pytest
import torch

from optimus_compiler.models import OlmoConfig, OlmoeConfig, build, from_name, parameter_count
from tests.models.twins import olmo_config, olmoe_config


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mula-1b", "1.2", "1.2"),
        ("mula-20b-a2b", "20.1", "2.4"),
        ("mula-100b-a7b", "100.0", "7.6"),
        ("mula-220b-a10b", "220.2", "10.0"),
    ],
)
def test_parameter_counts_of_the_paper(name: str, total: str, active: str) -> None:
    counted = [f"{count / 1e9:.1f}" for count in parameter_count(from_name(name))]
    assert counted == [total, active]


def test_parameter_counts_of_the_7b_model() -> None:
    total, active = parameter_count(from_name("mula-7b-a1b"))
    assert (f"{total / 1e9:.2f}", f"{active / 1e9:.2f}") == ("6.92", "1.28")
    H, L, V, E, K, width = 2048, 16, 50304, 64, 8, 1024
    dense = 2 * V * H + L * (4 * H * H + 4 * H + E * H) + H  # embedding and head; attention, norms, router; last norm
    assert (total, active) == (dense + L * E * 3 * H * width, dense + L * K * 3 * H * width)


@pytest.mark.parametrize("config", [olmo_config(), olmo_config(tie_word_embeddings=True), olmoe_config()])
def test_parameter_count_of_a_built_model(config: Any) -> None:
    model = build(config)
    total, active = parameter_count(model)
    assert (total, active) == parameter_count(config)
    assert total == sum(p.numel() for p in model.parameters())
    expert = 3 * config.hidden_size * config.intermediate_size
    assert total - active == (config.num_hidden_layers * 4 * expert if isinstance(config, OlmoeConfig) else 0)


@pytest.mark.parametrize(
    ("tagged", "name"),
    [
        ("OLMoE-1B-7B-0924", "mula-7b-a1b"),
        ("OLMoE-1B-7B-0924--SE1.5-L32", "mula-20b-a2b"),
        ("OLMoE-1B-7B-0924--SA1.5-SH1.5-SE2.25-SI1.5-L48", "mula-100b-a7b"),
        ("allenai/OLMoE-1B-7B-0924--SA1.5-SH1.5-SE3.75-SI1.5-L64", "mula-220b-a10b"),
        ("ALLENAI/olmoe-1b-7b-0924--l32-se1.5", "Mula-20B-A2B"),
        ("allenai/OLMo-1B-hf", "mula-1b"),
        ("OLMo-1B-hf--L16", "mula-1b"),
    ],
)
def test_tags_describe_the_papers_models(tagged: str, name: str) -> None:
    assert from_name(tagged) == from_name(name)


def test_each_tag_scales_its_fields() -> None:
    config = from_name("OLMoE-1B-7B-0924--SA0.5-SC0.25-SE0.125-SI3-SH0.5-L2")
    assert isinstance(config, OlmoeConfig)
    assert (config.num_attention_heads, config.num_key_value_heads) == (8, 8)
    assert (config.num_experts_per_tok, config.num_experts) == (2, 8)
    assert (config.intermediate_size, config.hidden_size, config.num_hidden_layers) == (3072, 1024, 2)


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ("SX2", "'SX2' is no tag of this model; give L, SA, SH, SE, SI, SC, each with a number."),
        ("SE", "'SE' is no tag of this model"),
        ("SE1.5.2", "'SE1.5.2' is no tag of this model"),
        ("SE1,5", "'SE1,5' is no tag of this model"),
        ("SE\u0661", "'SE\u0661' is no tag of this model"),  # a digit, but not one of ours
        ("L-4", "'L' is no tag of this model"),
        ("", "'' is no tag of this model"),
        ("SE1.5--L32", "'' is no tag of this model"),
        ("SE1.3", "'SE1.3' makes num_experts 83.2, not a positive whole number."),
        ("L1.5", "'L1.5' makes num_hidden_layers 1.5, not a positive whole number."),
        ("L0", "'L0' makes num_hidden_layers 0, not a positive whole number."),
        ("L2-L4", "'L4' sets num_hidden_layers a second time; give each tag once."),
        ("SA1.5", "hidden_size = 2048 must be divisible by num_attention_heads = 24."),
        ("SC16", "num_experts_per_tok = 128 must be at most num_experts = 64."),
    ],
)
def test_tags_that_are_refused(tags: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        from_name(f"OLMoE-1B-7B-0924--{tags}")


def test_a_dense_model_has_no_expert_tags() -> None:
    with pytest.raises(ValueError, match="'SE2' is no tag of this model; give L, SA, SH, SI, each with a number"):
        from_name("OLMo-1B-hf--SE2")


def test_small_variants() -> None:
    sparse, dense = from_name("olmoe-tiny"), from_name("olmo-tiny")
    assert sparse == OlmoeConfig(
        vocab_size=50304,
        num_hidden_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        num_experts=8,
        num_experts_per_tok=2,
        intermediate_size=64,
    )
    assert dense == OlmoConfig(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512)
    torch.manual_seed(0)
    ids = torch.randint(2, 50304, (2, 64))
    for config in (sparse, dense):
        loss = build(config)(ids, labels=ids.clone()).loss.item()
        assert loss == pytest.approx(math.log(50304), abs=0.1), "an untrained model knows nothing"


def test_overrides() -> None:
    config = from_name("olmoe-tiny", num_hidden_layers=2, num_experts=4)
    assert isinstance(config, OlmoeConfig)
    assert (config.num_hidden_layers, config.num_experts, config.hidden_size) == (2, 4, 128)
    assert (config.pad_token_id, config.eos_token_id) == (1, 50279)
    assert from_name("olmoe-tiny") != config, "the registered variant is untouched"
    heads = from_name("olmoe-tiny", num_attention_heads=2)
    assert heads.num_key_value_heads == 2


def test_another_vocabulary_forgets_the_special_tokens() -> None:
    config = from_name("olmoe-tiny", vocab_size=1000)
    assert (config.pad_token_id, config.eos_token_id) == (None, None)
    assert from_name("olmoe-tiny", vocab_size=1000, eos_token_id=7).eos_token_id == 7
    assert from_name("olmoe-tiny", vocab_size=50304).pad_token_id == 1


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("mula-7b-a2b", {}, "unknown model 'mula-7b-a2b'; did you mean 'mula-7b-a1b'?"),
        ("OLMoE-1B-7B-0925--L2", {}, "unknown model 'OLMoE-1B-7B-0925--L2'; did you mean 'OLMoE-1B-7B-0924'?"),
        ("zzz", {}, "unknown model 'zzz'; known: OLMo-1B-hf, OLMoE-1B-7B-0924, mula-1"),
        ("", {}, "unknown model ''; known: "),
        ("mula-1b", {"num_layers": 2}, "mula-1b has no setting 'num_layers'; did you mean 'num_hidden_layers'?"),
        ("mula-1b", {"num_experts": 2}, "mula-1b has no setting 'num_experts'"),
        ("olmoe-tiny", {"num_experts": 1}, "num_experts_per_tok = 2 must be at most num_experts = 1"),
    ],
)
def test_unknown_names_and_overrides(name: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        from_name(name, **overrides)
