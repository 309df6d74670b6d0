"""The loss-spike guard: what a spike is, and that a skipped step changes nothing but the count."""

from pathlib import Path
from typing import Any

import pytest

from optimus_compiler.runtime import trainer
from optimus_compiler.runtime.checkpoint.folder import open_checkpoint
from optimus_compiler.runtime.loss_guard import FEWEST, WINDOW, LossGuard
from optimus_compiler.runtime.optimizer import ShardedAdamW
from tests.runtime.test_resume import Start

LOSSES = [4.0, 4.2] * (FEWEST // 2)  # mean 4.1, standard deviation 0.1


def test_a_spike_lies_sigma_deviations_above_the_mean() -> None:
    assert LossGuard(6, LOSSES).is_spike(4.71)
    assert not LossGuard(6, LOSSES).is_spike(4.69)
    assert not LossGuard(6, LOSSES).is_spike(1.0)  # a low loss is none
    assert not LossGuard(6, LOSSES[1:]).is_spike(99.0)  # too few to know
    assert not LossGuard(None, LOSSES).is_spike(99.0)


def test_a_spike_is_not_remembered() -> None:
    guard = LossGuard(6, LOSSES)
    assert guard.is_spike(9.0)
    assert guard.is_spike(9.0)
    assert not guard.is_spike(4.1)
    assert list(guard.recent) == [*LOSSES, 4.1]
    for _ in range(WINDOW):
        guard.is_spike(4.1)
    assert list(guard.recent) == [4.1] * WINDOW


def test_a_skipped_step_changes_nothing_and_a_resumed_run_skips_it_too(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("resilience.loss_spike_sigma=100", "train.steps=26", "optimizer.decay_steps=26", "checkpoint.every=23")
    read, step = trainer._read, ShardedAdamW.step
    taken: list[int] = []
    steps_to_the_spike = [24]

    def spiking(*arguments: Any) -> Any:
        loss, *rest = read(*arguments)
        steps_to_the_spike[0] -= 1
        return (loss + (1e6 if steps_to_the_spike[0] == 0 else 0), *rest)

    def counting(optimizer: ShardedAdamW, **arguments: Any) -> Any:
        taken.append(optimizer.steps_taken)
        return step(optimizer, **arguments)

    monkeypatch.setattr(trainer, "_read", spiking)
    monkeypatch.setattr(ShardedAdamW, "step", counting)
    run = Start(tiny, tmp_path / "run")
    run.run(*settings, stop_after=25)
    assert taken == [*range(23), 23]  # of 25 steps one was skipped, the 24th
    assert "step 24: the loss 100000" in "".join(run.said)
    progress = open_checkpoint(tmp_path / "run" / "checkpoints" / "step-23").manifest.progress
    assert len(progress.recent_losses) == 23
    taken.clear()
    steps_to_the_spike[0] = 1  # the same step again, in a new process
    metrics = run.run(*settings, stop_after=25)
    assert taken == [23]
    assert metrics[23].loss > 1e5
