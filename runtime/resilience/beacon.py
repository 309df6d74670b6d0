"""What a training process tells its supervisor: that it lives, at which step it is, and where it stands when asked.

The loop only sets attributes; a thread of its own talks to the supervisor's TCPStore.
"""

from __future__ import annotations

import json
import os
import threading
from datetime import timedelta
from typing import Self

import torch.distributed as dist

from optimus_compiler.runtime.resilience.stacks import INNERMOST, stack_of, waits_for_peers

SECONDS = 0.5  # between two beats
SAMPLES = 5  # looks at the main thread from beat to beat
FORGET = 0.96  # what a look at the main thread weighs after the next: about 25 count
LOGS = "logs"  # in the run directory
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
            looks = 0
            busy = 0.5  # the share of looks at which the main thread waited for no peer
            while not self._quit.wait(SECONDS / SAMPLES if looks else 0):
                looks += 1
                if self.phase == "training":
                    busy = FORGET * busy + (1 - FORGET) * (not waits_for_peers(stack_of(main, INNERMOST)))
                if looks % SAMPLES != 1:
                    continue
                beat: dict[str, object] = {"beat": looks, "step": self.step, "phase": self.phase}
                beat |= {"seconds": self.step_seconds, "busy": busy * self.step_seconds}
                if store.check([f"{attempt}/stacks"]):
                    beat["stack"] = stack_of(main)
                store.set(f"{attempt}/beat/{rank}", json.dumps(beat))
        except (RuntimeError, OSError):  # the supervisor is gone: whoever holds the slot ends this process
            return
