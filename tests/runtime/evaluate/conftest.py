"""A small OLMoE in a Hugging Face folder, with a byte-level tokenizer: what is evaluated here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.byte_level import train_byte_level

VOCABULARY, LENGTH = 300, 40
TEXT = "The cat sat on the mat. A stone falls because of gravity. def f(x): return x + 1\n" * 20


@pytest.fixture(scope="session")
def olmoe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """transformers' own OLMoE, saved by transformers; large initial weights tell the choices apart."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    folder = tmp_path_factory.mktemp("olmoe")
    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.2,
        pad_token_id=1,
        eos_token_id=0,
    )
    OlmoeForCausalLM(config).save_pretrained(folder)
    train_byte_level([TEXT], VOCABULARY, ["<|endoftext|>", "<|padding|>"]).save(str(folder / "tokenizer.json"))
    return folder
