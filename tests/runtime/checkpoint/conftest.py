"""A small run, in an empty directory for each test."""

from pathlib import Path

import pytest

from tests.runtime.checkpoint.small_run import SmallRun


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    return SmallRun(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(model: SmallRun, tmp_path: Path) -> SmallRun:
    """A run in an empty directory."""
    model.move(tmp_path)
    return model
