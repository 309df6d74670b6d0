"""TensorBoard and W&B get every record of a run that is stopped and continued; what goes wrong there stops no run."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from optimus_compiler.config import ConfigError, load_config, tables
from optimus_compiler.runtime import writers
from optimus_compiler.runtime.metrics import Evaluation, StepMetrics, read_evaluations, read_metrics
from optimus_compiler.runtime.run import Run, open_run
from optimus_compiler.runtime.trainer import RunFailedError, train
from optimus_compiler.runtime.writers import TensorBoardWriter, WandbWriter, Writers
from tests.runtime.test_metrics import STEP

BOTH = ("log.tensorboard=true", "log.wandb=true")


def open_tiny(tiny: Path, output: Path, *overrides: str) -> Run:
    return open_run(load_config(tiny / "tiny.toml", [f"data.path={tiny / 'data'}", *overrides]), output)


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of 6 steps that failed after the fifth, and was continued from the checkpoint of the third."""
    directory = tmp_path_factory.mktemp("writers") / "run"
    settings = [*BOTH, f"data.validation_path={tiny / 'data'}", "eval.every=2", "checkpoint.every=3"]

    def fail(metrics: StepMetrics) -> None:
        if metrics.step == 5:
            raise OSError("the power is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        with pytest.raises(RunFailedError, match="the power is gone"):
            train(open_tiny(tiny, directory, *settings, "train.steps=5"), fail)
        continued = open_tiny(tiny, directory, *settings, "train.steps=6")
        train(continued)
    assert continued.steps_done == 3
    return continued


def scalars(record: StepMetrics | Evaluation, group: str) -> dict[str, float]:
    """What a writer is to have of a record."""
    fields = asdict(record)
    values = {**fields, **fields.pop("tasks", {})}
    del values["step"]
    return {f"{group}/{name}": value for name, value in values.items() if isinstance(value, (int, float))}


def records_of(run: Run) -> dict[int, dict[str, float]]:
    """step -> all that metrics.jsonl and evaluations.jsonl have of it."""
    records = {step.step: scalars(step, "train") for step in read_metrics(run.directory)}
    for evaluation in read_evaluations(run.directory):
        records[evaluation.step] |= scalars(evaluation, "eval")
    assert [step for step in records if "eval/validation_loss" in records[step]] == [2, 4, 6]
    return records


def test_tensorboard_shows_every_record_once(run: Run) -> None:
    events = EventAccumulator(str(run.directory / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    shown: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            assert tag not in shown.setdefault(event.step, {})
            shown[event.step][tag] = event.value
    wanted = records_of(run)
    assert shown == {
        step: {tag: float(np.float32(value)) for tag, value in values.items()} for step, values in wanted.items()
    }


def read_wandb(path: Path) -> list[Any]:
    """The records of a .wandb file: a LevelDB log behind 7 bytes of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts, records = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left = -at % 32768  # of the block
        if 0 < left < 7:  # no room for a header
            at += left
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole of a record, or its last part
            record = Record()
            record.ParseFromString(parts)
            records.append(record)
            parts = b""
    return records


def history(records: list[Any]) -> list[dict[str, Any]]:
    """The rows of a W&B run, without what W&B adds."""
    rows = [
        {item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json) for item in each.history.item}
        for each in records
        if each.WhichOneof("record_type") == "history"
    ]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]


def test_wandb_continues_one_run_and_drops_no_record(run: Run) -> None:
    starts = [read_wandb(path) for path in sorted(run.directory.glob("wandb/offline-run-*/*.wandb"))]
    heads = [next(each.run for each in records if each.WhichOneof("record_type") == "run") for records in starts]
    assert [head.run_id for head in heads] == [(run.directory / "wandb-id").read_text()] * 2
    assert [(head.project, head.display_name, head.resume) for head in heads] == [("optimus", "run", True)] * 2

    rows = [history(records) for records in starts]
    assert [[row["step"] for row in start] for start in rows] == [[1, 2, 2, 3, 4, 4, 5], [4, 4, 5, 6, 6]]
    logged: dict[int, dict[str, float]] = {}
    for row in (*rows[0], *rows[1]):  # the later start wins, as in metrics.jsonl
        logged.setdefault(row.pop("step"), {}).update(row)
    assert logged == records_of(run)


def test_wandb_knows_the_configuration_the_axis_and_the_end(run: Run) -> None:
    for path, steps, code in zip(
        sorted(run.directory.glob("wandb/offline-run-*/*.wandb")), (5, 6), (1, 0), strict=True
    ):
        records = read_wandb(path)
        (config,) = (each.run.config for each in records if each.WhichOneof("record_type") == "run")
        settings = {item.key: json.loads(item.value_json) for item in config.update}
        wanted = json.loads(json.dumps(tables(run.config)))
        wanted["train"]["steps"] = steps
        assert {key: value for key, value in settings.items() if key != "_wandb"} == wanted
        metrics = [each.metric for each in records if each.WhichOneof("record_type") == "metric"]
        assert {metric.glob_name: metric.step_metric for metric in metrics if metric.glob_name} == {
            "train/*": "step",
            "eval/*": "step",
        }
        assert [each.exit.exit_code for each in records if each.WhichOneof("record_type") == "exit"] == [code]


def test_project_and_name_of_the_environment_win(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MODE": "offline", "PROJECT": "mine", "NAME": "first try"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    said: list[str] = []
    with Writers(open_tiny(tiny, tmp_path / "run", "log.wandb=true"), said.append) as open_writers:
        open_writers.evaluation(Evaluation(step=1, tokens=64, tasks={"arc": 0.25, "average": 0.5}))
    assert said == []
    (path,) = tmp_path.glob("run/wandb/offline-run-*/*.wandb")
    records = read_wandb(path)
    (head,) = (each.run for each in records if each.WhichOneof("record_type") == "run")
    assert (head.project, head.display_name) == ("mine", "first try")
    assert history(records) == [
        {"step": 1, "eval/tokens": 64, "eval/seconds": 0.0, "eval/arc": 0.25, "eval/average": 0.5}
    ]


def test_writer_that_fails_is_told_once_and_left_out(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")

    def full(*arguments: object) -> None:
        raise OSError(28, "No space\n left on device")

    monkeypatch.setattr(TensorBoardWriter, "write", full)
    said: list[str] = []
    with Writers(open_tiny(tiny, tmp_path / "run", *BOTH), said.append) as open_writers:
        for step in range(1, 5):
            open_writers.step(replace(STEP, step=step))
    sentence = "log.tensorboard gets no more: OSError: [Errno 28] No space left on device; metrics.jsonl has every step"
    assert said == [sentence]
    (path,) = tmp_path.glob("run/wandb/offline-run-*/*.wandb")
    assert [row["step"] for row in history(read_wandb(path))] == [1, 2, 3, 4]


def test_writer_that_does_not_start_or_end_is_told_too(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **settings: object) -> None:
        raise ConnectionError("no such host")

    monkeypatch.setattr(WandbWriter, "__init__", fail)
    monkeypatch.setattr(TensorBoardWriter, "close", fail)
    said: list[str] = []
    with Writers(open_tiny(tiny, tmp_path / "run", *BOTH), said.append) as open_writers:
        open_writers.step(STEP)
    assert sorted(said) == [
        f"log.{key} gets no more: ConnectionError: no such host; metrics.jsonl has every step"
        for key in ("tensorboard", "wandb")
    ]


def test_writer_that_hangs_keeps_nobody(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    awake, asleep = Event(), Event()

    def hang(*arguments: object) -> None:
        asleep.set()
        awake.wait()

    monkeypatch.setattr(TensorBoardWriter, "write", hang)
    monkeypatch.setattr(writers, "BACKLOG", 2)
    monkeypatch.setattr(writers, "END_PATIENCE", 0.1)
    said: list[str] = []
    run = open_tiny(tiny, tmp_path / "run", "log.tensorboard=true")
    try:
        with Writers(run, said.append) as open_writers:
            open_writers.step(STEP)
        with Writers(run, said.append) as open_writers:
            asleep.clear()
            open_writers.step(STEP)
            asleep.wait()
            for _ in range(4):  # two wait, the third does not find room
                open_writers.step(STEP)
    finally:
        awake.set()
    assert said == [
        "log.tensorboard gets no more: it is not done after 0.1 s; metrics.jsonl has every step",
        "log.tensorboard gets no more: it is 2 records behind; metrics.jsonl has every step",
    ]


def test_other_ranks_write_nothing(tiny: Path, tmp_path: Path) -> None:
    other: Any = SimpleNamespace(rank=1)
    run = replace(open_tiny(tiny, tmp_path / "run", *BOTH), mesh=other)
    with Writers(run, pytest.fail) as open_writers:
        open_writers.step(STEP)
    assert [path.name for path in run.directory.iterdir()] == ["config.toml"]


@pytest.mark.parametrize("found", [None, ModuleSpec("package", None)])  # the second: an empty folder of that name
@pytest.mark.parametrize("key", ["tensorboard", "wandb"])
def test_missing_package_is_refused_before_anything_is_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, found: ModuleSpec | None
) -> None:
    monkeypatch.setattr(writers, "find_spec", lambda name: found)
    with pytest.raises(ConfigError, match=rf"log.{key} = true needs .*: pip install 'optimus-compiler\[{key}\]', or"):
        open_tiny(tiny, tmp_path / "run", f"log.{key}=true")
    assert not (tmp_path / "run").exists()
