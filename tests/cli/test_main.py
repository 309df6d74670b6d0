"""The command line: what each command prints and writes, exit codes, and one line on stderr for every error."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from optimus_compiler.cli import pretrain
from optimus_compiler.cli.main import main
from tests.cli.conftest import Run
from tests.tiny_run import write_corpus, write_tokenizer


def refused(result: tuple[int, str, str], code: int = 2) -> str:
    """The sentence of an error: the only line on stderr, after the program's name."""
    exit_code, _, err = result
    assert exit_code == code
    assert err.startswith("optimus: error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err.removeprefix("optimus: error: ").rstrip("\n")


def test_prepare_pretrain_plot(optimus: Run, tiny: Path, tmp_path: Path) -> None:
    corpus, tokenizer = write_corpus(tmp_path / "corpus.jsonl"), write_tokenizer(tmp_path / "tokenizer.json")
    data, run = tmp_path / "data", tmp_path / "run"
    code, out, err = optimus(
        "prepare", corpus, "--tokenizer", tokenizer, "--context-length", 16, "--output", data, "--seed", 3
    )
    manifest = json.loads((data / "manifest.json").read_text())
    assert (code, err, manifest["seed"]) == (0, "", 3)
    assert f"{data}: 1 documents, {manifest['counts']['tokens']:,} tokens, " in out
    assert f" {manifest['counts']['instances']:,} sequences of 16 " in out

    code, out, err = optimus("pretrain", tiny / "tiny.toml", "--set", f"data.path={data}", "--output", run)
    assert (code, err) == (0, "")
    steps = [line for line in out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/4", "2/4", "3/4", "4/4"]
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"loss {last['loss']:.4f}  grad norm {last['grad_norm']:.3f}" in steps[-1]
    assert steps[-1].endswith("ETA 0:00:00")

    code, out, err = optimus("plot", run)
    assert (code, out, err) == (0, f"{run / 'metrics.png'}\n", "")
    assert (run / "metrics.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_log_every_thins_the_progress_lines(optimus: Run, tiny: Path, tmp_path: Path) -> None:
    settings = ("--set", f"data.path={tiny / 'data'}", "--set", "train.steps=7", "--set", "log.every=3")
    code, out, _ = optimus("pretrain", tiny / "tiny.toml", *settings, "--output", tmp_path / "run")
    assert code == 0
    assert [line.split()[1] for line in out.splitlines() if line.startswith("step ")] == ["1/7", "3/7", "6/7", "7/7"]


def test_explain_prints_passes_and_graphs(optimus: Run, tiny: Path) -> None:
    code, out, err = optimus("explain", tiny / "tiny.toml", "--set", "train.sequence_length=16")
    assert (code, err) == (0, "")
    assert "FuseSparseMoE" in out
    assert "grouped_mlp" not in out
    options = ("--set", "train.sequence_length=16", "--set", "mesh.dp=4", "--set", "mesh.ep=2", "--graph")
    code, out, err = optimus("explain", tiny / "tiny.toml", *options)
    assert (code, err) == (0, "")
    assert out.startswith("mesh      pp=1 x dp=4 x ep=2 x tp=1\n")  # of any size, in one process
    assert "2 x 2 experts a rank" in out
    assert "_c10d_functional.reduce_scatter_tensor" in out
    assert out.count("class GraphModule") == 4  # const, embed, one layer for both, head
    assert "torch.ops.optimus.grouped_mlp" in out


@pytest.mark.parametrize("command", ["prepare", "pretrain", "explain", "plot", "demo"])
def test_help_has_an_example(optimus: Run, command: str) -> None:
    code, out, err = optimus(command, "--help")
    assert (code, err) == (0, "")
    assert f"Example:\n    optimus {command}" in out


def test_without_arguments_it_lists_the_commands(optimus: Run) -> None:
    code, out, err = optimus()
    assert (code, err) == (0, "")
    for command in ("prepare", "pretrain", "explain", "plot", "demo"):
        assert f"\n  {command} " in out
    assert "..." not in out.replace("[ARGS]...", "")  # no description is cut off


def test_version(optimus: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimus_compiler.cli.main.version", lambda name: {"optimus-compiler": "1.2.3"}[name])
    assert optimus("--version") == (0, "optimus-compiler 1.2.3\n", "")
    assert callable(importlib.metadata.version)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["pretrian", "x"], "No such command 'pretrian'"),
        (["pretrain"], "Missing argument 'CONFIG'"),
        (["pretrain", "x.toml"], "Missing option '--output'"),
        (["pretrain", "x.toml", "--outptu", "y"], "No such option"),
        (["pretrain", "mula-7b-a1", "--output", "run"], "did you mean mula-7b-a1b?"),
        (["pretrain", "mula-7b-a1b", "--set", "data.path=data", "--output", "run"], "needs 3072 processes"),
        (["explain", "nowhere.toml"], "nowhere.toml is neither a file nor a bundled configuration"),
        (["plot", "nowhere"], "nowhere is not a run directory"),
        (["prepare", "a.txt", "--tokenizer", "t.json", "--context-length", "x", "--output", "d"], "--context-length"),
        (["prepare", "nowhere.txt", "--tokenizer", "t.json", "--context-length", "4", "--output", "d"], "nowhere.txt"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    optimus: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = optimus(*arguments)
    assert sentence in refused(result)
    assert result[1] == ""
    assert list(tmp_path.iterdir()) == []


def test_bad_configuration_is_one_line_and_leaves_nothing(optimus: Run, tiny: Path, tmp_path: Path) -> None:
    for setting, sentence in {
        "train.stepz=1": "train.stepz is not a known key: did you mean train.steps?",
        "train.steps=ten": "train.steps = 'ten'",
        "data.path=nowhere": "nowhere is not a prepared data folder",
        "model.overrides.vocab_size=299": "has a vocabulary of 299 and",
        "eval.every=5": "eval.every = 5 with nothing to evaluate",
        "checkpoint.every=-1": "checkpoint.every = -1",
    }.items():
        settings = ("--set", f"data.path={tiny / 'data'}", "--set", setting)
        result = optimus("pretrain", tiny / "tiny.toml", *settings, "--output", tmp_path / "run")
        assert sentence in refused(result)
        assert not (tmp_path / "run").exists()


def test_output_that_is_a_file_is_named(optimus: Run, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    settings = ("--set", f"data.path={tiny / 'data'}")
    result = optimus("pretrain", tiny / "tiny.toml", *settings, "--output", tmp_path / "run")
    assert str(tmp_path / "run") in refused(result)
    assert (tmp_path / "run").read_text() == "mine"


def test_failed_run_exits_1_in_one_line(
    optimus: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*arguments: object) -> None:
        raise ValueError("first line\n  second line")

    monkeypatch.setattr("optimus_compiler.runtime.trainer.compile_model", explode)
    settings = ("--set", f"data.path={tiny / 'data'}")
    result = optimus("pretrain", tiny / "tiny.toml", *settings, "--output", tmp_path / "run")
    assert refused(result, code=1).endswith("stopped before the first step: ValueError: first line second line")


@pytest.mark.parametrize("position", [0, 1, 2])
def test_debug_shows_the_traceback_wherever_it_stands(position: int) -> None:
    arguments = ["explain", "nowhere.toml"]
    arguments.insert(position, "--debug")
    with pytest.raises(ValueError, match=r"nowhere.toml"):
        main(arguments)


def test_interrupt_exits_130(optimus: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(run: object, profile: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrain, "train_with_progress", interrupt)
    settings = ("--set", f"data.path={tiny / 'data'}")
    result = optimus("pretrain", tiny / "tiny.toml", *settings, "--output", tmp_path / "run")
    assert (result[0], result[2]) == (130, "optimus: interrupted\n")
