"""`optimus launch` on the tiny run, as a process."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from optimus_compiler.runtime.metrics import StepMetrics, read_metrics
from optimus_compiler.runtime.resilience.incidents import read_incidents

EVERY = 4  # steps between checkpoints
SETTINGS = (
    f"checkpoint.every={EVERY}", "train.micro_batch_size=1", "train.global_batch_size=6", "train.steps=14",
    "model.overrides.num_hidden_layers=1", "resilience.heartbeat_timeout=3", "optimizer.decay_steps=14",
    "optimizer.warmup_steps=2",
)  # fmt: skip


@dataclass
class Launch:
    """Starts `optimus launch` on the tiny run, by default on 3 nodes of 2 processes with 2 spares."""

    tiny: Path
    run: Path
    overrides: tuple[str, ...] = ("mesh.dp=6",)
    environment: dict[str, str] = field(default_factory=dict)
    prefix: list[str] = field(default_factory=list)  # what the command runs under
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *flags: str, nodes: int = 3, spares: int = 2, per_node: int = 2) -> subprocess.Popen[str]:
        settings = (f"data.path={self.tiny / 'data'}", *SETTINGS, *self.overrides)
        command = [*self.prefix, sys.executable, "-m", "optimus_compiler", "launch", str(self.tiny / "tiny.toml")]
        command += ["--output", str(self.run), "--nodes", str(nodes), "--spares", str(spares)]
        command += ["--procs-per-node", str(per_node)]
        command += [word for setting in settings for word in ("--set", setting)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment}
        process = subprocess.Popen(
            [*command, *flags], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.started.append(process)
        return process

    def wait(self, *flags: str, **sizes: int) -> tuple[int, str]:
        """Exit code and what was printed; nothing may be left running."""
        process = self.start(*flags, **sizes)
        out, _ = process.communicate(timeout=300)
        assert self.left_over() == []
        return process.returncode, out

    @property
    def incidents(self) -> list[dict[str, Any]]:
        return read_incidents(self.run)

    @property
    def told(self) -> list[tuple[str, str | None, str]]:
        """Kind, node and action of each incident."""
        return [(each["kind"], each["node"], each["action"]) for each in self.incidents]

    @property
    def metrics(self) -> list[StepMetrics]:
        return read_metrics(self.run)

    def left_over(self) -> list[int]:
        """Processes of this run that still live, its supervisor apart."""
        found = []
        for process in Path("/proc").iterdir():
            try:
                if process.name.isdigit() and str(self.run).encode() in (process / "cmdline").read_bytes():
                    found.append(int(process.name))
            except OSError:
                pass
        return [pid for pid in found if pid not in {p.pid for p in self.started if p.poll() is None}]

    def reach(self, step: int) -> None:
        """Waits until metrics tell of a step."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            path = self.run / "metrics.jsonl"
            if path.exists() and any(json.loads(line)["step"] >= step for line in path.read_text().splitlines()):
                return
            time.sleep(0.05)
        raise AssertionError(f"the run did not reach step {step}")


@pytest.fixture
def launch(tiny: Path, tmp_path: Path) -> Iterator[Launch]:
    launched = Launch(tiny, tmp_path / "run")
    yield launched
    for process in launched.started:
        process.kill()


@pytest.fixture(scope="session")
def undisturbed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> "Undisturbed":
    return Undisturbed(tiny, tmp_path_factory)


class Undisturbed:
    """The metrics of a run without a fault, by its settings and its nodes."""

    def __init__(self, tiny: Path, folders: pytest.TempPathFactory) -> None:
        self._tiny, self._folders = tiny, folders
        self._seen: dict[tuple[object, ...], list[StepMetrics]] = {}

    def metrics(self, *overrides: str, nodes: int = 3, per_node: int = 2) -> list[StepMetrics]:
        key = (*overrides, nodes, per_node)
        if key not in self._seen:
            one = Launch(self._tiny, self._folders.mktemp("undisturbed") / "run", overrides)
            code, out = one.wait(nodes=nodes, spares=0, per_node=per_node)
            assert code == 0, out
            self._seen[key] = one.metrics
        return self._seen[key]


def numbers(metrics: list[StepMetrics]) -> list[tuple[float, ...]]:
    """What must be equal bit by bit."""
    return [(m.step, m.loss, m.grad_norm, m.lr) for m in metrics]
