"""Engines: how the slots of all nodes are started, by what the machine has: fork, torchrun, mpiexec or srun."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from optimus_compiler.runtime.resilience.slot import preload, run_slot


class Engine(Protocol):
    """Starts one slot for each (node, rank on it) and ends them."""

    def start(self, address: str, nodes: Sequence[str], per_node: int, run: Path) -> None:
        """Starts the slots; they connect to `address` ("host:port")."""
        ...

    def stop(self) -> None:
        """Ends what is left of them."""
        ...


class Local:
    """Slots on this machine, forked: they have imported what this process has. A "node" is a group of them."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._slots: list[int] = []

    def start(self, address: str, nodes: Sequence[str], per_node: int, run: Path) -> None:
        preload()
        for node in nodes:
            for local_rank in range(per_node):
                slot = os.fork()
                if slot == 0:
                    code = 1
                    try:
                        self._listener.close()
                        signal.signal(signal.SIGINT, signal.SIG_IGN)
                        signal.signal(signal.SIGTERM, signal.SIG_DFL)
                        run_slot(address, node, local_rank, run)
                        code = 0
                    finally:
                        os._exit(code)
                self._slots.append(slot)

    def stop(self) -> None:
        for slot in self._slots:
            with suppress(ProcessLookupError):
                os.kill(slot, signal.SIGKILL)
        for slot in self._slots:
            with suppress(ChildProcessError):
                os.waitpid(slot, 0)
        self._slots = []
