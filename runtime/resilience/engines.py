"""Engines: how the slots of all nodes are started, by what the machine has: fork, torchrun, mpiexec or srun.

Each node has a call of its launcher: what becomes of one node leaves the others alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

import torch

from optimus_compiler.runtime.kernels import cpu
from optimus_compiler.runtime.resilience.beacon import LOGS
from optimus_compiler.runtime.resilience.hosts import LOCAL, HostsError, Node
from optimus_compiler.runtime.resilience.slot import die_with_parent, preload, run_slot

Launcher = Literal["local", "torchrun", "mpiexec", "srun"]


class Engine(Protocol):
    """Starts one slot for each (node, rank on it) and ends them."""

    def start(self, address: str, nodes: Sequence[Node], per_node: int, run: Path) -> None:
        """Starts the slots; they connect to `address` ("host:port")."""
        ...

    def ended(self) -> dict[str, str]:
        """The nodes whose launcher has ended, and what it said last."""
        ...

    def stop(self) -> None:
        """Ends what is left of them."""
        ...


class Local:
    """Slots on this machine, forked: they have imported what this process has. A "node" is a group of them."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._slots: list[int] = []

    def start(self, address: str, nodes: Sequence[Node], per_node: int, run: Path) -> None:
        preload()
        if torch.accelerator.current_accelerator() is None:
            cpu.load()
        for node in nodes:
            for local_rank in range(per_node):
                slot = os.fork()
                if slot == 0:
                    code = 1
                    try:
                        self._listener.close()
                        signal.signal(signal.SIGINT, signal.SIG_IGN)
                        signal.signal(signal.SIGTERM, signal.SIG_DFL)
                        run_slot(address, node.name, local_rank, run)
                        code = 0
                    finally:
                        os._exit(code)
                self._slots.append(slot)

    def ended(self) -> dict[str, str]:
        return {}  # slots that end hang up

    def stop(self) -> None:
        for slot in self._slots:
            with suppress(ProcessLookupError):
                os.kill(slot, signal.SIGKILL)
        for slot in self._slots:
            with suppress(ChildProcessError):
                os.waitpid(slot, 0)
        self._slots = []


class Commands:
    """Slots that a launcher starts, one call of it a node; its output is in RUN/logs/<launcher>-<node>.log."""

    def __init__(self, launcher: Launcher, arguments: Sequence[str] = ()) -> None:
        """arguments: further ones of the launcher, such as how it binds ranks to cores."""
        self._launcher = launcher
        self._arguments = tuple(arguments)
        self._calls: dict[str, subprocess.Popen[bytes]] = {}  # by node
        self._logs = Path()

    def start(self, address: str, nodes: Sequence[Node], per_node: int, run: Path) -> None:
        self._logs = run / LOGS
        self._logs.mkdir(parents=True, exist_ok=True)
        for node in nodes:
            slot = [sys.executable, "-m", "optimus_compiler", "slot", address, node.name, str(run.absolute())]
            command = command_for(self._launcher, self._arguments, node.host, per_node) + slot
            with open(self._log(node.name), "ab") as log:
                self._calls[node.name] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )

    def ended(self) -> dict[str, str]:
        return {node: self._last_words(node) for node, call in self._calls.items() if call.poll() is not None}

    def stop(self) -> None:
        for call in self._calls.values():
            call.terminate()
        for call in self._calls.values():
            try:
                call.wait(timeout=10)
            except subprocess.TimeoutExpired:
                call.kill()
        self._calls = {}

    def _last_words(self, node: str) -> str:
        code = self._calls[node].returncode
        lines = [line for line in self._log(node).read_text(errors="replace").splitlines() if line.strip()]
        return f"{self._launcher} ended with exit code {code}: {lines[-1].strip() if lines else 'it said nothing'}"

    def _log(self, node: str) -> Path:
        return self._logs / f"{self._launcher}-{node}.log"


def command_for(launcher: Launcher, arguments: Sequence[str], host: str, per_node: int) -> list[str]:
    """What starts `per_node` processes on a host; the command to be started follows.

    Raises HostsError when the launcher is not on PATH, or cannot reach the host.
    """
    program = shutil.which(launcher)
    match launcher:
        case "torchrun":
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=0"]
            torchrun += [f"--nproc-per-node={per_node}", *arguments, "--no-python"]
            return torchrun if host == LOCAL else ["ssh", "-o", "BatchMode=yes", host, *torchrun]
        case "mpiexec" if program:
            where = {"hydra": ["-hosts", host], "openmpi": ["--host", f"{host}:{per_node}"], "pals": ["--hosts", host]}
            return [program, "-n", str(per_node), *where[_kind_of_mpiexec(program)], *arguments]
        case "srun" if program:
            here = [] if host == LOCAL else [f"--nodelist={host}"]
            fixed = ["--nodes=1", f"--ntasks={per_node}", "--overlap", "--kill-on-bad-exit=0", "--export=ALL"]
            return [program, *fixed, *here, *arguments]
        case _:
            raise HostsError(f"--launcher {launcher}: {launcher} is not on PATH: install or load it")


@cache
def _kind_of_mpiexec(program: str) -> str:
    """Whose mpiexec this is: each names hosts in its own way."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    text = (said.stdout + said.stderr).lower()
    if "open mpi" in text or "open-mpi" in text:
        return "openmpi"
    return "pals" if "pals" in text else "hydra"
