"""Whatever happens while a checkpoint is written, the newest complete one loads, and the torn one is said (case 26)."""

import errno
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from optimus_compiler.config import KeepPersistent
from optimus_compiler.mesh import Mesh
from optimus_compiler.program import ParameterSpec, Source
from optimus_compiler.runtime import files
from optimus_compiler.runtime.checkpoint.contents import Parts
from optimus_compiler.runtime.checkpoint.find import find_newest
from optimus_compiler.runtime.checkpoint.folder import Checkpoint, CheckpointFolder
from optimus_compiler.runtime.checkpoint.load import StoredTensors
from optimus_compiler.runtime.checkpoint.manifest import CheckpointError
from optimus_compiler.runtime.checkpoint.shards import part_of_parameter
from optimus_compiler.runtime.checkpoint.write import write_checkpoint
from optimus_compiler.runtime.metrics import read_metrics
from tests.file_size import file_size_limit
from tests.ranks import forkserver
from tests.runtime.checkpoint.small_run import SmallRun, plain_manifest, progress


def newest(run: SmallRun) -> tuple[Checkpoint, list[str]]:
    """What a resumed run would continue from, and what it would say; its values are loaded and are of one step."""
    said: list[str] = []
    found = find_newest(run.folder, Mesh(), said.append)
    assert found is not None
    run.load(found)
    assert run.values() == {float(found.manifest.progress.step)}
    return found, said


SHAPES = {"a": (40, 64), "b": (3, 2, 50, 50), "c": (7,)}


def parts_of(step: float) -> tuple[Parts, dict[str, Tensor]]:
    """Three parameters that are `step` everywhere, and their values."""
    values = {name: torch.full((prod(shape),), float(step)) for name, shape in SHAPES.items()}
    specs = {name: ParameterSpec(name, shape, torch.float32, Source((name,), shape)) for name, shape in SHAPES.items()}
    return {name: part_of_parameter(specs[name], Mesh.abstract(), values[name], 0) for name in SHAPES}, values


def save_for_ever(directory: Path, first: int, pipe: Connection) -> None:
    """Saves step after step and tells which is done, until it is killed."""
    folder = CheckpointFolder(directory)
    for step in itertools.count(first):
        describe = partial(plain_manifest, "full", progress(step))
        write_checkpoint(folder, "full", step, parts_of(step)[0], describe, KeepPersistent(), None)
        pipe.send(step)


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_random_while_saving(tmp_path: Path, kills: int) -> None:
    chance = random.Random(kills)
    folder = CheckpointFolder(tmp_path)
    step, torn = 0, 0
    for _ in range(kills):
        ours, theirs = forkserver().Pipe()
        process = forkserver().Process(target=save_for_ever, args=(tmp_path, step + 1, theirs), daemon=True)
        process.start()
        theirs.close()
        step = ours.recv()
        time.sleep(chance.uniform(0, 0.05))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with suppress(EOFError):
            while ours.poll():
                step = ours.recv()
        said: list[str] = []
        found = find_newest(folder, Mesh(), said.append)
        assert found is not None
        assert found.manifest.progress.step in (step, step + 1)  # killed between the rename and the telling
        parts, values = parts_of(torch.nan)
        StoredTensors(found.path).read_exactly(parts)
        step = found.manifest.progress.step
        assert {float(value) for tensor in values.values() for value in tensor} == {float(step)}
        assert len(folder.found()) <= 2
        assert all("was being written when the run stopped: it is not used" in each for each in said)
        torn += len(said)
    assert torn  # some kill hit a save, or this tested nothing
    describe = partial(plain_manifest, "full", progress(step + 1))
    write_checkpoint(folder, "full", step + 1, parts_of(step + 1)[0], describe, KeepPersistent(), None)
    assert folder.torn() == []  # cleared away by the next save


def two_saved(run: SmallRun) -> None:
    run.save(1)
    run.save(2)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("after", [0, 1000, 50_000])
