"""Fixtures that many tests share; and one thread a worker: tiny operations on many threads wait for each other."""

from pathlib import Path

import pytest
import torch

from tests.ranks import ranks  # noqa: F401  a fixture
from tests.tiny_run import write_config, write_data

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny.toml, corpus.jsonl, tokenizer.json and data/; tests must not write into it."""
    folder = tmp_path_factory.mktemp("tiny")
    write_data(folder)
    write_config(folder)
    return folder
