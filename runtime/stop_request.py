"""SIGTERM, which batch systems send before the walltime ends: noted, so that training stops between two steps."""

import signal
import threading
from types import FrameType
from typing import Self


class StopRequest:
    """`requested` turns True when the process gets SIGTERM within the block.

    Off the main thread, where Python takes no signals, it never does.
    """

    requested = False

    def __enter__(self) -> Self:
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_main:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
