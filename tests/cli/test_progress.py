"""Progress: the words of the line, the estimate, and the live line of a terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from optimus_compiler.cli.progress import StepProgress, describe
from tests.runtime.test_metrics import STEP


def test_line_of_a_step() -> None:
    metrics = replace(STEP, step=1200, loss=3.14159, grad_norm=0.5, tokens_per_second=12_345.6)
    assert describe(metrics, 30_000, 3661.4) == (
        "step 1,200/30,000  loss 3.1416  grad norm 0.500  12,346 tokens/s  ETA 1:01:01"
    )


def test_estimate_leaves_the_first_step_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([100.0, 102.0, 104.0])  # the first step ends at 100 s, then one step every 2 s
    monkeypatch.setattr("optimus_compiler.cli.progress.time.perf_counter", lambda: next(now))
    with StepProgress(4, every=1) as progress:
        for step in (1, 2, 3):
            progress.show(replace(STEP, step=step, seconds=90.0 if step == 1 else 2.0))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("ETA ")[2] for line in lines[1:]] == ["-:--:--", "0:00:04", "0:00:02"]


def test_terminal_shows_the_whole_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with StepProgress(1, every=1) as progress:
        progress.show(STEP)
    assert "step 1/1  loss 5.5000  grad norm 2.000  640 tokens/s  ETA -:--:--" in capsys.readouterr().out
