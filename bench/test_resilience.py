"""What supervision costs: a step with and without finiteness watched and beats sent; and the way back after a kill.

python -m pytest bench/test_resilience.py -s
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist

import optimus_compiler as optimus
from optimus_compiler.models import build, from_name
from optimus_compiler.runtime.resilience import beacon
from tests.ranks import Ranks
from tests.tiny_run import write_config, write_data

SIZES = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 256, "num_experts": 16, "num_hidden_layers": 4}
LENGTH, ROUNDS = 512, 25


@pytest.fixture
def pool() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.stop()


def measure() -> dict[str, float]:
    """Median seconds of a step, and the median ratios of the watched, and the beating, to the plain one."""
    mesh = optimus.Mesh(ep=2)
    ids = torch.randint(0, 8192, (2, LENGTH))
    models = {}
    for watch in (False, True):
        model = build(from_name("olmoe-tiny", **SIZES))
        models[watch] = optimus.compile(
            model, mesh, sequence_length=LENGTH, micro_batch_size=2, backend="aot_eager", seed=0, watch_finite=watch
        )

    def seconds(watch: bool) -> float:
        compiled = models[watch]
        dist.barrier()
        started = time.perf_counter()
        compiled.train_step(ids, ids.clone()).loss.item()
        compiled.zero_grad()
        return time.perf_counter() - started

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    os.environ |= {beacon.ADDRESS: f"127.0.0.1:{store.port}", beacon.ATTEMPT: "0"}
    times: dict[str, list[float]] = {"plain": [], "watched": [], "beating": []}
    for number in range(ROUNDS + 1):
        order = ["plain", "watched", "beating"]
        for name in order[number % 3 :] + order[: number % 3]:
            if name == "beating":
                with beacon.Beacon() as beats:
                    beats.finished(number, 1.0)
                    times[name].append(seconds(False))
            else:
                times[name].append(seconds(name == "watched"))
    plain = times["plain"][1:]
    ratios = {name: median(t / p for t, p in zip(times[name][1:], plain, strict=True)) for name in times}
    return {"seconds": median(plain), **ratios}


def test_cost_of_a_step(pool: Ranks) -> None:
    found = pool.run(2, measure, seconds=900)[0]
    print(f"\nep=2 on two processes, a step of {found['seconds']:.2f} s, medians of {ROUNDS} interleaved rounds")
    print(f"finiteness watched: {found['watched']:.3f} times the plain step; with beats: {found['beating']:.3f}")


def seconds_to_the_next_step(command: list[str], run: Path) -> float:
    """From kill -9 of a rank, of which RUN/.injected-0 tells when, until a step is finished again."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    marker = run / ".injected-0"
    while not marker.exists():
        time.sleep(0.005)
    killed = marker.stat().st_mtime
    time.sleep(0.1)
    before = lines(run)
    while lines(run) <= before:
        time.sleep(0.005)
    seconds = time.time() - killed
    process.terminate()
    process.wait()
    return seconds


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_way_back(tmp_path: Path) -> None:
    data = write_data(tmp_path)
    config = write_config(tmp_path)
    settings = [f"data.path={data}", "train.steps=4000", "checkpoint.every=2", "mesh.dp=2"]
    overrides = [word for setting in settings for word in ("--set", setting)]
    python = [sys.executable, "-m"]
    fault = "step=7,rank=1,kind=kill"
    starts = {
        "optimus launch": lambda run: [*python, "optimus_compiler", "launch", str(config), "--output", str(run),
                                       "--procs-per-node", "2", "--spares", "1", "--inject", fault, *overrides],
        "torchrun": lambda run: [*python, "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                                 "--max-restarts", "9", "-m", "optimus_compiler", "pretrain", str(config), "--output",
                                 str(run), *overrides],
    }  # fmt: skip
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    os.environ[beacon.INJECT] = json.dumps([fault])  # for torchrun
    times: dict[str, list[float]] = {name: [] for name in starts}
    for number in range(3):
        for name, command in starts.items():
            run = tmp_path / f"{name.replace(' ', '-')}-{number}"
            times[name].append(seconds_to_the_next_step(command(run), run))
    print("\nfrom kill -9 of a rank to the next step, two processes, tiny model (seconds, three times)")
    for name, found in times.items():
        print(f"{name:16} {'  '.join(f'{each:.1f}' for each in found)}   median {median(found):.1f}")
