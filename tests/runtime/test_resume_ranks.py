"""A run of several ranks goes on, in its own and in other layouts, at the end of an epoch too (case 27)."""

import errno
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from optimus_compiler.config import load_config
from optimus_compiler.runtime.checkpoint.export import export
from optimus_compiler.runtime.checkpoint.folder import CheckpointFolder, open_checkpoint
from optimus_compiler.runtime.data.dataset import PreparedData
from optimus_compiler.runtime.files import HashingWriter
from optimus_compiler.runtime.metrics import StepMetrics, read_metrics
from optimus_compiler.runtime.run import open_run
from optimus_compiler.runtime.trainer import RunFailedError, train
from tests.ranks import Ranks
from tests.runtime.test_resume import exact
from tests.tiny_run import text_of, write_config, write_data

STEPS = 8
EPOCH = 12  # sequences: three steps of four
SINGLE: tuple[str, ...] = ()
DP2_EP2 = ("mesh.dp=2", "mesh.ep=2")
PP2 = ("mesh.pp=2", "optimizer.sharding=none")
TP2 = ("mesh.tp=2", "optimizer.zero=2")
EP2 = ("mesh.ep=2", "checkpoint.async=true", "checkpoint.scattered=true")


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration, and data of which an epoch is three steps."""
    folder = tmp_path_factory.mktemp("short")
    data = write_data(folder, text_of(15))
    assert len(PreparedData.open(data)) == EPOCH
    write_config(folder)
    return folder


def settings(short: Path, *overrides: str) -> list[str]:
    base = ["train.micro_batch_size=1", "train.global_batch_size=4", f"optimizer.decay_steps={STEPS}"]
    return [f"data.path={short / 'data'}", "optimizer.warmup_steps=2", "optimizer.eps=1e-6", *base, *overrides]


def start(short: Path, directory: Path, *overrides: str, sigterm_after: int | None = None) -> list[str]:
    """Starts or continues a run on this rank; what rank 0 said."""
    said: list[str] = []

    def on_step(metrics: StepMetrics) -> None:
        if metrics.step == sigterm_after:
            os.kill(os.getpid(), signal.SIGTERM)

    config = load_config(short / "tiny.toml", settings(short, *overrides))
    train(open_run(config, directory, say=said.append), on_step, say=said.append)
    return said


@pytest.fixture(scope="module")
def reference(short: Path, tmp_path_factory: pytest.TempPathFactory) -> list[StepMetrics]:
    """All steps, uninterrupted, in one process."""
    directory = tmp_path_factory.mktemp("reference") / "run"
    start(short, directory, f"train.steps={STEPS}")
    return read_metrics(directory)


def assert_close(metrics: list[StepMetrics], reference: list[StepMetrics]) -> None:
    for ours, theirs in zip(metrics, reference, strict=True):
        assert (ours.step, ours.tokens, ours.lr) == (theirs.step, theirs.tokens, theirs.lr)
        for key in ("loss", "ce_loss", "aux_loss", "grad_norm"):
            assert asdict(ours)[key] == pytest.approx(asdict(theirs)[key], rel=1e-5), (key, ours.step)


@pytest.mark.parametrize(
    "layouts",
    [
        ((SINGLE, 1), (DP2_EP2, 4), (PP2, 2)),
        ((TP2, 2), (SINGLE, 1), (EP2, 2)),
        ((PP2, 2), (EP2, 2), (DP2_EP2, 4)),
    ],
)
def test_a_run_goes_through_three_layouts(
    layouts: tuple[tuple[tuple[str, ...], int], ...],
    short: Path,
    reference: list[StepMetrics],
    tmp_path: Path,
    ranks: Ranks,
) -> None:
    """Stopped at the exact end of the first epoch, and within the second."""
    for (overrides, count), steps in zip(layouts, (3, 5, STEPS), strict=True):
        ranks.run(count, start, short, tmp_path / "run", f"train.steps={steps}", *overrides)
    assert_close(read_metrics(tmp_path / "run"), reference)


def test_the_same_layout_goes_on_bit_by_bit(short: Path, tmp_path: Path, ranks: Ranks) -> None:
    layout = (*DP2_EP2, "train.precision=bf16", "optimizer.reduce_dtype=fp32")
    for name, stops in (("whole", (STEPS,)), ("parts", (3, 4, STEPS))):
        for steps in stops:
            ranks.run(4, start, short, tmp_path / name, f"train.steps={steps}", *layout)
    assert exact(read_metrics(tmp_path / "parts")) == exact(read_metrics(tmp_path / "whole"))


@pytest.mark.parametrize("layout", [(DP2_EP2, 4), (PP2, 2), (TP2, 2)])
def test_weights_come_from_a_hugging_face_folder_and_go_into_one(
    layout: tuple[tuple[str, ...], int], short: Path, tmp_path: Path, ranks: Ranks
) -> None:
    """A step with a learning rate of 0 in between: the exported files are those that were imported, bit by bit."""
    start(short, tmp_path / "drawn", "train.steps=1", "optimizer.lr=0", "optimizer.min_lr=0")
    overrides, count = layout
    still = ("train.steps=1", "optimizer.lr=0", "optimizer.min_lr=0", f"model.init={tmp_path / 'first'}")
    for run, folder in (("drawn", "first"), ("run", "second")):
        export(
            open_checkpoint(tmp_path / run / "checkpoints" / "step-1"),
            tmp_path / folder,
            tokenizer=None,
            eos=None,
            file_bytes=30_000,
            progress=lambda stage, done, total: None,
        )
        if folder == "first":
            ranks.run(count, start, short, tmp_path / "run", *still, "train.seed=7", *overrides)
    files = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert len(files) > 4
    assert files == sorted(path.name for path in (tmp_path / "second").iterdir())
    for name in files:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def sigterm_to_rank_0(short: Path, directory: Path) -> list[str]:
    after = 2 if os.environ["RANK"] == "0" else None
    return start(short, directory, f"train.steps={STEPS}", *DP2_EP2, sigterm_after=after)


def test_all_ranks_stop_when_one_is_asked_to(
    short: Path, reference: list[StepMetrics], tmp_path: Path, ranks: Ranks
) -> None:
    said = ranks.run(4, sigterm_to_rank_0, short, tmp_path / "run")
    assert said[0][-1] == "stopped by SIGTERM after step 3: the same command continues the run"
    assert [each.path.name for each in CheckpointFolder(tmp_path / "run").found()] == ["step-3"]
    ranks.run(4, start, short, tmp_path / "run", f"train.steps={STEPS}", *DP2_EP2)
    assert_close(read_metrics(tmp_path / "run"), reference)


def disk_of_rank_1_fills(short: Path, directory: Path, *overrides: str) -> str:
    """The error of each rank when rank 1 cannot write its part of the second checkpoint."""
    write, calls = HashingWriter.write, 0

    def full(writer: HashingWriter, data: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > 60:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(writer, data)

    if os.environ["RANK"] == "1":
        HashingWriter.write = full  # type: ignore[assignment, method-assign]
    try:
        start(short, directory, "checkpoint.every=2", *overrides)
    except RunFailedError as error:
        return str(error)
    finally:
        HashingWriter.write = write  # type: ignore[method-assign]
    return ""


@pytest.mark.parametrize("overrides", [(), ("checkpoint.async=true",)])
def test_a_disk_that_is_full_for_one_rank_stops_all(
    short: Path, reference: list[StepMetrics], tmp_path: Path, ranks: Ranks, overrides: tuple[str, ...]
) -> None:
    steps = f"train.steps={STEPS}"
    errors = ranks.run(2, disk_of_rank_1_fills, short, tmp_path / "run", steps, "mesh.ep=2", *overrides)
    for error in errors:
        assert "could not be written (rank 1: No space left on device)" in error
        assert "\n" not in error
    folder = CheckpointFolder(tmp_path / "run")
    assert len(folder.found()) == 1
    assert folder.torn() == []
    ranks.run(2, start, short, tmp_path / "run", steps, "mesh.ep=2", *overrides)
    assert_close(read_metrics(tmp_path / "run"), reference)
