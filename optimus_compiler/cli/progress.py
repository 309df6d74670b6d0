"""The progress of training: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Self

from rich.progress import Progress, TextColumn

from optimus_compiler.runtime.metrics import StepMetrics


class StepProgress:
    """Shows step, loss, gradient norm, tokens per second and the time left. A context manager.

    Off a terminal it prints the first, the last and each `every`-th step.
    """

    def __init__(self, steps: int, *, every: int, done: int = 0) -> None:
        self.step = done  # the last one shown, or taken before this start
        self._steps = steps
        self._first = 0
        self._every = every
        self._line: Progress | None = None
        if sys.stdout.isatty():
            self._line = Progress(TextColumn("{task.description}"))
            self._task = self._line.add_task("compiling", total=steps)

    def __enter__(self) -> Self:
        if self._line is None:
            print("compiling", flush=True)
        else:
            self._line.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._line is not None:
            self._line.stop()

    def show(self, metrics: StepMetrics) -> None:
        """Show a finished step."""
        self.step = metrics.step
        if not self._first:
            # the first step compiles: it is no measure of the others
            self._first, self._first_ended = metrics.step, time.perf_counter()
        line = describe(metrics, self._steps, self._seconds_left(metrics))
        if self._line is not None:
            self._line.update(self._task, completed=metrics.step, description=line)
        elif metrics.step in (self._first, self._steps) or metrics.step % self._every == 0:
            print(line, flush=True)

    def evaluating(self, what: str, done: int, total: int) -> None:
        """Shows on a terminal how far an evaluation is; its result is said in the end."""
        if self._line is not None:
            self._line.update(self._task, description=f"step {self.step:,}: evaluating {what} {done / total:.0%}")

    def say(self, sentence: str) -> None:
        """Prints a line of its own."""
        if self._line is not None:
            self._line.console.print(sentence, markup=False, highlight=False, soft_wrap=True)
        else:
            print(sentence, flush=True)

    def _seconds_left(self, metrics: StepMetrics) -> float | None:
        if metrics.step == self._first:
            return None
        seconds = time.perf_counter() - self._first_ended
        return seconds / (metrics.step - self._first) * (self._steps - metrics.step)


def describe(metrics: StepMetrics, steps: int, seconds_left: float | None) -> str:
    """The progress line of a step, short enough for a terminal of 80 columns."""
    left = "-:--:--" if seconds_left is None else timedelta(seconds=round(seconds_left))
    return (
        f"step {metrics.step:,}/{steps:,}  loss {metrics.loss:.4f}  grad norm {metrics.grad_norm:.3f}  "
        f"{metrics.tokens_per_second:,.0f} tokens/s  ETA {left}"
    )
