"""The results of an evaluation as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from optimus_compiler.runtime.evaluate.accuracy import Result, average
from optimus_compiler.runtime.files import whole_file


def report(results: Sequence[Result], source: Path, limit: int) -> dict[str, Any]:
    """What was evaluated, each task's accuracies (0 to 1) and the average of those that count."""
    tasks = {result.task: {key: value for key, value in asdict(result).items() if key != "task"} for result in results}
    return {"source": str(source), "limit": limit, "tasks": tasks, "average": average(results)}


def check_output(path: Path) -> None:
    """Raises ValueError, before any work, where `write_report` could not write; makes the folder that it needs."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file to write with --output")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path.with_name(f".{path.name}.probe")):
            pass
        path.with_name(f".{path.name}.probe").unlink()
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}): name another file with --output") from None


def write_report(results: Sequence[Result], source: Path, output: Path, limit: int) -> None:
    """Writes `report` to a file, which appears whole or not at all."""
    with whole_file(output) as file:
        file.write((json.dumps(report(results, source, limit), indent=2) + "\n").encode())
