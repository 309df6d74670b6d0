"""Faults on purpose, for tests and drills: --inject "step=7,node=1,kind=kill". Each fires once in the life of a run."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from optimus_compiler.runtime.files import HashingWriter
from optimus_compiler.runtime.resilience import beacon

FaultKind = Literal["kill", "stop", "hang", "nan", "nan-all", "slow", "exit", "oom", "diskfull"]
SLOW_SECONDS = 0.5  # longer each step


class InjectionError(ValueError):
    """A specification that means nothing; the message says which part."""


@dataclass(frozen=True)
class Injection:
    """A fault at the start of a step (counted from 1) on a node: in its first rank, unless a global rank is given.

    node None: wherever the rank runs.
    """

    step: int
    node: str | None
    kind: FaultKind
    rank: int | None = None

    @staticmethod
    def parse(text: str) -> Injection:
        """Reads "step=7,node=1,kind=hang[,rank=3]"; a number for a node is that of nodeN."""
        fields = dict(part.partition("=")[::2] for part in text.replace(" ", "").split(","))
        if unknown := fields.keys() - {"step", "node", "kind", "rank"}:
            raise InjectionError(f"--inject {text!r}: there is no {min(unknown)!r}: write step=7,node=1,kind=kill")
        kinds = get_args(FaultKind)
        if fields.get("kind") not in kinds:
            raise InjectionError(f"--inject {text!r}: kind must be one of {', '.join(kinds)}")
        if not (fields.get("step", "").isdecimal() and int(fields["step"]) > 0):
            raise InjectionError(f"--inject {text!r}: step must be a number from 1 on")
        if not fields.get("rank", "0").isdecimal():
            raise InjectionError(f"--inject {text!r}: rank must be a number from 0 on")
        node = fields.get("node", None if "rank" in fields else "0")
        return Injection(
            int(fields["step"]),
            f"node{node}" if node is not None and node.isdecimal() else node,
            fields["kind"],  # type: ignore[arg-type]
            int(fields["rank"]) if "rank" in fields else None,
        )


class Faults:
    """The injections that concern this process; `strike` is called before each step."""

    def __init__(self, specifications: Sequence[str], run: Path, *, node: str, rank: int, local_rank: int) -> None:
        self._run = run
        self._slow = False
        self._ours: dict[int, Injection] = {}  # by their number
        for number, text in enumerate(specifications):
            injection = Injection.parse(text)
            is_rank = local_rank == 0 if injection.rank is None else rank == injection.rank
            if (is_rank and injection.node in (node, None)) or injection.kind == "nan-all":
                self._ours[number] = injection

    @staticmethod
    def of_this_process(run: Path, rank: int) -> Faults:
        """Those that the supervisor has passed on; none without one."""
        return Faults(
            json.loads(os.environ.get(beacon.INJECT, "[]")),
            run,
            node=os.environ.get(beacon.NODE, ""),
            rank=rank,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        )

    def strike(self, step: int, weights: Sequence[torch.Tensor]) -> None:
        """What is due at a step happens. weights: this rank's, which "nan" spoils."""
        for number, injection in self._ours.items():
            if injection.step == step and self._is_first_time(number, injection):
                self._happen(injection.kind, weights)
        if self._slow:
            time.sleep(SLOW_SECONDS)

    def _is_first_time(self, number: int, injection: Injection) -> bool:
        """Whether this start of the run is the first to come here; it is on the disk before anything happens."""
        suffix = f"-{os.environ.get('RANK', '0')}" if injection.kind == "nan-all" else ""
        try:
            os.close(os.open(self._run / f".injected-{number}{suffix}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _happen(self, kind: FaultKind, weights: Sequence[torch.Tensor]) -> None:
        match kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                while True:
                    time.sleep(60)
            case "nan" | "nan-all":
                for weight in weights:
                    weight.fill_(torch.nan)
            case "slow":
                self._slow = True
            case "exit":
                os._exit(3)
            case "oom":
                raise MemoryError("out of memory (injected)")
            case "diskfull":
                HashingWriter.write = _full  # type: ignore[method-assign, assignment]


def _full(writer: HashingWriter, data: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
