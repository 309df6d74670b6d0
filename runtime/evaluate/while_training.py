"""Evaluation of a run as it trains: every [eval] every steps and after the last, a line of evaluations.jsonl."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from optimus_compiler.compiled import CompiledModel
from optimus_compiler.runtime.evaluate.accuracy import average, evaluate
from optimus_compiler.runtime.evaluate.encode import encoder
from optimus_compiler.runtime.evaluate.models import TrainedModel
from optimus_compiler.runtime.evaluate.validation import validation_loss
from optimus_compiler.runtime.metrics import Evaluation
from optimus_compiler.runtime.run import Run

Progress = Callable[[str, int, int], None]  # what is being evaluated, how much of it is done, how much there is


def is_due(run: Run, step: int) -> bool:
    """Whether the run asks for an evaluation after this step."""
    every = run.config.eval.every
    return bool(every) and (step % every == 0 or step == run.config.train.steps)


def evaluate_run(run: Run, compiled: CompiledModel, step: int, tokens: int, progress: Progress) -> Evaluation:
    """The loss on the run's validation data and the accuracies on its tasks. Every rank calls it and gets the same."""
    started = time.perf_counter()
    loss = None
    if run.validation is not None:
        loss = validation_loss(
            compiled,
            run.validation,
            document_mask=run.config.data.document_mask,
            progress=lambda done, total: progress("validation", done, total),
        )
    accuracies: dict[str, float] = {}
    if run.tasks:
        results = evaluate(
            TrainedModel(compiled),
            run.tasks,
            encoder(run.data.tokenizer()),
            eos_id=run.data.manifest.eos_id,
            progress=progress,
        )
        accuracies = {result.task: result.score for result in results} | {"average": average(results)}
    return Evaluation(
        step=step,
        tokens=tokens,
        validation_loss=loss,
        perplexity=None if loss is None else perplexity(loss),
        tasks=accuracies,
        seconds=time.perf_counter() - started,
    )


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
