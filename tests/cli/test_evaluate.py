"""`optimus evaluate`: table and JSON of a run, of the folder that it exports, and of several processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from optimus_compiler.cli.main import main
from optimus_compiler.config import load_config
from optimus_compiler.runtime.run import open_run
from optimus_compiler.runtime.trainer import train
from tests.ranks import Ranks
from tests.task_wheel import installed, write_wheel

TASKS = "arc_easy,winogrande,piqa"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = write_wheel(tmp_path_factory.mktemp("wheel"))
    with installed(folder):
        yield folder


@pytest.fixture(scope="module")
def trained(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    settings = [f"data.path={tiny / 'data'}", "optimizer.lr=0.05", "train.steps=3"]
    train(open_run(load_config(tiny / "tiny.toml", settings), run))
    return run


def test_a_run_and_its_exported_folder_score_the_same(
    wheel: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(trained), str(tmp_path / "exported")]) == 0
    assert main(["evaluate", str(tmp_path / "exported"), "--tasks", TASKS]) == 0
    of_folder = json.loads((tmp_path / "exported-evaluation.json").read_text())
    capsys.readouterr()
    assert main(["evaluate", str(trained), "--tasks", TASKS, "--output", str(tmp_path / "scores.json")]) == 0
    printed = capsys.readouterr().out
    of_run = json.loads((tmp_path / "scores.json").read_text())
    assert of_run["source"] == str(trained / "checkpoints" / "step-3")
    assert of_run["tasks"] == of_folder["tasks"]
    assert list(of_run["tasks"]) == TASKS.split(",")
    scores = [task[task["primary"]] for task in of_run["tasks"].values()]
    assert of_run["average"] == pytest.approx(sum(scores) / 3)
    assert of_run["tasks"]["winogrande"]["acc_pmi"] is None
    assert 0 <= of_run["tasks"]["arc_easy"]["acc_pmi"] <= 1
    for task, row in of_run["tasks"].items():
        (line,) = [line for line in printed.splitlines() if task in line]
        assert f"{100 * row[row['primary']]:.2f}*" in line
    assert f"{100 * of_run['average']:.2f}" in printed


def evaluate_here(folder: Path, trained: Path, output: Path) -> int:
    with installed(folder):
        return main(["evaluate", str(trained), "--tasks", TASKS, "--output", str(output), "--debug"])


def test_processes_divide_the_questions_and_agree(ranks: Ranks, wheel: Path, trained: Path, tmp_path: Path) -> None:
    assert evaluate_here(wheel, trained, tmp_path / "one.json") == 0
    assert ranks.run(3, evaluate_here, wheel, trained, tmp_path / "three.json") == [0, 0, 0]
    assert json.loads((tmp_path / "three.json").read_text()) == json.loads((tmp_path / "one.json").read_text())


def test_a_limit_is_kept_and_recorded(wheel: Path, trained: Path, tmp_path: Path) -> None:
    output = tmp_path / "scores.json"
    assert main(["evaluate", str(trained), "--tasks", "piqa", "--limit", "1", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert (found["limit"], found["tasks"]["piqa"]["questions"]) == (1, 1)


def test_a_folder_for_the_output_is_made_and_a_file_in_the_way_is_refused_first(
    wheel: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "new" / "scores.json"
    assert main(["evaluate", str(trained), "--tasks", "piqa", "--output", str(output)]) == 0
    assert output.is_file()
    assert list(output.parent.iterdir()) == [output]
    monkeypatch.setattr("optimus_compiler.runtime.evaluate.open.open_model", lambda *_, **__: pytest.fail("opened"))
    for path, sentence in (
        (tmp_path, f"{tmp_path} is a folder: name a file to write with --output"),
        (output / "below", f"{output / 'below'} cannot be written"),
    ):
        assert main(["evaluate", str(trained), "--tasks", "piqa", "--output", str(path)]) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "nowhere does not exist: name a checkpoint, a run directory or a Hugging Face folder"),
        (["RUN", "--tasks", "piqua"], "'piqua' is not a task: did you mean piqa?"),
        (["RUN", "--tasks", ","], "name at least one task"),
        (["RUN", "--tokenizer", "none.json"], "none.json does not exist: pass --tokenizer FILE, a tokenizer.json"),
    ],
)
def test_mistakes_are_one_line(
    wheel: Path, trained: Path, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(trained) if each == "RUN" else each for each in arguments]
    arguments += [] if "--tasks" in arguments else ["--tasks", "piqa"]
    assert main(["evaluate", *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert len(error.strip().splitlines()) == 1
    assert not trained.with_name("run-evaluation.json").exists()
