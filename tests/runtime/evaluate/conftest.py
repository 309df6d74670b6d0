"""A small OLMoE in a Hugging Face folder, with a byte-level tokenizer: what is evaluated here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.byte_level import train_byte_level
from tests.models.twins import olmoe_config, twins

VOCABULARY, LENGTH = 300, 40
TEXT = "The cat sat on the mat. A stone falls because of gravity. def f(x): return x + 1\n" * 20


@pytest.fixture(scope="session")
def olmoe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """transformers' own OLMoE, saved by transformers; large initial weights tell the choices apart."""
    folder = tmp_path_factory.mktemp("olmoe")
    special = {"pad_token_id": 1, "eos_token_id": 0}
    config = olmoe_config(vocab_size=VOCABULARY, hidden_size=32, max_position_embeddings=LENGTH, **special)
    _, reference = twins(config)
    reference.save_pretrained(folder)
    train_byte_level([TEXT], VOCABULARY, ["<|endoftext|>", "<|padding|>"]).save(str(folder / "tokenizer.json"))
    return folder
