"""`optimus launch` with local nodes: faults of every kind, the right node named, the same end as without them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
    """Starts `optimus launch` on the tiny run."""

    tiny: Path
    run: Path
    overrides: tuple[str, ...] = ("mesh.dp=6",)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *flags: str, nodes: int = 3, spares: int = 2, per_node: int = 2) -> subprocess.Popen[str]:
        settings = (f"data.path={self.tiny / 'data'}", *SETTINGS, *self.overrides)
        command = [sys.executable, "-m", "optimus_compiler", "launch", str(self.tiny / "tiny.toml")]
        command += ["--output", str(self.run), "--nodes", str(nodes), "--spares", str(spares)]
        command += ["--procs-per-node", str(per_node)]
        command += [word for setting in settings for word in ("--set", setting)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [*command, *flags], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.started.append(process)
        return process

    def wait(self, *flags: str, **sizes: int) -> tuple[int, str]:
        """Exit code and what was printed."""
        process = self.start(*flags, **sizes)
        out, _ = process.communicate(timeout=240)
        assert self.left_over() == []
        return process.returncode, out

    @property
    def incidents(self) -> list[dict[str, Any]]:
        return read_incidents(self.run)

    @property
    def metrics(self) -> list[StepMetrics]:
        return read_metrics(self.run)

    def left_over(self) -> list[int]:
        """Processes of this run that still live."""
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


@pytest.fixture(scope="module")
def undisturbed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[StepMetrics]]:
    """The metrics of the same run without a fault."""
    seen: dict[tuple[str, ...], list[StepMetrics]] = {}

    def metrics(*overrides: str) -> list[StepMetrics]:
        if overrides not in seen:
            one = Launch(tiny, tmp_path_factory.mktemp("undisturbed") / "run", overrides)
            code, out = one.wait(nodes=3, spares=0)
            assert code == 0, out
            seen[overrides] = one.metrics
        return seen[overrides]

    return metrics


def numbers(metrics: list[StepMetrics]) -> list[tuple[float, ...]]:
    return [(m.step, m.loss, m.grad_norm, m.lr) for m in metrics]


def assert_no_step_lost_beyond_the_interval(run: Path) -> None:
    lines = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    for before, after in zip(lines, lines[1:], strict=False):
        assert after == before + 1 or 0 <= before - after < EVERY, lines


def test_faults_of_every_kind_one_after_the_other(
    launch: Launch, undisturbed: Callable[..., list[StepMetrics]]
) -> None:
    """kill -9, a stopped process, a NaN, an exit: each on another node, and one spare too few for a fifth."""
    faults = ["step=3,node=1,kind=kill", "step=6,node=0,kind=stop", "step=9,node=3,kind=nan,rank=3"]
    code, out = launch.wait(*(word for fault in faults for word in ("--inject", fault)), spares=3)
    assert code == 0, out
    told = [(each["kind"], each["node"], each["action"]) for each in launch.incidents]
    assert told == [
        ("hard", "node1", "node1 replaced by node3"),
        ("hang", "node0", "node0 replaced by node4"),
        ("soft", "node3", "node3 replaced by node5"),
    ]
    assert [each["step"] for each in launch.incidents] == [2, 5, 8]
    assert launch.incidents[0]["rank"] == 2
    assert "SIGKILL" in launch.incidents[0]["evidence"][0]
    assert numbers(launch.metrics) == numbers(undisturbed("mesh.dp=6"))  # bit by bit
    assert_no_step_lost_beyond_the_interval(launch.run)


def test_spares_run_out(launch: Launch) -> None:
    code, out = launch.wait("--inject", "step=2,node=1,kind=exit", spares=0)
    assert code == 1
    assert "no spare node is left for node1" in out
    assert [(each["kind"], each["node"], each["action"]) for each in launch.incidents] == [("hard", "node1", "stopped")]


def test_divergence_takes_no_spare(launch: Launch) -> None:
    code, out = launch.wait("--inject", "step=2,node=0,kind=nan-all", spares=1)
    assert code == 1
    assert "the run diverges" in out
    assert [(each["kind"], each["node"], each["action"]) for each in launch.incidents] == [
        ("divergence", None, "stopped")
    ]


def test_a_mistake_of_the_user_is_no_failure(launch: Launch) -> None:
    launch.overrides = ("mesh.dp=5",)
    code, out = launch.wait(spares=1)
    assert code == 2
    assert "mesh pp=1 x dp=5" in out or "global_batch_size" in out
    assert launch.incidents == []


def test_nothing_outlives_a_killed_supervisor_and_the_same_command_goes_on(
    launch: Launch, undisturbed: Callable[..., list[StepMetrics]]
) -> None:
    process = launch.start(spares=0)
    launch.reach(5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 5
    while launch.left_over() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert launch.left_over() == []
    code, out = launch.wait(spares=0)
    assert code == 0
    assert "continuing after step 4" in out
    assert numbers(launch.metrics) == numbers(undisturbed("mesh.dp=6"))
