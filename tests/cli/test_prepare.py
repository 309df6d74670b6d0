"""`optimus prepare`: what it prints, its exit codes, and the folder it checks and describes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optimus_compiler.cli.stages import StageProgress
from tests.cli.conftest import Run
from tests.tiny_run import write_tokenizer

LINE = json.dumps({"text": "some words and then some more words, again and again. " * 5})


@pytest.fixture
def needed(tmp_path: Path) -> list[object]:
    """The options that are always needed; the output is tmp_path/data."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    return ["--tokenizer", tokenizer, "--context-length", 16, "--output", tmp_path / "data"]


def test_prepare_verify_stats(optimus: Run, needed: list[object], tmp_path: Path) -> None:
    (tmp_path / "wiki.jsonl").write_text(f"{LINE}\n" * 3)
    (tmp_path / "web.jsonl").write_text(f"{LINE}\n")
    options = ["--tails", "keep", "--documents", "separate", "--weight", "*/wiki.jsonl=1.5", "--shard-tokens", 64]
    code, out, err = optimus("prepare", f"{tmp_path}/*.jsonl", *needed, *options, "--seed", 3)
    assert (code, err) == (0, "")
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    recipe = ("tails", "documents", "shard_tokens", "seed")
    assert tuple(manifest[key] for key in recipe) == ("keep", "separate", 64, 3)
    assert {Path(source["file"]).name: source["weight"] for source in manifest["sources"]} == {
        "web.jsonl": 1.0,
        "wiki.jsonl": 1.5,
    }
    reported, summary = out.splitlines()
    assert reported.startswith("4 documents read: tiktoken encoded ")
    assert summary.startswith(f"{tmp_path / 'data'}: 4 documents, {manifest['counts']['tokens']:,} tokens, ")

    again = optimus("prepare", f"{tmp_path}/*.jsonl", *needed, *options, "--seed", 3)
    assert again[0] == 0
    assert again[1].splitlines()[0].endswith("made from the same inputs in the same way: nothing to do")
    code, _, err = optimus("prepare", f"{tmp_path}/*.jsonl", *needed, *options, "--seed", 4)
    assert code == 2
    assert "was prepared with seed 3, now 4: name another output or delete it" in err

    assert optimus("prepare", "--verify", tmp_path / "data") == (0, f"{tmp_path / 'data'}: no fault found\n", "")
    code, out, err = optimus("prepare", "--stats", tmp_path / "data")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == str(tmp_path / "data")
    assert "wiki.jsonl     1.5" in out


