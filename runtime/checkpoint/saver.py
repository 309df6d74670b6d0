"""Saves the checkpoints of a run: when they are due, in the background where asked, one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

import torch.distributed as dist

from optimus_compiler.compiled import CompiledModel
from optimus_compiler.config import CheckpointSection
from optimus_compiler.runtime.checkpoint.contents import Snapshot
from optimus_compiler.runtime.checkpoint.folder import CheckpointFolder
from optimus_compiler.runtime.checkpoint.manifest import CheckpointManifest, Kind, Progress, StoredFile
from optimus_compiler.runtime.checkpoint.write import write_checkpoint
from optimus_compiler.runtime.optimizer import ShardedAdamW

Describe = Callable[[Kind, Progress, int, dict[str, StoredFile]], CheckpointManifest]


class CheckpointSaver:
    """Saves at the steps that [checkpoint] names. A context manager; every rank makes the same calls.

    With `async`, a save copies the tensors to host memory and returns; a thread writes them. One save is in flight: the
    next waits for it. What goes wrong is raised by the next `wait`, on every rank; `failed` says that there is an error
    waiting here. `say` is told what was saved.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        settings: CheckpointSection,
        compiled: CompiledModel,
        optimizer: ShardedAdamW,
        describe: Describe,
        say: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._describe = describe
        self._say = say
        self._snapshot = Snapshot(compiled, optimizer, scattered=settings.scattered, staged=settings.asynchronous)
        # Its own group: what the thread sends must not mix with what training sends.
        self._group = dist.new_group(backend="gloo") if compiled.program.mesh.size > 1 else None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def due(self, step: int, *, last: bool) -> list[Kind]:
        """What is to be saved after `step`; whatever is saved at all is saved after the last one too."""
        every: dict[Kind, int] = {"full": self._settings.every, "model": self._settings.persistent_every}
        return [kind for kind, steps in every.items() if steps and (last or step % steps == 0)]

    def save(self, kinds: list[Kind], progress: Progress) -> float:
        """Saves checkpoints of these kinds; returns for how many seconds training waited."""
        if not kinds:
            return 0.0
        started = time.perf_counter()
        self.wait()
        self._snapshot.take("full" if "full" in kinds else "model")
        if self._settings.asynchronous:
            self._writing = self._writer.submit(self._write, kinds, progress)
        else:
            self._write(kinds, progress)
        return time.perf_counter() - started

    @property
    def failed(self) -> bool:
        """Whether a save has ended with an error that `wait` would raise."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def wait(self) -> None:
        """Waits for the save in flight; raises CheckpointError if it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._writer.shutdown(wait=True, cancel_futures=True)

    def _write(self, kinds: list[Kind], progress: Progress) -> None:
        for kind in kinds:
            started = time.perf_counter()
            path = self._write_one(kind, progress)
            self._say(f"{path} saved in {time.perf_counter() - started:.1f} s")

    def _write_one(self, kind: Kind, progress: Progress) -> Path:
        def describe(number: int, files: dict[str, StoredFile]) -> CheckpointManifest:
            return self._describe(kind, progress, number, files)

        keep = self._settings.retention()
        return write_checkpoint(
            self._folder, kind, progress.step, self._snapshot.parts(kind), describe, keep, self._group
        )
