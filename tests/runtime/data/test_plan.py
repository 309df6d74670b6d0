"""Weights are those of the last pattern that matches the whole path."""

from pathlib import Path

from optimus_compiler.runtime.data.plan import weigh


def test_the_last_matching_pattern_counts() -> None:
    files = [Path("/data/wiki/a.jsonl"), Path("/data/wiki/b.jsonl"), Path("/data/web/a.jsonl")]
    assert weigh(files, {}) == [1.0, 1.0, 1.0]
    assert weigh(files, {"*/wiki/*": 2, "*/a.jsonl": 0.5}) == [0.5, 2.0, 0.5]
    assert weigh(files, {"*/a.jsonl": 0.5, "*/wiki/*": 2}) == [2.0, 2.0, 0.5]