def test_a_validation_split_is_a_second_folder(optimus: Run, needed: list[object], tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"sentence {number}, said again and again. " * 3}) for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n{bad\n")
    command = ["prepare", tmp_path / "a.jsonl", *needed, "--validation-fraction", 0.2, "--max-bad-documents", 1]
    code, out, err = optimus(*command)
    assert (code, err) == (0, "")
    data, validation = tmp_path / "data", tmp_path / "data-validation"
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (data, validation)]
    assert [(m["split"], m["validation_fraction"]) for m in manifests] == [("training", 0.2), ("validation", 0.2)]
    training_documents, validation_documents = (m["counts"]["documents"] for m in manifests)
    assert training_documents + validation_documents == 40
    assert 2 <= validation_documents <= 16
    reported, bad, of_training, of_validation = out.splitlines()
    assert reported.startswith("40 documents read: ")
    assert bad == f"1 bad document left out, listed in {data / 'bad_documents.jsonl'}"
    assert of_training.startswith(f"{data}: {training_documents} documents, ")
    assert of_validation.startswith(f"{validation}: {validation_documents} documents, ")
    for folder in (data, validation):
        assert optimus("prepare", "--verify", folder) == (0, f"{folder}: no fault found\n", "")
    code, out, _ = optimus(*command)
    assert (code, out.count("nothing to do")) == (0, 2)

    code, out, err = optimus(*command, "--validation-output", tmp_path / "held-out", "--output", tmp_path / "other")
    assert (code, err) == (0, "")
    assert (tmp_path / "held-out" / "manifest.json").read_text() == (validation / "manifest.json").read_text()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--validation-output", "held-out"], "validation fraction and validation output belong together: give both"),
        (["--validation-fraction", 1], "validation fraction 1.0 is not possible: give a number between 0 and 1"),
        (["--validation-fraction", 0], "validation fraction 0.0 is not possible: give a number between 0 and 1"),
        (
            ["--validation-fraction", 0.001],
            "documents for validation hold 0 tokens in 1 file, of which tails and weights",
        ),
    ],
)
def test_a_split_that_is_none_is_refused_in_one_line(
    optimus: Run,
    needed: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[object],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text(f"{LINE}\n")
    before = sorted(tmp_path.iterdir())
    code, _, err = optimus("prepare", "a.jsonl", *needed, *options)
    assert (code, err.count("\n")) == (2, 1)
    assert sentence in err
    assert sorted(tmp_path.iterdir()) == before


def test_verify_lists_every_fault_and_exits_2(optimus: Run, needed: list[object], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f"{LINE}\n" * 3)
    assert optimus("prepare", tmp_path / "a.jsonl", *needed, "--shard-tokens", 64)[0] == 0
    shards = sorted((tmp_path / "data").glob("shard-*.npy"))
    shards[0].unlink()
    data = bytearray(shards[1].read_bytes())
    data[-2] ^= 1
    shards[1].write_bytes(data)
    code, out, err = optimus("prepare", "--verify", tmp_path / "data")
    assert code == 2
    assert out.splitlines() == [f"{shards[0]} is missing", f"{shards[1]} is not what was written (another sha256)"]
    assert err.startswith(f"optimus: error: {tmp_path / 'data'} is damaged, faults found: 2: ")


def test_damage_exits_2_unless_a_budget_lets_it_pass(optimus: Run, needed: list[object], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{LINE}\n{{"text": "half\n')
    code, out, err = optimus("prepare", tmp_path / "a.jsonl", *needed)
    assert code == 2
    assert err.count("\n") == 1
    assert f"1 bad document where 0 are allowed; the first is {tmp_path / 'a.jsonl'}, line 2: " in err
    assert not (tmp_path / "data").exists()
    code, out, err = optimus("prepare", tmp_path / "a.jsonl", *needed, "--max-bad-documents", 1)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"continuing the run that left {tmp_path / '.data.partial'}"
    assert f"1 bad document left out, listed in {tmp_path / 'data' / 'bad_documents.jsonl'}" in out
    code, _, err = optimus("prepare", tmp_path / "a.jsonl", *needed)
    assert code == 2
    assert "exists and leaves out 1 bad document: run again with --max-bad-documents 1" in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give one of INPUT..., --verify DIR and --stats DIR (found: none)"),
        (["a.txt", "--stats", "data"], "(found: INPUT, --stats)"),
        (["--verify", "data", "--stats", "data"], "(found: --verify, --stats)"),
        (["a.txt"], "Missing option '--tokenizer'"),
        (["a.txt", "--tokenizer", "t.json"], "Missing option '--context-length'"),
        (["a.txt", "--tokenizer", "t.json", "--context-length", "8"], "Missing option '--output'"),
        (["a.txt", "--tails", "cut"], "--tails"),
        (["--verify", "nowhere"], "nowhere is not a prepared data folder"),
        (["--stats", "nowhere"], "nowhere is not a prepared data folder"),
    ],
)
def test_mistakes_are_one_line(
    optimus: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = optimus("prepare", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert sentence in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("weight", ["*.txt", "=2", "*.txt=two", "*.txt="])
def test_a_weight_that_is_none_is_refused(optimus: Run, needed: list[object], tmp_path: Path, weight: str) -> None:
    code, _, err = optimus("prepare", tmp_path / "tokenizer.json", *needed, "--weight", weight)
    assert code == 2
    assert f"--weight '{weight}' is not PATTERN=W with a number W" in err


def test_off_a_terminal_progress_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 10.0, 40.0, 50.0, 80.0, 100.0, 140.0])
    monkeypatch.setattr("optimus_compiler.cli.stages.time.monotonic", lambda: next(now))
    with StageProgress() as progress:
        for done in (100, 200, 500, 600, 900):  # 100 were done by an earlier run
            progress.show("tokenising", done, 1000)
        progress.show("shuffling", 0, 10)
        progress.show("shuffling", 1, 10)
        progress.say("done")
    assert capsys.readouterr().out.splitlines() == [
        "tokenising 50.0%  ETA 0:00:50",
        "tokenising 90.0%  ETA 0:00:10",
        "shuffling 10.0%  ETA 0:06:00",
        "done",
    ]


def test_on_a_terminal_there_is_a_bar_for_the_stage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with StageProgress() as progress:
        progress.show("tokenising", 5, 10)
        progress.show("shuffling", 3, 4)
        progress.say("a sentence")
    out = capsys.readouterr().out
    assert "a sentence" in out
    assert "shuffling" in out
    assert "75%" in out
