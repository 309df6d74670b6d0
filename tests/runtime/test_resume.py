"""Runs that were stopped and go on: bit by bit as if nothing had happened, or refused by the key that has changed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from optimus_compiler.config import ConfigError, load_config
from optimus_compiler.runtime import trainer
from optimus_compiler.runtime.checkpoint.folder import CheckpointFolder, open_checkpoint
from optimus_compiler.runtime.checkpoint.manifest import CheckpointError
from optimus_compiler.runtime.checkpoint.saver import CheckpointSaver
from optimus_compiler.runtime.data.prepare import prepare
from optimus_compiler.runtime.metrics import StepMetrics, read_metrics
from optimus_compiler.runtime.optimizer import ShardedAdamW
from optimus_compiler.runtime.resilience.beacon import Beacon
from optimus_compiler.runtime.run import Run, open_run
from optimus_compiler.runtime.run_lock import run_lock
from optimus_compiler.runtime.trainer import RunFailedError, train
from tests.tiny_run import CONTEXT_LENGTH, write_corpus

STEPS = 7
EXACT = ("step", "tokens", "loss", "ce_loss", "aux_loss", "grad_norm", "lr", "expert_load_max_over_mean")


class Start:
    """Starts the tiny run in a directory, and keeps what it said."""

    def __init__(self, tiny: Path, directory: Path) -> None:
        self.tiny = tiny
        self.directory = directory
        self.said: list[str] = []

    def open(self, *overrides: str, **options: Any) -> Run:
        settings = [f"data.path={self.tiny / 'data'}", f"train.steps={STEPS}", "checkpoint.every=2"]
        schedule = ["optimizer.warmup_steps=3", f"optimizer.decay_steps={STEPS}"]
        config = load_config(self.tiny / "tiny.toml", [*settings, *schedule, *overrides])
        return open_run(config, self.directory, say=self.said.append, **options)

    def run(self, *overrides: str, stop_after: int | None = None, **options: Any) -> list[StepMetrics]:
        """All steps, or as many as there are before the process would be killed."""

        def on_step(metrics: StepMetrics) -> None:
            if metrics.step == stop_after:
                raise KeyboardInterrupt

        try:
            train(self.open(*overrides, **options), on_step, say=self.said.append)
        except KeyboardInterrupt:
            assert stop_after is not None
        return read_metrics(self.directory)

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.directory / "checkpoints").iterdir())


@pytest.fixture
def start(tiny: Path, tmp_path: Path) -> Start:
    return Start(tiny, tmp_path / "run")


@pytest.fixture(scope="module")
def uninterrupted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[StepMetrics]]:
    """The metrics of the run with these overrides, from start to end."""
    seen: dict[tuple[str, ...], list[StepMetrics]] = {}

    def metrics(*overrides: str) -> list[StepMetrics]:
        if overrides not in seen:
            seen[overrides] = Start(tiny, tmp_path_factory.mktemp("whole") / "run").run(
                "checkpoint.every=0", *overrides
            )
        return seen[overrides]

    return metrics


def exact(metrics: list[StepMetrics]) -> list[dict[str, Any]]:
    return [{key: asdict(each)[key] for key in EXACT} for each in metrics]


@pytest.mark.parametrize(
    ("overrides", "stop_after", "resumed_after"),
    [
        ((), 1, 0),  # before there is a checkpoint
        ((), 3, 2),
        ((), 4, 2),  # in the step at which one is due, before it is written
        (("checkpoint.async=true",), 5, 4),
        (("train.precision=bf16",), 3, 2),
        (("optimizer.zero=2", "data.document_mask=true", "checkpoint.every=3"), 4, 3),
    ],
)
def test_metrics_after_a_kill_are_those_of_the_uninterrupted_run(
    start: Start,
    uninterrupted: Callable[..., list[StepMetrics]],
    overrides: tuple[str, ...],
    stop_after: int,
    resumed_after: int,
) -> None:
    start.run(*overrides, stop_after=stop_after)
    (start.directory / "metrics.jsonl").open("a").write('{"step": 99, "lo')  # a line that the crash cut short
    metrics = start.run(*overrides)
    if resumed_after:
        name = f"step-{resumed_after}"
        assert start.said.count(f"continuing after step {resumed_after} from {start.directory}/checkpoints/{name}") == 1
    else:
        assert any("stopped before its first checkpoint: starting again from step 1" in each for each in start.said)
    lines = [json.loads(line)["step"] for line in (start.directory / "metrics.jsonl").read_text().splitlines()]
    assert lines == [*range(1, stop_after + 1), *range(resumed_after + 1, STEPS + 1)]  # redone steps are written again
    training = [each for each in overrides if not each.startswith("checkpoint.")]
    assert exact(metrics) == exact(uninterrupted(*training))


def test_killed_again_and_again(start: Start, uninterrupted: Callable[..., list[StepMetrics]]) -> None:
    for step in (3, 3, 5, 6):
        start.run(stop_after=step)
    assert exact(start.run()) == exact(uninterrupted())
    assert start.checkpoints == ["step-6", "step-7"]


def test_the_random_generator_goes_on(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step draws a number, but a user's pass may."""
    step = ShardedAdamW.step
    drawn: dict[int, float] = {}

    def draws(optimizer: ShardedAdamW, **arguments: Any) -> Any:
        drawn[optimizer.steps_taken] = float(torch.rand(()))
        return step(optimizer, **arguments)

    monkeypatch.setattr(ShardedAdamW, "step", draws)
    start.run(stop_after=5)
    before = dict(drawn)
    torch.manual_seed(99)
    start.run()
    assert drawn[4] == before[4]
    assert len(set(drawn.values())) == STEPS


