"""What a training process tells its supervisor: that it lives, at which step it is, and where it stands when asked.

The loop only sets attributes; a thread of its own talks to the supervisor's TCPStore.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from datetime import timedelta
from typing import Self

import torch.distributed as dist

SECONDS = 0.5  # between two beats
ADDRESS, ATTEMPT, NODE, INJECT = "OPTIMUS_STORE", "OPTIMUS_ATTEMPT", "OPTIMUS_NODE", "OPTIMUS_INJECT"


class Beacon:
    """A context manager; without a supervisor (OPTIMUS_STORE is not set) it does nothing."""

    def __init__(self) -> None:
        self.step = 0  # the last one finished
        self.phase = "starting"
        self.step_seconds = 0.0  # of the last step
        self._quit = threading.Event()
        self._thread: threading.Thread | None = None

    def finished(self, step: int, seconds: float) -> None:
        """A step is done, and took so long."""
        self.step, self.step_seconds, self.phase = step, seconds, "training"

    def __enter__(self) -> Self:
        if ADDRESS in os.environ:
            self._thread = threading.Thread(target=self._beat, name="beacon", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.phase = "ending"
        self._quit.set()
        if self._thread is not None:
            self._thread.join(timeout=2)

    def _beat(self) -> None:
        host, _, port = os.environ[ADDRESS].rpartition(":")
        rank, attempt = os.environ["RANK"], os.environ[ATTEMPT]
        main = threading.main_thread().ident
        try:
            store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=20))
            beats = 0
            while not self._quit.wait(SECONDS if beats else 0):
                beats += 1
                beat = {"beat": beats, "step": self.step, "phase": self.phase, "seconds": self.step_seconds}
                if store.check([f"{attempt}/stacks"]):
                    beat["stack"] = _stack_of(main)
                store.set(f"{attempt}/beat/{rank}", json.dumps(beat))
        except (RuntimeError, OSError):  # the supervisor is gone: whoever holds the slot ends this process
            return


def _stack_of(main: int | None) -> list[str]:
    """The main thread's stack and those of autograd's device threads, innermost call last, a line each."""
    lines: list[str] = []
    for thread, frame in sys._current_frames().items():
        if thread == main:
            for summary in traceback.extract_stack(frame):
                lines.append(f"{summary.filename}:{summary.lineno} {summary.name}: {summary.line}")
    return lines
