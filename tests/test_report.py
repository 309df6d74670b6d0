"""bench/report.py: tables of results between their marks in a text."""

import json
import re
from pathlib import Path

import pytest

from bench.report import ROOT, filled, pages

RESULT = {"title": "Step", "machine": "a CPU", "columns": ["variant", "ms"], "rows": [["ours", "1.5"], ["theirs", "2"]]}
TEXT = "Before.\n<!-- bench:step -->\nold\n<!-- /bench -->\nAfter.\n"


def test_a_marked_place_is_filled_anew_and_nothing_else_changes(tmp_path: Path) -> None:
    (tmp_path / "step.json").write_text(json.dumps(RESULT))
    once = filled(TEXT, tmp_path)
    table = "**Step**\n\n| variant | ms |\n|---|---:|\n| ours | 1.5 |\n| theirs | 2 |\n\n*a CPU*"
    assert once == f"Before.\n<!-- bench:step -->\n{table}\n<!-- /bench -->\nAfter.\n"
    assert filled(once, tmp_path) == once


def test_a_result_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"step\.json"):
        filled(TEXT, tmp_path)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_a_page_shows_the_results_that_are_kept_and_links_to_what_is_there(page: Path) -> None:
    text = page.read_text()
    assert filled(text, ROOT / "bench" / "results") == text
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target


def test_every_result_is_shown_somewhere() -> None:
    shown = {name for page in pages() for name in re.findall(r"<!-- bench:(\S+) -->", page.read_text())}
    assert {path.stem for path in (ROOT / "bench" / "results").glob("*.json")} == shown


@pytest.mark.slow
def test_the_readmes_example_in_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = (ROOT / "README.md").read_text().split("```python\n", 1)[1].split("```", 1)[0]
    exec(compile(example, "README.md", "exec"), {})
    assert "FuseSparseMoE" in capsys.readouterr().out
