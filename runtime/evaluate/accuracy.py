"""Accuracies of a task from the likelihoods of its choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from optimus_compiler.runtime.evaluate.encode import EncodedTask
from optimus_compiler.runtime.evaluate.score import Scored, score
from optimus_compiler.runtime.evaluate.tasks import Metric, Question, Task


@dataclass(frozen=True)
class Result:
    """The shares of a task's questions, 0 to 1, of which the right choice is the likeliest.

    acc: by log p(choice | question). acc_norm: by that divided by the choice's characters. acc_pmi: by log p(choice |
    question) - log p(choice | the task's unconditional prompt); None where the task has no such prompt.
    """

    task: str
    questions: int
    acc: float
    acc_norm: float
    acc_pmi: float | None
    primary: Metric

    @property
    def score(self) -> float:
        """The accuracy that counts."""
        return getattr(self, self.primary)


def evaluate(
    model: Scored,
    tasks: Sequence[EncodedTask],
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> list[Result]:
    """The accuracies of `model` on the tasks; every rank gets them. progress(task, requests done, requests in all)."""
    results = []
    for each in tasks:
        likelihoods = score(model, each.rows, partial(progress, each.task.name))
        results.append(accuracies(each.task, [likelihood for likelihood, _ in likelihoods]))
    return results


def average(results: Sequence[Result]) -> float:
    """The mean of what counts of each task, every task weighing the same."""
    return sum(result.score for result in results) / len(results)


def accuracies(task: Task, likelihoods: Sequence[float]) -> Result:
    """A task's accuracies from the log-likelihoods of all requests of its questions, in order."""
    remaining = iter(likelihoods)
    right: dict[str, list[bool]] = {"acc": [], "acc_norm": [], "acc_pmi": []}
    for question in task.questions:
        found = [next(remaining) for _ in question.requests]
        for metric, chosen in _choices(question, found).items():
            right[metric].append(chosen == question.answer)
    shares = {metric: sum(each) / len(each) if each else None for metric, each in right.items()}
    return Result(task.name, len(task.questions), **shares, primary=task.primary)  # type: ignore[arg-type]


def _choices(question: Question, likelihoods: Sequence[float]) -> dict[str, int]:
    """By metric the choice that the model takes: of equals the first."""
    conditional = likelihoods[: len(question.choices)]
    lengths = [len(choice.continuation.removeprefix(" ")) for choice in question.choices]
    scores = {
        "acc": conditional,
        "acc_norm": [each / max(1, length) for each, length in zip(conditional, lengths, strict=True)],
    }
    if question.unconditional:
        unconditional = likelihoods[len(question.choices) :]
        scores["acc_pmi"] = [each - other for each, other in zip(conditional, unconditional, strict=True)]
    return {metric: max(range(len(each)), key=each.__getitem__) for metric, each in scores.items()}
