"""Evaluation of a run as it trains: every [eval] every steps and after the last, a line of evaluations.jsonl."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

from optimus_compiler.compiled import CompiledModel
from optimus_compiler.runtime.evaluate.accuracy import average, evaluate
from optimus_compiler.runtime.evaluate.encode import EncodedTask, encode_tasks, encoder
from optimus_compiler.runtime.evaluate.models import TrainedModel
from optimus_compiler.runtime.evaluate.validation import validation_loss
from optimus_compiler.runtime.metrics import Evaluation
from optimus_compiler.runtime.run import Run

Progress = Callable[[str, int, int], None]  # what is being evaluated, how much of it is done, how much there is


class Evaluator:
    """What a run is evaluated on: its validation data, and its tasks, which are encoded when they are first needed."""

    def __init__(self, run: Run, compiled: CompiledModel) -> None:
        self._run = run
        self._compiled = compiled
        self._tasks: list[EncodedTask] = []

    def evaluate(self, step: int, tokens: int, progress: Progress) -> Evaluation:
        """The model's loss on the validation data and accuracies on the tasks. Every rank calls it, and gets the same.

        Raises ValueError where the model gives something that is not a number.
        """
        started = time.perf_counter()
        run, loss = self._run, None
        if run.validation is not None:
            loss = validation_loss(
                self._compiled,
                run.validation,
                document_mask=run.config.data.document_mask,
                progress=partial(progress, "validation"),
            )
        return Evaluation(
            step=step,
            tokens=tokens,
            validation_loss=loss,
            perplexity=None if loss is None else perplexity(loss),
            tasks=self._accuracies(progress),
            seconds=time.perf_counter() - started,
        )

    def _accuracies(self, progress: Progress) -> dict[str, float]:
        run, model = self._run, TrainedModel(self._compiled)
        if not run.tasks:
            return {}
        if not self._tasks:
            self._tasks = encode_tasks(
                run.tasks,
                encoder(run.data.tokenizer()),
                eos_id=run.data.manifest.eos_id,
                max_length=model.max_length,
                progress=progress,
            )
        results = evaluate(model, self._tasks, progress)
        return {result.task: result.score for result in results} | {"average": average(results)}


def perplexity(loss: float) -> float | None:
    """exp(loss), None where it is too large for a number."""
    return math.exp(loss) if loss < 700 else None


def describe(evaluation: Evaluation) -> str:
    """An evaluation in one line."""
    parts = []
    if evaluation.validation_loss is not None:
        shown = "" if evaluation.perplexity is None else f" (perplexity {evaluation.perplexity:,.4g})"
        parts.append(f"validation loss {evaluation.validation_loss:.4f}{shown}")
    parts += [f"{task} {accuracy:.1%}" for task, accuracy in evaluation.tasks.items()]
    return f"step {evaluation.step:,}: {', '.join(parts)}, in {evaluation.seconds:,.1f} s"
