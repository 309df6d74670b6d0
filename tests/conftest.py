"""Fixtures that many tests share; and one thread a worker: tiny operations on many threads wait for each other."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.captured import share_captures
from tests.ranks import ranks  # noqa: F401  a fixture
from tests.tiny_run import write_config, write_data

torch.set_num_threads(1)
share_captures()

RANK_TESTS = (
    "tests/test_layouts.py",
    "tests/test_pipeline_layouts.py",
    "tests/test_tensor_parallel.py",
    "tests/test_checkpointing.py",
    "tests/test_ranks.py",
    "tests/test_watch_finite.py",
    "tests/runtime/test_trainer_ranks.py",
    "tests/runtime/test_resume_ranks.py",
    "tests/runtime/checkpoint/test_layouts.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of several ranks go to one worker, first: they share its pool of processes."""
    from xdist.scheduler import LoadScopeScheduling

    class RanksTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ranks" if nodeid.startswith(RANK_TESTS) else nodeid

    return RanksTogether(config, log)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny.toml, corpus.jsonl, tokenizer.json and data/; tests must not write into it."""
    folder = tmp_path_factory.mktemp("tiny")
    write_data(folder)
    write_config(folder)
    return folder
