"""Training runs of several ranks: the curve of one process, who writes, uniform refusals, the trace of a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from optimus_compiler.config import load_config
from optimus_compiler.runtime.metrics import METRICS, read_evaluations, read_metrics
from optimus_compiler.runtime.run import open_run
from optimus_compiler.runtime.trainer import train
from tests.ranks import Ranks
from tests.task_wheel import installed, write_wheel
from tests.tiny_run import write_config, write_data


def run_training(folder: Path, output: Path, overrides: list[str], profile: bool = False) -> int:
    """One rank of a run; how many steps it was shown."""
    shown: list[Any] = []
    run = open_run(load_config(folder / "tiny.toml", [f"data.path={folder / 'data'}", *overrides]), output)
    train(run, shown.append, profile=profile)
    return len(shown)


def run_evaluated(folder: Path, output: Path, overrides: list[str], wheel: Path) -> int:
    with installed(wheel):
        return run_training(folder, output, overrides)


def test_meshes_reproduce_the_curve_of_one_process(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    common = ["train.steps=6", "train.global_batch_size=8", "data.document_mask=true"]
    wheel = write_wheel(tmp_path / "wheel")
    held_out = write_data(tmp_path, "def g(y):\n    return y * 7\n" * 30)
    common += [f"data.validation_path={held_out}", "eval.every=4", 'eval.tasks=["arc_easy", "winogrande"]']
    curves = {}
    for name, world, mesh in [
        ("one", 1, []),
        ("both", 4, ["mesh.dp=2", "mesh.ep=2", "optimizer.zero=2"]),
        ("pp", 4, ["mesh.pp=2", "mesh.ep=2", 'activation_checkpointing.blocks=["moe"]']),
        ("tp", 4, ["mesh.tp=2", "mesh.dp=2", "mesh.sequence_parallel=true"]),
    ]:
        shown = ranks.run(world, run_evaluated, tiny, tmp_path / name, common + mesh, wheel)
        assert shown == [6] + [0] * (world - 1)
        curves[name] = read_metrics(tmp_path / name)
    for name, curve in curves.items():
        for found, alone in zip(curve, curves["one"], strict=True):
            for key in ("loss", "ce_loss", "aux_loss", "grad_norm", "expert_load_max_over_mean"):
                assert getattr(found, key) == pytest.approx(getattr(alone, key), rel=1e-4), (name, found.step, key)
            assert (found.tokens, found.lr) == (alone.tokens, alone.lr)
    wanted = read_evaluations(tmp_path / "one")
    assert [evaluation.step for evaluation in wanted] == [4, 6]
    for name in curves:
        for evaluation, alone_evaluation in zip(read_evaluations(tmp_path / name), wanted, strict=True):
            assert evaluation.validation_loss == pytest.approx(alone_evaluation.validation_loss, rel=1e-5), name
            assert evaluation.tasks == alone_evaluation.tasks
            assert set(evaluation.tasks) == {"arc_easy", "winogrande", "average"}


def refusals(folder: Path, output: Path, overrides: list[str]) -> str:
    """What this rank says when the run cannot start."""
    try:
        run_training(folder, output, overrides)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mesh.dp=3"], "the mesh pp=1 x dp=3 x ep=1 x tp=1 needs 3 processes and this job has 2"),
        (["mesh.ep=2", "train.global_batch_size=6"], "global_batch_size = 6 is not a multiple of micro_batch_size"),
        (["mesh.ep=2", "model.overrides.num_experts=3"], "mesh.ep = 2 does not divide the model's 3 experts"),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(
    ranks: Ranks, tiny: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    said = ranks.run(2, refusals, tiny, tmp_path / "run", overrides)
    assert all(message in each for each in said), said
    assert not (tmp_path / "run" / METRICS).exists()


def test_damage_that_one_rank_finds_stops_all(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank checks some of the shards: nobody may wait for the one that gave up."""
    write_data(tmp_path)
    write_config(tmp_path)
    shard = next((tmp_path / "data").glob("shard-*.npy"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    said = ranks.run(2, refusals, tmp_path, tmp_path / "run", ["mesh.dp=2"])
    assert sum(shard.name in each for each in said) == 1
    assert sum("rank 0 failed" in each for each in said) == 1


def test_torchrun_starts_the_command(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["optimus_compiler", "pretrain", str(tiny / "tiny.toml"), "--output", str(tmp_path / "run")]
    command += ["--set", f"data.path={tiny / 'data'}", "--set", "mesh.ep=2", "--set", "train.steps=3"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("3 steps done") == 1
    assert [metrics.step for metrics in read_metrics(tmp_path / "run")] == [1, 2, 3]


# the trace of a step

LAYERS = 6
LARGER = [
    "model.overrides.hidden_size=64",
    "model.overrides.intermediate_size=64",
    f"model.overrides.num_hidden_layers={LAYERS}",
    "train.steps=3",
    "train.micro_batch_size=128",
    "train.global_batch_size=512",
    "train.backend=aot_eager",
    "mesh.dp=2",
]


def traced_events(ranks: Ranks, folder: Path, output: Path, rank: int) -> list[dict[str, Any]]:
    """The complete events of a rank's trace of step 3, two micro-batches, in order of time."""
    if not output.exists():
        ranks.run(2, run_training, folder, output, LARGER, True)
    trace = json.loads((output / f"trace-rank{rank}.json").read_text())
    return sorted((event for event in trace["traceEvents"] if event.get("ph") == "X"), key=lambda event: event["ts"])


@pytest.mark.parametrize("rank", [0, 1])
def test_reduction_starts_during_backward(ranks: Ranks, tiny: Path, traced: Path, rank: int) -> None:
    """The real trace: gradients travel while earlier layers are still in backward."""
    events = traced_events(ranks, tiny, traced, rank)
    first, backward = (event for event in events if event["name"] == "optimus::backward")
    starts = [event for event in events if event["name"].startswith("optimus::reduce ")]
    assert len(starts) == LAYERS + 1  # every layer (the first with the embedding), and the head
    assert starts[0]["ts"] > first["ts"] + first["dur"]  # nothing is reduced before the last micro-batch
    assert starts[0]["ts"] < backward["ts"] + backward["dur"] / 2
    assert starts[-1]["name"] == "optimus::reduce embed+layer0.float32"
    assert all(start["ts"] < backward["ts"] + backward["dur"] for start in starts)


@pytest.mark.slow  # it needs a machine that does nothing else
@pytest.mark.parametrize("rank", [0, 1])
def test_at_most_one_bucket_travels_after_backward(ranks: Ranks, tiny: Path, traced: Path, rank: int) -> None:
    """What is left to wait for after backward is no longer than the longest reduction of a bucket."""
    events = traced_events(ranks, tiny, traced, rank)
    _, backward = (event for event in events if event["name"] == "optimus::backward")
    end = backward["ts"] + backward["dur"]
    starts = [event for event in events if event["name"].startswith("optimus::reduce ")]
    # gloo runs each reduction as one operation on a thread of its own, in order
    sums = [e for e in events if e["name"] == "gloo:all_reduce" and e["ts"] > starts[0]["ts"]][: len(starts)]
    exposed = sum(max(0.0, e["ts"] + e["dur"] - max(e["ts"], end)) for e in sums)
    assert exposed <= max(e["dur"] for e in sums), [(e["ts"] - end, e["dur"]) for e in sums]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the traced run goes, which the first test that needs it makes."""
    return tmp_path_factory.mktemp("traced") / "run"
