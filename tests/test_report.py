"""bench/report.py: tables of results between their marks in a text."""

import json
from pathlib import Path

import pytest

from bench.report import filled

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


def test_the_readme_shows_the_results_that_are_kept() -> None:
    root = Path(__file__).parent.parent
    text = (root / "README.md").read_text()
    assert filled(text, root / "bench" / "results") == text
