"""The progress of work in stages: a bar with the time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

LINE_SECONDS = 30.0


class StageProgress:
    """Shows what is being done, how much of it is done, and the time left. A context manager.

    Off a terminal it prints a line each 30 seconds, so short work prints none.
    """

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(), transient=True, disable=not sys.stdout.isatty())
        self._stage = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def show(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` (any unit) of a stage is done; a new name begins a new stage."""
        now = time.monotonic()
        if stage != self._stage:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._task = self._bar.add_task(stage, total=total)
            self._stage, self._began, self._had, self._line = stage, now, done, now
        self._bar.update(self._task, completed=done, total=total)
        if self._bar.disable and now - self._line >= LINE_SECONDS and self._had < done < total:
            self._line = now
            left = (now - self._began) / (done - self._had) * (total - done)
            print(f"{stage} {done / total:.1%}  ETA {timedelta(seconds=round(left))}", flush=True)

    def say(self, sentence: str) -> None:
        """Prints a line of its own, above the bar."""
        self._bar.console.print(sentence, markup=False, highlight=False, soft_wrap=True)
