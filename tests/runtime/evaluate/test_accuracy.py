"""Accuracies from likelihoods, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from optimus_compiler.runtime.evaluate.accuracy import accuracies, average
from optimus_compiler.runtime.evaluate.tasks import Question, Request, Task


def question(choices: list[str], answer: int, *, unconditional: bool = False) -> Question:
    asked = tuple(Request("Q", choice) for choice in choices)
    return Question(asked, tuple(Request("A:", choice) for choice in choices) if unconditional else (), answer)


def test_each_metric_chooses_by_its_own_score() -> None:
    """By likelihood " no"; by character (2 and 8) " a longer"; by what the question adds " of all"."""
    asked = question([" no", " a longer", " of all"], 0, unconditional=True)
    likelihoods = [-3.0, -4.0, -6.0, *(-1.0, -3.5, -9.0)]
    for answer, wanted in enumerate([(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]):
        result = accuracies(Task("piqa", (replace(asked, answer=answer),)), likelihoods)
        assert (result.acc, result.acc_norm, result.acc_pmi) == wanted
        assert result.score == result.acc_norm


def test_shares_are_over_all_questions_in_order() -> None:
    task = Task("arc_easy", tuple(question([" a", " b"], answer) for answer in (0, 1, 1, 0)))
    result = accuracies(task, [-1, -2, -1, -2, -2, -1, -1, -2])
    assert (result.acc, result.questions, result.acc_pmi, result.score) == (0.75, 4, None, 0.75)


def test_of_equal_choices_the_first_is_taken() -> None:
    for answer, wanted in ((0, 1.0), (1, 0.0)):
        assert accuracies(Task("boolq", (question([" a", " b"], answer),)), [-1.0, -1.0]).acc == wanted


def test_every_task_weighs_the_same() -> None:
    many = accuracies(Task("arc_easy", (question([" a", " b"], 0),) * 3), [-1, -2] * 3)
    one = accuracies(Task("piqa", (question([" a", " b"], 1),)), [-1, -2])
    assert average([many, one]) == pytest.approx(0.5)
