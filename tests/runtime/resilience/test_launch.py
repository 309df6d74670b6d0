"""`optimus launch` with local nodes: faults of every kind, the right node named, the same end as without them."""

import json
import random
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.runtime.resilience.conftest import EVERY, Launch, Undisturbed, numbers

DP6 = "mesh.dp=6"


def injected(*faults: str) -> list[str]:
    return [word for fault in faults for word in ("--inject", fault)]


def assert_no_step_lost_beyond_the_interval(run: Path) -> None:
    lines = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    for before, after in pairwise(lines):
        assert after == before + 1 or 0 <= before - after < EVERY, lines


TOLD = {"kill": "hard", "exit": "hard", "oom": "hard", "stop": "hang", "hang": "hang", "nan": "soft"}


def expected(faults: list[tuple[int, int, str]], per_node: int) -> list[tuple[str, str, str]]:
    """Of (step, rank, kind): what is told, if each node that is blamed gives way to the next spare."""
    active, told = ["node0", "node1", "node2"], []
    for number, (_, rank, kind) in enumerate(faults):
        node, spare = active[rank // per_node], f"node{3 + number}"
        told.append((TOLD[kind], node, f"{node} replaced by {spare}"))
        active[rank // per_node] = spare
    return told


@pytest.mark.parametrize(
    ("per_node", "kinds"),
    [
        (1, ["kill", "stop", "nan"]),  # one that ends, one that hangs, one that computes wrong
        pytest.param(1, ["kill", "stop", "nan", "exit", "oom"], marks=pytest.mark.slow),
        pytest.param(2, ["kill", "stop", "nan", "exit", "oom"], marks=pytest.mark.slow),
    ],
)
def test_faults_of_every_kind_one_after_the_other(
    launch: Launch, undisturbed: Undisturbed, per_node: int, kinds: list[str]
) -> None:
    """Each rank's node is named and replaced; the end is bit by bit that of the undisturbed run."""
    layout = f"mesh.dp={3 * per_node}"
    last = 3 * per_node - 1
    faults = list(zip((3, 5, 7, 9, 11), (1, 0, last, 2, 1), kinds, strict=False))
    launch.overrides = (layout,)
    injections = injected(*(f"step={step},rank={rank},kind={kind}" for step, rank, kind in faults))
    code, out = launch.wait(*injections, spares=5, per_node=per_node)
    assert code == 0, out
    assert launch.told == expected(faults, per_node)
    assert [each["step"] for each in launch.incidents] == [step - 1 for step, _, _ in faults]
    assert [each["rank"] for each in launch.incidents] == [rank for _, rank, _ in faults]
    assert "SIGKILL" in launch.incidents[0]["evidence"][0]
    assert numbers(launch.metrics) == numbers(undisturbed.metrics(layout, per_node=per_node))
    assert_no_step_lost_beyond_the_interval(launch.run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "told", "words"),
    [
        ("hang", "hang", "time.sleep(60)"),
        ("exit", "hard", "exit code 3"),
        ("oom", "hard", "MemoryError"),
        ("diskfull", "hard", "could not write"),
    ],
)
def test_a_fault(launch: Launch, undisturbed: Undisturbed, kind: str, told: str, words: str) -> None:
    code, out = launch.wait(*injected(f"step=6,node=2,kind={kind}"))
    assert code == 0, out
    assert launch.told == [(told, "node2", "node2 replaced by node3")]
    assert words in launch.incidents[0]["evidence"][0]
    assert numbers(launch.metrics) == numbers(undisturbed.metrics(DP6))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("mesh.ep=2", "mesh.dp=2"), ("mesh.pp=2", "mesh.dp=2")])
@pytest.mark.parametrize("node", [0, 1])
def test_a_nan_is_traced_through_the_mesh(launch: Launch, layout: tuple[str, ...], node: int) -> None:
    launch.overrides = (*layout, "train.global_batch_size=8", "train.steps=8", "optimizer.decay_steps=8")
    code, out = launch.wait(*injected(f"step=6,node={node},kind=nan"), nodes=2, spares=1)
    assert code == 0, out
    assert launch.told == [("soft", f"node{node}", f"node{node} replaced by node2")]


def test_spares_run_out(launch: Launch) -> None:
    launch.overrides = ("mesh.dp=2",)
    code, out = launch.wait(*injected("step=2,node=1,kind=exit"), nodes=2, spares=0, per_node=1)
    assert code == 1
    assert "no spare node is left for node1" in out
    assert launch.told == [("hard", "node1", "stopped")]


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_divergence_takes_no_spare(launch: Launch, stages: int) -> None:
    launch.overrides = (f"mesh.pp={stages}", "mesh.dp=2", "train.global_batch_size=8")
    code, out = launch.wait(*injected("step=2,node=0,kind=nan-all"), nodes=2, spares=1, per_node=stages)
    assert code == 1
    assert "the run diverges" in out
    assert launch.told == [("divergence", None, "stopped")]


