"""A slot: the process that stands for one rank of a node. It forks the training process and tells how that ended.

It has imported torch, so that a start takes a fork. It dies with the supervisor, and takes the process with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

from optimus_compiler.runtime.doctor import is_exact
from optimus_compiler.runtime.resilience.messages import Line, Message

PR_SET_PDEATHSIG = 1


def preload() -> None:
    """Imports what a training process needs, before it is forked: most of a start is importing."""
    import functorch.compile  # noqa: F401
    import torch._dynamo
    import torch.distributed.pipelining
    import torch.export  # noqa: F401

    import optimus_compiler.runtime.run
    import optimus_compiler.runtime.trainer  # noqa: F401


def run_slot(address: str, node: str, local_rank: int, run: Path) -> None:
    """Serves the supervisor at `address` ("host:port") until it hangs up or says so."""
    die_with_parent()
    host, _, port = address.rpartition(":")
    line = Line(socket.create_connection((host, int(port)), timeout=30))
    line.socket.settimeout(None)
    line.send(hello=node, local_rank=local_rank, fault=_fault_of_node(run))
    _Slot(line).serve()


class _Slot:
    """The connection, and the training process where there is one."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._worker = 0  # process id
        self._exit = -1  # a file descriptor that becomes readable when it ends

    def serve(self) -> None:
        try:
            while True:
                watched = [self._line.socket] + ([self._exit] if self._worker else [])
                ready = select.select(watched, [], [])[0]
                if self._exit in ready and self._worker:
                    self._report_end()
                if self._line.socket in ready:
                    messages = self._line.receive()
                    if messages is None:
                        return  # the supervisor is gone
                    for message in messages:
                        if not self._obey(message):
                            return
        except OSError:
            return
        finally:
            self._kill()

    def _obey(self, message: Message) -> bool:
        """Does what the supervisor says; False when this slot is to end."""
        match message["do"]:
            case "start":
                self._start(message)
            case "kill":
                self._kill()
            case "terminate":
                if self._worker:
                    os.kill(self._worker, signal.SIGTERM)
            case "look":
                self._line.send(look=self._look())
            case "end":
                return False
        return True

    def _start(self, message: Message) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        worker = os.fork()
        if worker == 0:
            _train(message["environment"], message["arguments"], Path(message["log"]))
        self._worker, self._exit = worker, os.pidfd_open(worker)

    def _report_end(self) -> None:
        _, status = os.waitpid(self._worker, 0)
        code = os.waitstatus_to_exitcode(status)  # negative: a signal
        _kill_group(self._worker)  # what it has started itself
        os.close(self._exit)
        self._worker = 0
        self._line.send(ended=code, time=time.time())

    def _kill(self) -> None:
        if self._worker:
            os.kill(self._worker, signal.SIGKILL)  # it may not lead its group yet
            with contextlib.suppress(OSError):  # nobody may be left to report to
                self._report_end()

    def _look(self) -> dict[str, str]:
        """The state of the training process as the kernel has it, and its stack where py-spy is installed."""
        if not self._worker:
            return {"state": "ended"}
        try:
            state = Path(f"/proc/{self._worker}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return {"state": "ended"}
        seen = {"state": {"T": "stopped", "t": "stopped", "D": "in the kernel"}.get(state, "running")}
        if spy := shutil.which("py-spy"):
            command = [spy, "dump", "--nonblocking", "--pid", str(self._worker)]
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                seen["stack"] = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
        return seen


def _train(environment: dict[str, str], arguments: list[str], log: Path) -> None:
    """In the forked process: becomes the training process; never returns."""
    code = 1
    try:
        os.setsid()
        die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the supervisor, which tells the slots
        os.environ.update(environment)
        log.parent.mkdir(parents=True, exist_ok=True)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        from optimus_compiler.cli.main import main

        code = main(arguments)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def die_with_parent() -> None:
    """The kernel kills this process when its parent dies, however that dies (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _fault_of_node(run: Path) -> str | None:
    """What a quick look finds wrong with this node: arithmetic, and the folder of the run."""
    if not is_exact(torch.device("cpu")):
        return "it computes wrong: a product of small integers came out differently"
    try:
        run.mkdir(parents=True, exist_ok=True)
        probe = run / f".probe-{socket.gethostname()}-{os.getpid()}"
        probe.write_text("probe")
        probe.unlink()
    except OSError as error:
        return f"it cannot write to {run}: {error.strerror}"
    return None
