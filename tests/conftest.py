"""Fixtures that many tests share; and one thread a worker: tiny operations on many threads wait for each other."""

import getpass
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.captured import share_captures
from tests.ranks import ranks  # noqa: F401  a fixture
from tests.tiny_run import write_config, write_data

torch.set_num_threads(1)
# torch's own choice, said aloud: a run has a cache of its own otherwise, and compiles the C++ kernels anew for it
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads of child processes wait without taking a core
share_captures()

RANK_TESTS = (
    "tests/test_layouts.py",
    "tests/test_pipeline_layouts.py",
    "tests/test_tensor_parallel.py",
    "tests/test_checkpointing.py",
    "tests/test_ranks.py",
    "tests/test_watch_finite.py",
    "tests/runtime/evaluate/test_score.py",
    "tests/runtime/test_trainer_ranks.py",
    "tests/runtime/test_resume_ranks.py",
    "tests/runtime/checkpoint/test_layouts.py",
    "tests/runtime/kernels/test_exchange_tokens.py",
    "tests/cli/test_evaluate.py",
)
LAUNCHES = "tests/runtime/resilience/test_launch.py"
LONG = ("tests/runtime/kernels/test_triton_", "tests/runtime/plan/test_search.py", "tests/test_determinism.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests come first: the last ones then end together on all workers."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of one group go to one worker, the longest group first: those of several ranks share its pool of
    processes, and launches the undisturbed runs that they are compared with. Other tests go to whichever is idle."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupsTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(RANK_TESTS):
                return "ranks"
            return "launches" if nodeid.startswith(LAUNCHES) else nodeid

    return GroupsTogether(config, log)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny.toml, corpus.jsonl, tokenizer.json and data/; tests must not write into it."""
    folder = tmp_path_factory.mktemp("tiny")
    write_data(folder)
    write_config(folder)
    return folder
