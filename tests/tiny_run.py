"""A run small enough for tests: prepared data of a few hundred tokens' vocabulary, and a configuration that fits it."""

from __future__ import annotations

import json
from pathlib import Path

from optimus_compiler.runtime.data.prepare import prepare
from tests.byte_level import train_byte_level

VOCABULARY = 300
CONTEXT_LENGTH = 16


def text_of(functions: int) -> str:
    return "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(functions))


TEXT = text_of(200)

CONFIG = """\
[model]
name = "olmoe-tiny"

[model.overrides]
vocab_size = 300
hidden_size = 32
intermediate_size = 16
num_hidden_layers = 2
num_attention_heads = 2
num_experts = 4

[train]
steps = 4
micro_batch_size = 2
global_batch_size = 4
precision = "fp32"
backend = "eager"
"""


def write_tokenizer(path: Path) -> Path:
    train_byte_level([TEXT], VOCABULARY, ["<|endoftext|>"]).save(str(path))
    return path


def write_corpus(path: Path, text: str = TEXT) -> Path:
    path.write_text(json.dumps({"text": text}) + "\n")
    return path


def write_data(folder: Path, text: str = TEXT) -> Path:
    """Prepared data in `folder`/data, with the corpus and the tokenizer beside it."""
    corpus, tokenizer = write_corpus(folder / "corpus.jsonl", text), write_tokenizer(folder / "tokenizer.json")
    prepare([corpus], tokenizer=tokenizer, context_length=CONTEXT_LENGTH, output=folder / "data")
    return folder / "data"


def write_config(folder: Path) -> Path:
    path = folder / "tiny.toml"
    path.write_text(CONFIG)
    return path