def test_an_error_while_writing(run: SmallRun, monkeypatch: pytest.MonkeyPatch, code: int, after: int) -> None:
    two_saved(run)
    write, written = files.HashingWriter.write, 0

    def failing(writer: files.HashingWriter, data: Any) -> int:
        nonlocal written
        written += memoryview(data).nbytes
        if written > after:
            raise OSError(code, os.strerror(code))
        return write(writer, data)

    with monkeypatch.context() as patch:
        patch.setattr(files.HashingWriter, "write", failing)
        with pytest.raises(CheckpointError, match=rf"step-3.*could not be written.*{os.strerror(code)}") as caught:
            run.save(3)
    assert "\n" not in str(caught.value)
    found, said = newest(run)
    assert (found.path.name, said) == ("step-2", [])  # nothing half-written is left
    run.save(4)
    assert newest(run)[0].path.name == "step-4"


@pytest.mark.parametrize("number", range(1, 6))
def test_an_error_of_the_disk_at_each_sync(run: SmallRun, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Tensors, DCP's metadata, manifest, folder of the checkpoint, folder of all."""
    two_saved(run)
    sync, calls = os.fsync, 0

    def failing(file: int) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(CheckpointError, match=r"could not be written \(.*Input/output error"):
            run.save(3)
    found, said = newest(run)
    assert found.path.name == ("step-2" if number < 5 else "step-3")
    assert said == []


def test_a_limit_of_the_kernel_on_file_sizes(run: SmallRun) -> None:
    two_saved(run)
    size = max(path.stat().st_size for path in (run.directory / "checkpoints" / "step-2").iterdir())
    with file_size_limit(size // 2), pytest.raises(CheckpointError, match=r"could not be written .*File too large"):
        run.save(3)
    assert newest(run)[0].path.name == "step-2"


@pytest.mark.parametrize("damage", ["truncated", "flipped", "deleted", "longer"])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
def test_a_damaged_file_is_named_and_the_older_checkpoint_loaded(run: SmallRun, name: str, damage: str) -> None:
    two_saved(run)
    path = run.directory / "checkpoints" / "step-2" / name
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(content[:-1])
    elif damage == "longer":
        path.write_bytes(content + b" ")
    elif damage == "flipped":
        content[len(content) // 3] ^= 4
        path.write_bytes(content)
    else:
        path.unlink()
    found, said = newest(run)
    assert found.path.name == "step-1"
    assert len(said) == 1
    assert "step-2 is damaged and skipped" in said[0]
    assert name in said[0]
    run.save(3)  # takes the place of the damaged one, not of the only whole one
    assert sorted(each.path.name for each in run.folder.found()) == ["step-1", "step-3"]


@pytest.mark.slow
def test_a_run_killed_thirty_times_is_the_uninterrupted_one(tiny: Path, tmp_path: Path) -> None:
    """`optimus pretrain`, kill -9 at random moments, the same command again, until it is through."""
    command = [sys.executable, "-m", "optimus_compiler", "pretrain", str(tiny / "tiny.toml")]
    settings = [f"data.path={tiny / 'data'}", "train.steps=600", "checkpoint.every=1", "checkpoint.async=true"]
    command += [word for setting in settings for word in ("--set", setting)]

    def start(name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, "--output", str(tmp_path / name)], stdout=subprocess.DEVNULL)

    assert start("whole").wait() == 0
    chance, kills = random.Random(1), 0
    while kills < 30:
        process = start("killed")
        before = steps_in(tmp_path / "killed")
        while steps_in(tmp_path / "killed") < before + 3 and process.poll() is None:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.2))
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        kills += 1
    assert kills == 30
    assert start("killed").wait() == 0
    whole, killed = (
        [(m.step, m.tokens, m.loss, m.grad_norm, m.lr) for m in read_metrics(tmp_path / name)]
        for name in ("whole", "killed")
    )
    assert killed == whole


def steps_in(run: Path) -> int:
    """Lines of metrics."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
