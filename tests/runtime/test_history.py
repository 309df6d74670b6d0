"""The past of a run, from what training leaves in its directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from optimus_compiler.config import load_config
from optimus_compiler.runtime.history import read_history
from optimus_compiler.runtime.metrics import Evaluation, read_metrics
from optimus_compiler.runtime.resilience.incidents import Incident, record
from optimus_compiler.runtime.run import open_run
from optimus_compiler.runtime.trainer import train
from tests.runtime.test_metrics import STEP, lines, write


def test_of_a_finished_run(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ["train.steps=7", "checkpoint.every=2", "checkpoint.persistent_every=3"]
    train(open_run(load_config(tiny / "tiny.toml", [f"data.path={tiny / 'data'}", *settings]), run))
    record(run, Incident("slow", "node-0", 1, 5, ["twice the median"], "none"))
    evaluation = Evaluation(step=4, tokens=256, validation_loss=5.0)
    (run / "evaluations.jsonl").write_text(evaluation.to_json() + "\n")

    history = read_history(run)
    assert history.steps == read_metrics(run)
    assert history.evaluations == [evaluation]
    assert history.incidents == [(5, "slow")]
    assert history.full == [6, 7]  # two stay
    assert history.weights_alone == [3, 6, 7]
    assert history.deleted == [2, 4]


def test_of_a_run_that_has_metrics_alone(tmp_path: Path) -> None:
    write(tmp_path / "run", lines(STEP))
    history = read_history(tmp_path / "run")
    assert history.steps == [STEP]
    assert (history.evaluations, history.incidents) == ([], [])
    assert (history.full, history.weights_alone, history.deleted) == ([], [], [])


def test_checkpoint_that_a_restart_began_from_is_not_forgotten(tmp_path: Path) -> None:
    after_save = replace(STEP, step=6, checkpoint_stall=0.5)
    after_restart = replace(STEP, step=6)
    write(tmp_path / "run", lines(STEP, replace(STEP, step=5), after_save, after_restart))
    assert read_history(tmp_path / "run").deleted == [5]


@pytest.mark.parametrize("line", ["{", "[]", '{"kind": "hang"}'])
def test_broken_incident_is_named(tmp_path: Path, line: str) -> None:
    write(tmp_path / "run", lines(STEP))
    (tmp_path / "run" / "incidents.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"incidents.jsonl has a line that is no incident .*: delete that line"):
        read_history(tmp_path / "run")
