"""The demo on a small text, uncompiled: the files it makes, what it prints, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimus_compiler.cli import demo
from optimus_compiler.cli.main import main
from optimus_compiler.runtime.metrics import read_metrics
from tests.tiny_run import TEXT


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo with a text of two files, a small vocabulary and no compilation."""
    monkeypatch.setattr(demo, "VOCABULARY", 300)
    monkeypatch.setattr(demo, "CONTEXT_LENGTH", 16)
    monkeypatch.setattr(demo, "CONFIG", demo.CONFIG.replace("[train]", '[train]\nbackend = "eager"'))
    monkeypatch.setattr(demo, "standard_library", lambda: iter([TEXT, "class A:\n    pass\n"]))


def test_demo_makes_everything_and_can_be_repeated(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "demo"
    for steps in (3, 2):
        assert main(["demo", "--output", str(output), "--steps", str(steps)]) == 0
        out = capsys.readouterr().out
        metrics = read_metrics(output / "run")
        assert len(metrics) == steps
        mean = sum(step.loss for step in metrics) / steps
        assert f"loss: {metrics[0].loss:.2f} at step 1, {mean:.2f} over the last {steps} of {steps} steps" in out
        assert "\ndef" in out.partition("Text sampled")[2]
        assert f"{output / 'metrics.png'}; " in out
        assert (output / "metrics.png").read_bytes()[:4] == b"\x89PNG"
        assert (output / "data" / "manifest.json").is_file()
        assert {path.name for path in (output / "exported").iterdir()} == {
            "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        }  # fmt: skip


def test_demo_leaves_a_folder_of_others_alone(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert main(["demo", "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"optimus: error: {tmp_path} exists and was not made by the demo: give another --output\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_text_is_the_standard_library_without_tests() -> None:
    texts = list(demo.standard_library())
    assert len(texts) > 300
    assert any("def dumps(obj" in text for text in texts)  # json
    assert not any("import unittest\nfrom test import support" in text for text in texts)
    assert texts == list(demo.standard_library())
