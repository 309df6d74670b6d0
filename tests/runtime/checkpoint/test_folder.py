"""Which checkpoints of a run are tried, in which order, and which give way to a new one."""

from functools import partial
from pathlib import Path

import pytest
import torch

from optimus_compiler.config import CheckpointSection, KeepPersistent
from optimus_compiler.mesh import Mesh
from optimus_compiler.program import ParameterSpec, Source
from optimus_compiler.runtime.checkpoint.folder import Checkpoint, CheckpointFolder
from optimus_compiler.runtime.checkpoint.manifest import Kind
from optimus_compiler.runtime.checkpoint.shards import part_of_parameter
from optimus_compiler.runtime.checkpoint.write import write_checkpoint
from tests.runtime.checkpoint.small_run import plain_manifest, progress

ALL = KeepPersistent()


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path)


def save(folder: CheckpointFolder, step: int, kind: Kind = "full", keep: KeepPersistent = ALL) -> Path:
    spec = ParameterSpec("w", (4,), torch.float32, Source(("w",), (4,)))
    parts = {"w": part_of_parameter(spec, Mesh.abstract(), torch.full((4,), float(step)), 0)}
    return write_checkpoint(folder, kind, step, parts, partial(plain_manifest, kind, progress(step)), keep, None)


def names(folder: CheckpointFolder) -> list[str]:
    return [each.path.name for each in folder.found()]


def test_two_full_slots_of_which_the_older_gives_way(folder: CheckpointFolder) -> None:
    for step in (2, 4, 6, 8):
        assert save(folder, step).name == f"step-{step}"
    assert names(folder) == ["step-8", "step-6"]
    assert sorted(path.name for path in folder.path.iterdir()) == ["step-6", "step-8"]


def test_the_older_has_gone_before_the_new_one_is_written(folder: CheckpointFolder) -> None:
    """So that no more than two full checkpoints ever need space."""
    save(folder, 2)
    save(folder, 4)
    partial_folder, number = folder.begin("full", 6)
    assert (partial_folder.name, number) == (".step-6.partial", 3)
    assert names(folder) == ["step-4"]
    assert folder.torn() == [partial_folder]
    save(folder, 8)
    assert folder.torn() == []


def test_newest_is_the_last_saved_not_the_largest_step(folder: CheckpointFolder) -> None:
    save(folder, 10)
    save(folder, 4)
    assert names(folder) == ["step-4", "step-10"]
    save(folder, 5)
    assert names(folder) == ["step-5", "step-4"]


def test_full_ones_are_tried_before_weights_alone(folder: CheckpointFolder) -> None:
    save(folder, 2)
    save(folder, 3, "model")
    save(folder, 4)
    save(folder, 5, "model")
    assert names(folder) == ["step-4", "step-2", "model-5", "model-3"]


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (KeepPersistent(), [1, 2, 3, 4, 5, 6, 7, 8]),
        (KeepPersistent(last=2), [7, 8]),
        (KeepPersistent(last=1, every=3), [3, 6, 8]),
        (KeepPersistent(last=3, every=2), [2, 4, 6, 7, 8]),
    ],
)
def test_retention_of_weights_alone(folder: CheckpointFolder, keep: KeepPersistent, left: list[int]) -> None:
    save(folder, 1)
    for step in range(1, 9):
        save(folder, step, "model", keep)
    models = [each.manifest.progress.step for each in folder.found() if isinstance(each, Checkpoint)][1:]
    assert sorted(models) == left
    assert names(folder)[0] == "step-1"  # full ones are not its business


@pytest.mark.parametrize(
    ("value", "retention"),
    [
        (0, KeepPersistent()),
        (3, KeepPersistent(last=3)),
        ({"last": 2, "every": 1000}, KeepPersistent(last=2, every=1000)),
    ],
)
def test_retention_as_it_is_configured(value: object, retention: KeepPersistent) -> None:
    assert CheckpointSection.model_validate({"keep_persistent": value}).retention() == retention


def test_weights_saved_again_at_one_step_replace_the_first(folder: CheckpointFolder) -> None:
    save(folder, 2, "model")
    first = (folder.path / "model-2" / "manifest.json").read_bytes()
    save(folder, 2, "model")
    assert names(folder) == ["model-2"]
    assert (folder.path / "model-2" / "manifest.json").read_bytes() != first  # it has the next number


def test_unreadable_checkpoints_give_way_first(folder: CheckpointFolder) -> None:
    save(folder, 2)
    save(folder, 4)
    (folder.path / "step-4" / "manifest.json").unlink()
    save(folder, 6)
    assert names(folder) == ["step-6", "step-2"]


def test_other_names_are_left_alone(folder: CheckpointFolder) -> None:
    save(folder, 2)
    for name in ("step-2-copy", "abandoned-step-9", "notes", "step-"):
        (folder.path / name).mkdir()
    for step in (4, 6):
        save(folder, step)
    assert names(folder) == ["step-6", "step-4"]
    assert all((folder.path / name).is_dir() for name in ("step-2-copy", "abandoned-step-9", "notes", "step-"))
