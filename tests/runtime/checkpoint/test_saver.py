"""Saving in the background: what is written is what was there, one save at a time, and errors come out."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from optimus_compiler.config import CheckpointSection
from optimus_compiler.runtime.checkpoint import saver
from optimus_compiler.runtime.checkpoint.contents import Snapshot
from optimus_compiler.runtime.checkpoint.folder import Checkpoint
from optimus_compiler.runtime.checkpoint.manifest import CheckpointError
from tests.runtime.checkpoint.small_run import SmallRun, progress

BACKGROUND = CheckpointSection.model_validate({"async": True})


class Gate:
    """Holds up every write until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.waiting = threading.Event()
        self.fault: Exception | None = None
        write = saver.write_checkpoint

        def held(*arguments: Any) -> Path:
            self.waiting.set()
            assert self.open.wait(60)
            if self.fault is not None:
                raise self.fault
            return write(*arguments)

        monkeypatch.setattr(saver, "write_checkpoint", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def values_of(run: SmallRun, name: str) -> set[float]:
    (found,) = [each for each in run.folder.found() if each.path.name == name]
    assert isinstance(found, Checkpoint)
    run.load(found)
    return run.values()


def test_training_goes_on_while_a_checkpoint_is_written(run: SmallRun, gate: Gate) -> None:
    with run.saving(BACKGROUND) as saving:
        run.fill(1)
        stall = saving.save(["full"], progress(1))
        assert gate.waiting.wait(60)
        run.fill(2)  # the next steps, before anything is written
        gate.open.set()
        saving.wait()
    assert 0 < stall < 60
    assert values_of(run, "step-1") == {1.0}


def test_one_save_is_in_flight_and_the_next_waits_for_it(run: SmallRun, gate: Gate) -> None:
    with run.saving(BACKGROUND) as saving:
        run.fill(1)
        saving.save(["full"], progress(1))
        assert gate.waiting.wait(60)
        run.fill(2)
        second = threading.Thread(target=saving.save, args=(["full"], progress(2)))
        second.start()
        second.join(0.2)
        assert second.is_alive()
        assert run.folder.found() == []
        gate.open.set()
        second.join(60)
        assert not second.is_alive()
        saving.wait()
    assert (values_of(run, "step-1"), values_of(run, "step-2")) == ({1.0}, {2.0})


def test_an_error_in_the_background_is_seen_and_raised_once(run: SmallRun, gate: Gate) -> None:
    gate.fault = CheckpointError("the disk is full")
    with run.saving(BACKGROUND) as saving:
        saving.save(["full"], progress(1))
        assert not saving.failed
        gate.open.set()
        assert saving._writing is not None
        saving._writing.exception(60)  # it has ended
        assert saving.failed
        with pytest.raises(CheckpointError, match="the disk is full"):
            saving.wait()
        assert not saving.failed
        gate.fault = None
        saving.save(["full"], progress(2))
        saving.wait()
    assert [each.path.name for each in run.folder.found()] == ["step-2"]


def test_both_kinds_of_one_step_are_of_one_moment(run: SmallRun, gate: Gate) -> None:
    with run.saving(BACKGROUND) as saving:
        run.fill(1)
        saving.save(["full", "model"], progress(1))
        run.fill(2)
        gate.open.set()
        saving.wait()
    full, model = (each for each in run.folder.found() if isinstance(each, Checkpoint))
    assert (full.kind, model.kind) == ("full", "model")
    sizes = {each.kind: sum(file.bytes for file in each.manifest.files.values()) for each in (full, model)}
    assert sizes["full"] > 3 * sizes["model"]
    assert values_of(run, "step-1") == {1.0}


@pytest.mark.parametrize(
    ("settings", "step", "last", "kinds"),
    [
        ({"every": 10}, 10, False, ["full"]),
        ({"every": 10}, 11, False, []),
        ({"every": 10}, 11, True, ["full"]),
        ({"every": 10, "persistent_every": 5}, 5, False, ["model"]),
        ({"every": 10, "persistent_every": 5}, 20, False, ["full", "model"]),
        ({"every": 0, "persistent_every": 5}, 7, True, ["model"]),
        ({"every": 0}, 10, True, []),
    ],
)
def test_what_is_due(run: SmallRun, settings: dict[str, int], step: int, last: bool, kinds: list[str]) -> None:
    with run.saving(CheckpointSection.model_validate(settings)) as saving:
        assert saving.due(step, last=last) == kinds


class Recorded:
    """A tensor on an accelerator that is not here: keeps the calls that are made with it."""

    device = torch.device("xpu")

    def __init__(self, calls: list[object]) -> None:
        self._calls = calls

    def copy_(self, live: object, *, non_blocking: bool) -> None:
        self._calls.append((live, non_blocking))


def test_a_snapshot_of_an_accelerator_is_complete_before_training_goes_on(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are queued, and waited for once, by the call that every accelerator has."""
    calls: list[object] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: calls.append("synchronize"))
    snapshot = Snapshot(run.compiled, run.optimizer, scattered=False, staged=True)
    live = [Recorded(calls), Recorded(calls)]
    snapshot._copies = {"model": [(live[0], live[0])], "full": [(live[1], live[1])]}  # type: ignore[list-item]
    snapshot.take("full")
    assert calls == [(live[0], True), (live[1], True), "synchronize"]
    calls.clear()
    snapshot.take("model")
    assert calls == [(live[0], True), "synchronize"]
