"""The records of a run to TensorBoard and W&B too, as log.tensorboard and log.wandb ask; metrics.jsonl has them anyway.

A writer that does not start, fails or falls behind is left out from there on: training goes on without it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

from optimus_compiler.config import ConfigError, LogSection, tables
from optimus_compiler.runtime.files import whole_file
from optimus_compiler.runtime.metrics import METRICS, Evaluation, StepMetrics

if TYPE_CHECKING:
    from optimus_compiler.runtime.run import Run

WANDB_ID = "wandb-id"  # in the run directory: the W&B run that every start of it continues
BACKLOG = 10_000  # records that a writer may be behind
END_PATIENCE = 20  # seconds for what is left when a run ends: fewer than the supervisor calls a hang (LEAST_PATIENCE)
WANDB_PATIENCE = 15  # seconds for a W&B server that does not answer

Queued: TypeAlias = tuple[int, str, dict[str, float]] | None  # step, "train" or "eval", values; None: there are no more
Backlog: TypeAlias = "Queue[Queued]"


class Writer(Protocol):
    """Where records go besides the run's own files."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Takes what was measured after a step."""

    def close(self, *, failed: bool) -> None:
        """Writes what is left. failed: the run ended with an error."""


class TensorBoardWriter:
    """Event files in RUN/tensorboard."""

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step: what an earlier start has written of the steps that are now done again is not shown.
        # A second between flushes: a killed process loses little.
        folder = str(run.directory / "tensorboard")
        self._events = SummaryWriter(folder, purge_step=run.steps_done + 1, flush_secs=1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Hands the values to TensorBoard's thread."""
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        """Writes what that thread still has."""
        self._events.close()


class WandbWriter:
    """A W&B run, continued by every start of the run; its own process talks to the server, or to RUN/wandb offline."""

    def __init__(self, run: Run) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "optimus"),
            name=os.environ.get("WANDB_NAME", run.directory.resolve().name),
            dir=str(run.directory),
            id=_wandb_id(run.directory),
            resume="allow",
            config=tables(run.config),
            allow_val_change=True,  # the number of steps, say, in a later start
            settings=wandb.Settings(
                console="off",  # the progress line stays as it is
                login_timeout=60,  # seconds for an answer, where W&B asks for a key
                init_timeout=WANDB_PATIENCE,
                finish_timeout=WANDB_PATIENCE,  # what the server lacks then is on the disk, for `wandb sync`
            ),
        )
        # W&B's own step only rises, and drops what is logged below it: steps that are done again after a restart
        self._run.define_metric("step", hidden=True)
        for group in ("train/*", "eval/*"):
            self._run.define_metric(group, step_metric="step")

    def write(self, step: int, values: dict[str, float]) -> None:
        """Hands the values to W&B's process."""
        self._run.log({"step": step, **values})

    def close(self, *, failed: bool) -> None:
        """Waits, for a while, until that process has sent everything."""
        import wandb

        self._run.finish(exit_code=int(failed))
        wandb.teardown()  # waits for the process: offline, `finish` may return before the last rows are in the file


_WRITERS: dict[str, Callable[[Run], Writer]] = {"tensorboard": TensorBoardWriter, "wandb": WandbWriter}  # by key of log


class Writers:
    """The writers that [log] asks for, on rank 0. A context manager; `say` is told once of each that fails.

    Each has a thread of its own: training waits for none of them until it ends, and then not for long.
    """

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self._run = run
        self._say = say
        self._failed = False  # the run
        self._backlogs: dict[str, Backlog] = {}
        self._threads: dict[str, Thread] = {}

    def __enter__(self) -> Self:
        for key in _wanted(self._run.config.log) if self._run.mesh.rank == 0 else ():
            self._backlogs[key] = Queue(BACKLOG)
            self._threads[key] = Thread(target=self._serve, args=(key, self._backlogs[key]), name=key, daemon=True)
            self._threads[key].start()
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        self._failed = error is not None
        self._put(None)
        deadline = time.monotonic() + END_PATIENCE
        for key in list(self._backlogs):
            self._threads[key].join(deadline - time.monotonic())
            if self._threads[key].is_alive():
                self._leave(key, f"it is not done after {END_PATIENCE} s")

    def step(self, metrics: StepMetrics) -> None:
        """A step is done: its metrics go out as train/loss and so on."""
        self._put((metrics.step, "train", _numbers(metrics)))

    def evaluation(self, evaluation: Evaluation) -> None:
        """An evaluation is done: it goes out as eval/validation_loss, eval/arc_easy and so on."""
        self._put((evaluation.step, "eval", _numbers(evaluation) | evaluation.tasks))

    def _put(self, record: Queued) -> None:
        for key, backlog in list(self._backlogs.items()):
            try:
                backlog.put_nowait(record)
            except Full:
                self._leave(key, f"it is {BACKLOG:,} records behind")

    def _serve(self, key: str, backlog: Backlog) -> None:
        """The life of a writer, in its thread."""
        try:
            writer = _WRITERS[key](self._run)
            while (record := backlog.get()) is not None:
                step, group, values = record
                writer.write(step, {f"{group}/{name}": value for name, value in values.items()})
            writer.close(failed=self._failed)
        except Exception as error:
            self._leave(key, f"{type(error).__name__}: {error}")

    def _leave(self, key: str, fault: str) -> None:
        if self._backlogs.pop(key, None) is not None:
            self._say(f"log.{key} gets no more: {' '.join(fault.split())}; {METRICS} has every step")


def check_packages(log: LogSection) -> None:
    """Raises ConfigError where a writer needs a package that is not installed."""
    for key in _wanted(log):
        spec = find_spec(key)
        if spec is None or spec.origin is None:  # no origin: a folder of that name, as W&B makes where it has run
            raise ConfigError(
                f"log.{key} = true needs a package that is missing: pip install 'optimus-compiler[{key}]', or set "
                f"log.{key} = false"
            )


def _wanted(log: LogSection) -> list[str]:
    return [key for key in _WRITERS if getattr(log, key)]


def _numbers(record: StepMetrics | Evaluation) -> dict[str, float]:
    """The values of a record by name: those that are numbers, but for the step."""
    return {name: value for name, value in asdict(record).items() if name != "step" and isinstance(value, (int, float))}


def _wandb_id(directory: Path) -> str:
    path = directory / WANDB_ID
    if not path.is_file():
        with whole_file(path) as file:
            file.write(secrets.token_hex(8).encode())
    return path.read_text()
