"""The records of a run to TensorBoard and W&B too, as log.tensorboard and log.wandb ask; metrics.jsonl has them anyway.

A writer that cannot be started, or fails, is left out from there on: training goes on without it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from optimus_compiler.config import ConfigError, LogSection, tables
from optimus_compiler.runtime.files import whole_file
from optimus_compiler.runtime.metrics import METRICS, Evaluation, StepMetrics

if TYPE_CHECKING:
    from optimus_compiler.runtime.run import Run

WANDB_ID = "wandb-id"  # in the run directory: the W&B run that every start of it continues
# Seconds for a W&B server that does not answer; what it lacks then stays on the disk, for `wandb sync`. While it ends
# all ranks wait: for less time than the supervisor calls a hang (its LEAST_PATIENCE).
START_TIMEOUT, FINISH_TIMEOUT = 30, 20


class Writer(Protocol):
    """Where records go besides the run's own files."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Takes what was measured after a step, without waiting for a disk or a network."""

    def close(self, *, failed: bool) -> None:
        """Writes what is left. failed: the run ended with an error."""


class TensorBoardWriter:
    """Event files in RUN/tensorboard."""

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step: what an earlier start has written of the steps that are now done again is not shown.
        # A second between flushes: a killed process loses little.
        folder = str(run.directory / "tensorboard")
        self._events = SummaryWriter(folder, purge_step=run.steps_done + 1, max_queue=1000, flush_secs=1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Queues the values for a thread that writes them."""
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        """Writes what is queued."""
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
                init_timeout=START_TIMEOUT,
                login_timeout=START_TIMEOUT,
                finish_timeout=FINISH_TIMEOUT,
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
        """Waits, for a while, until W&B's process has sent everything."""
        import wandb

        self._run.finish(exit_code=int(failed))
        wandb.teardown()  # waits for the process: offline, `finish` may return before the last rows are in the file


_WRITERS: dict[str, Callable[[Run], Writer]] = {"tensorboard": TensorBoardWriter, "wandb": WandbWriter}  # by key of log


class Writers:
    """The writers that [log] asks for, on rank 0. A context manager; `say` is told once of each that fails."""

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self._run = run
        self._say = say
        self._open: dict[str, Writer] = {}

    def __enter__(self) -> Self:
        wanted = _wanted(self._run.config.log) if self._run.mesh.rank == 0 else []
        for key in wanted:
            with self._telling(key):
                self._open[key] = _WRITERS[key](self._run)
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        for key, writer in list(self._open.items()):
            with self._telling(key):
                writer.close(failed=error is not None)

    def step(self, metrics: StepMetrics) -> None:
        """A step is done: its metrics go out as train/loss and so on."""
        self._write(metrics.step, "train", _numbers(metrics))

    def evaluation(self, evaluation: Evaluation) -> None:
        """An evaluation is done: it goes out as eval/validation_loss, eval/arc_easy and so on."""
        self._write(evaluation.step, "eval", _numbers(evaluation) | evaluation.tasks)

    def _write(self, step: int, group: str, values: dict[str, float]) -> None:
        for key, writer in list(self._open.items()):
            with self._telling(key):
                writer.write(step, {f"{group}/{name}": value for name, value in values.items()})

    @contextmanager
    def _telling(self, key: str) -> Iterator[None]:
        """A block whose failure ends the writer, and not the run."""
        try:
            yield
        except Exception as error:
            self._open.pop(key, None)
            fault = " ".join(f"{type(error).__name__}: {error}".split())
            self._say(f"log.{key} writes no more: {fault}; training goes on, and {METRICS} has every step")


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