@pytest.mark.slow
def test_a_diverging_run_goes_back_and_passes_over_the_data(launch: Launch) -> None:
    launch.overrides = (DP6, "checkpoint.persistent_every=2", "resilience.on_divergence=rollback")
    code, out = launch.wait(*injected("step=6,node=0,kind=nan-all"), spares=0)
    assert code == 0, out
    assert launch.told == [("divergence", None, "back to model-4, past the data of 2 steps")]
    assert launch.metrics[-1].step == 14


@pytest.mark.slow
def test_two_faults_at_once(launch: Launch, undisturbed: Undisturbed) -> None:
    code, out = launch.wait(*injected("step=6,node=0,kind=kill", "step=6,node=2,kind=kill"))
    assert code == 0, out
    assert {(kind, node) for kind, node, _ in launch.told} == {("hard", "node0"), ("hard", "node2")}
    assert numbers(launch.metrics) == numbers(undisturbed.metrics(DP6))


@pytest.mark.slow
def test_a_fault_during_start_up(launch: Launch, undisturbed: Undisturbed) -> None:
    code, out = launch.wait(*injected("step=1,node=1,kind=kill"))
    assert code == 0, out
    assert launch.told == [("hard", "node1", "node1 replaced by node3")]
    assert numbers(launch.metrics) == numbers(undisturbed.metrics(DP6))


@pytest.mark.slow
def test_a_straggler_is_reported_and_stays(launch: Launch) -> None:
    launch.overrides = (DP6, "train.steps=50", "optimizer.decay_steps=50", "checkpoint.every=50")
    code, out = launch.wait(*injected("step=3,node=1,kind=slow"))
    assert code == 0, out
    assert launch.told == [("slow", "node1", "none")]
    assert launch.incidents[0]["rank"] == 2


def test_a_mistake_of_the_user_is_no_failure(launch: Launch) -> None:
    launch.overrides = ("mesh.dp=5",)
    code, out = launch.wait(nodes=1, spares=1)
    assert code == 2
    assert "global_batch_size = 6 is not a multiple" in out or "the mesh pp=1 x dp=5" in out
    assert launch.incidents == []


def test_nothing_outlives_a_killed_supervisor_and_the_same_command_goes_on(
    launch: Launch, undisturbed: Undisturbed
) -> None:
    launch.overrides = ("mesh.dp=3",)
    process = launch.start(*injected("step=6,node=0,kind=slow"), spares=0, per_node=1)
    launch.reach(5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 5
    while launch.left_over() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert launch.left_over() == []
    code, out = launch.wait(spares=0, per_node=1)
    assert code == 0
    assert "continuing after step 4" in out
    assert "step 1/14" not in out
    assert sorted(path.name for path in (launch.run / "logs").iterdir()) == ["attempt-0", "attempt-1"]
    assert numbers(launch.metrics) == numbers(undisturbed.metrics("mesh.dp=3", per_node=1))


@pytest.mark.slow
def test_sigterm_saves_and_ends(launch: Launch, undisturbed: Undisturbed) -> None:
    process = launch.start(spares=1)
    launch.reach(5)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert "stopped by SIGTERM after step" in out
    assert launch.incidents == []
    assert launch.wait(spares=0)[0] == 0
    assert numbers(launch.metrics) == numbers(undisturbed.metrics(DP6))


@pytest.mark.slow
def test_soak(launch: Launch) -> None:
    """Fifty random faults: each rank's node is named, and no step is lost beyond the interval."""
    chance = random.Random(3)
    faults = [
        (3 + 4 * i, chance.randrange(6), chance.choice(["kill", "stop", "nan", "exit", "oom"])) for i in range(50)
    ]
    launch.overrides = (DP6, "train.steps=205", "optimizer.decay_steps=205")
    process = launch.start(
        *injected(*(f"step={step},rank={rank},kind={kind}" for step, rank, kind in faults)), spares=50
    )
    out, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, out
    assert launch.told == expected(faults, 2)
    assert_no_step_lost_beyond_the_interval(launch.run)
    assert launch.metrics[-1].step == 205


@pytest.mark.slow
def test_a_fault_during_a_save(launch: Launch, undisturbed: Undisturbed) -> None:
    """The process dies within the writing of step 4's checkpoint: the run starts again from what is whole."""
    launch.overrides = (DP6, "checkpoint.async=true", "checkpoint.every=1")
    code, out = launch.wait(*injected("step=5,node=1,kind=kill", "step=9,node=0,kind=kill"))
    assert code == 0, out
    assert [(kind, node) for kind, node, _ in launch.told] == [("hard", "node1"), ("hard", "node0")]
    assert numbers(launch.metrics) == numbers(undisturbed.metrics(DP6))