def test_schedule_and_batches_are_those_of_the_first_start(tiny: Path, tmp_path: Path) -> None:
    """More steps are asked for: what depended on their number, and was left open, stays."""

    def opened(*overrides: str) -> Run:
        base = [f"data.path={tiny / 'data'}", "optimizer.warmup_steps=1"]
        return open_run(load_config(tiny / "tiny.toml", [*base, *overrides]), tmp_path / "run")

    train(opened("train.steps=4"))
    (tmp_path / "run" / "config.toml").unlink()  # the checkpoint alone tells
    run = opened("train.steps=6")
    assert (run.config.optimizer.decay_steps, run.config.train.steps, run.steps_done) == (4, 6, 4)
    assert (tmp_path / "run" / "config.toml").read_text().count("decay_steps = 4") == 1
    with pytest.raises(ConfigError, match=r"optimizer.decay_steps \(was 4, now 6\)"):
        opened("train.steps=6", "optimizer.decay_steps=6")


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        (["optimizer.lr=1e-3"], ["optimizer.lr"]),
        (["train.seed=5", "optimizer.betas=[0.9, 0.95]"], ["train.seed", "optimizer.betas"]),
        (["train.micro_batch_size=1"], ["train.micro_batch_size"]),
        (["train.global_batch_size=2"], ["train.global_batch_size"]),
        (["train.precision=bf16"], ["train.precision"]),
        (["train.backend=aot_eager"], ["train.backend"]),
        (["model.overrides.num_experts_per_tok=1"], ["model.overrides"]),
        (["data.document_mask=true"], ["data.document_mask"]),
    ],
)
def test_a_change_that_alters_training_is_refused_by_its_key(
    stopped: Start, changes: list[str], keys: list[str]
) -> None:
    before = {path: path.read_bytes() for path in stopped.directory.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="was trained with other settings") as caught:
        stopped.open(*changes)
    for key in keys:
        assert f"{key} (was" in str(caught.value)
        assert f"--allow-changed {key}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("(was") == len(keys)
    with pytest.raises(ConfigError, match="other settings"):
        stopped.open(*changes, allow_changed=keys[1:])
    assert {path: path.read_bytes() for path in stopped.directory.rglob("*") if path.is_file()} == before
    assert stopped.open(*changes, allow_changed=keys).steps_done == 4


@pytest.fixture(scope="module")
def stopped_run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed after step 5, with checkpoints of steps 2 and 4 and of weights alone of 3."""
    start = Start(tiny, tmp_path_factory.mktemp("stopped") / "run")
    start.run("checkpoint.persistent_every=3", stop_after=5)
    return start.directory


@pytest.fixture
def stopped(stopped_run: Path, start: Start) -> Start:
    """A copy of it."""
    shutil.copytree(stopped_run, start.directory)
    return start


@pytest.mark.parametrize(
    "change",
    [
        "train.steps=20",
        "optimizer.sharding=none",
        "optimizer.zero=2",
        "activation_checkpointing.blocks=['moe']",
        "checkpoint.every=5",
        "checkpoint.async=true",
        "log.every=7",
        "mesh.expert_rows=exact",
    ],
)
def test_a_change_that_does_not_alter_training_goes_through(stopped: Start, change: str) -> None:
    assert stopped.open(change).steps_done == 4


def test_data_is_known_by_its_contents(stopped: Start, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(stopped.tiny / "data", moved)
    assert stopped.open(f"data.path={moved}").steps_done == 4
    other = tmp_path / "other"
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    tokenizer = stopped.tiny / "tokenizer.json"
    prepare([corpus], tokenizer=tokenizer, context_length=CONTEXT_LENGTH, output=other, seed=5)
    with pytest.raises(ConfigError, match=r"data.path \(was .*: set them back, or pass --allow-changed data.path$"):
        stopped.open(f"data.path={other}")


def test_an_unknown_key_is_not_allowed_to_change(stopped: Start) -> None:
    with pytest.raises(ConfigError, match=r"--allow-changed optimizer.lrr: there is no such key: did you mean"):
        stopped.open(allow_changed=["optimizer.lrr"])


def test_finished_run_has_no_steps_left(start: Start) -> None:
    start.run()
    run = start.open()
    assert run.steps_done == run.config.train.steps == STEPS
    assert exact(start.run(f"train.steps={STEPS + 1}"))[-1]["step"] == STEPS + 1


def test_directory_of_a_run_without_checkpoints_is_refused_and_left_as_it_is(start: Start) -> None:
    start.run("checkpoint.every=0", "train.steps=2")
    before = {path: path.read_bytes() for path in start.directory.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"already holds a run, without checkpoints.*give another --output"):
        start.open("checkpoint.every=0", "train.steps=2")
    with pytest.raises(ConfigError, match=r"optimizer.lr"):
        start.open("optimizer.lr=1e-3", "train.steps=2")
    assert {path: path.read_bytes() for path in start.directory.rglob("*") if path.is_file()} == before


def test_two_processes_do_not_train_in_one_directory(stopped: Start) -> None:
    run = stopped.open()
    before = {path: path.read_bytes() for path in stopped.directory.rglob("*") if path.is_file()}
    with run_lock(stopped.directory):
        with pytest.raises(ValueError, match=r"another process is training in .*/run: stop it first, or give another"):
            stopped.open("log.every=3")
        with pytest.raises(RunFailedError, match="another process is training"):
            train(run)
    assert {path: path.read_bytes() for path in stopped.directory.rglob("*") if path.is_file()} == before
    stopped.run(stop_after=5)  # what held the directory has let it go


# weights alone


def test_restart_from_weights_alone(stopped: Start, uninterrupted: Callable[..., list[StepMetrics]]) -> None:
    """Without a whole full checkpoint: the weights are those of step 3, the moments start from zero."""
    for name in ("step-2", "step-4"):
        shutil.rmtree(stopped.directory / "checkpoints" / name)
    metrics = stopped.run()
    assert any("model-3, which holds weights alone: the moments start from zero" in each for each in stopped.said)
    expected = uninterrupted()
    assert exact(metrics)[:4] == exact(expected)[:4]  # step 4 is of the same weights and the same data
    assert metrics[4].loss == pytest.approx(expected[4].loss, rel=0.05)
    assert metrics[4].loss != expected[4].loss
    assert [each.lr for each in metrics] == [each.lr for each in expected]
    saved = open_checkpoint(stopped.directory / "checkpoints" / "step-7").manifest.progress
    assert (saved.step, saved.updates) == (7, 4)


def test_clipping_begins_at_a_step_of_the_run(stopped: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    clip_after = []
    step = ShardedAdamW.step

    def watch(optimizer: ShardedAdamW, **arguments: Any) -> Any:
        clip_after.append(optimizer.clip_after)
        return step(optimizer, **arguments)

    monkeypatch.setattr(ShardedAdamW, "step", watch)
    stopped.run(stop_after=5)
    stopped.run(start_from="model-3", stop_after=4)
    assert clip_after == [3, 0]  # after the warm-up of the run, whatever the optimizer has counted


def test_bf16_masters_are_rebuilt_from_weights_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    bf16 = ("train.precision=bf16", "checkpoint.every=0", "checkpoint.persistent_every=3")
    start.run(*bf16, stop_after=4)
    seen: list[bool] = []
    restore = trainer._restore

    def look(run: Run, compiled: Any, optimizer: ShardedAdamW) -> Any:
        progress = restore(run, compiled, optimizer)
        for shard in optimizer.shards:
            assert shard.master is not None
            seen.append(torch.equal(shard.master, shard.weights.float()))
            seen.append(not shard.exp_avg.any() and not shard.exp_avg_sq.any())
        return progress

    monkeypatch.setattr(trainer, "_restore", look)
    start.run(*bf16, stop_after=4)
    assert seen
    assert all(seen)


def test_going_back_sets_newer_checkpoints_aside(
    stopped: Start, uninterrupted: Callable[..., list[StepMetrics]]
) -> None:
    with pytest.raises(CheckpointError, match=r"has no checkpoint 'step-3': there are step-4, step-2, model-3"):
        stopped.open(start_from="step-3")
    stopped.run(start_from="step-2", stop_after=3)
    assert stopped.checkpoints == ["abandoned-step-4", "model-3", "step-2"]
    assert any("step-4 is set aside" in each for each in stopped.said)
    assert exact(stopped.run()) == exact(uninterrupted())  # from step-2 again, not from the abandoned one
    assert stopped.checkpoints == ["abandoned-step-4", "model-3", "step-6", "step-7"]


# damage


def test_the_run_says_which_checkpoint_it_skips(
    stopped: Start, uninterrupted: Callable[..., list[StepMetrics]]
) -> None:
    file = stopped.directory / "checkpoints" / "step-4" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert exact(stopped.run(stop_after=3)) == exact(uninterrupted())[:5]
    assert any("step-4 is damaged and skipped: __0_0.distcp is not what was written" in each for each in stopped.said)
    assert "step-4" in stopped.checkpoints  # it gives way to the next save, and not before
    assert exact(stopped.run()) == exact(uninterrupted())
    assert stopped.checkpoints == ["model-3", "step-6", "step-7"]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(stopped: Start) -> None:
    for manifest in stopped.directory.glob("checkpoints/*/manifest.json"):
        manifest.write_text(manifest.read_text().replace('"step"', '"stop"'))
    with pytest.raises(CheckpointError, match=r"holds no whole checkpoint, and 3 damaged: restore one, or delete"):
        stopped.open()


# SIGTERM


def test_sigterm_saves_and_returns(start: Start, uninterrupted: Callable[..., list[StepMetrics]]) -> None:
    """The walltime ends: the step is finished, a checkpoint saved, and the same command continues."""
    handler = signal.getsignal(signal.SIGTERM)

    def on_step(metrics: StepMetrics) -> None:
        if metrics.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    settings = ("checkpoint.every=1000", "checkpoint.async=true")
    train(start.open(*settings), on_step, say=start.said.append)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert start.checkpoints == ["step-3"]
    assert start.said[-1] == "stopped by SIGTERM after step 3: the same command continues the run"
    assert exact(start.run(*settings)) == exact(uninterrupted())


def test_sigterm_saves_a_run_that_saves_nothing_else(start: Start) -> None:
    train(start.open("checkpoint.every=0"), lambda metrics: os.kill(os.getpid(), signal.SIGTERM))
    assert start.checkpoints == ["step-2"]


# what is measured


@pytest.mark.parametrize("settings", [(), ("checkpoint.async=true",)])
def test_the_wait_for_checkpoints_is_logged(start: Start, settings: tuple[str, ...]) -> None:
    metrics = start.run(*settings)
    stalled = [each.step for each in metrics if each.checkpoint_stall > 0]
    assert stalled == [3, 5, 7]  # the step after the one that was saved
    assert all(0 <= each.checkpoint_stall < 60 for each in metrics)


def test_a_save_is_told_to_the_supervisor(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take many times as long as a step, and is no hang."""
    beacons: list[Beacon] = []
    phases: list[str] = []
    save = CheckpointSaver.save

    class Kept(Beacon):
        def __init__(self) -> None:
            super().__init__()
            beacons.append(self)

    def look(saver: CheckpointSaver, kinds: list[Any], *arguments: Any) -> float:
        phases.append(beacons[0].phase)
        return save(saver, kinds, *arguments)

    monkeypatch.setattr(trainer, "Beacon", Kept)
    monkeypatch.setattr(CheckpointSaver, "save", look)
    start.run("train.steps=4", "optimizer.decay_steps=4")
    assert phases == ["training", "saving", "training", "saving"]


def test_metrics_of_older_versions_are_read(start: Start) -> None:
    start.run("train.steps=1")
    path = start.directory / "metrics.jsonl"
    line = json.loads(path.read_text())
    del line["checkpoint_stall"]
    path.write_text(json.dumps(line) + "\n")
    assert read_metrics(start.directory)[0].checkpoint_stall == 0.0


# errors of writing


@pytest.mark.parametrize("settings", [(), ("checkpoint.async=true",)])
def test_a_full_disk_stops_the_run_and_leaves_the_older_checkpoint(
    start: Start, monkeypatch: pytest.MonkeyPatch, uninterrupted: Callable[..., list[StepMetrics]], settings: tuple[str]
) -> None:
    from optimus_compiler.runtime.checkpoint import saver

    write = saver.write_checkpoint

    def full(folder: CheckpointFolder, kind: str, step: int, *arguments: Any) -> Path:
        if step == 4:
            raise CheckpointError("the disk is full")
        return write(folder, kind, step, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(saver, "write_checkpoint", full)
        with pytest.raises(RunFailedError, match=r"stopped after step [45]: CheckpointError: the disk is full"):
            start.run(*settings)
    assert start.checkpoints == ["step-2"]
    assert exact(start.run(*settings)) == exact(uninterrupted())
