"""Checkpoints at dp=2 x ep=2: how long training waits, in the background or not, and what each rank writes and reads.

python -m pytest bench/test_checkpoint.py -s
"""

import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist

import optimus_compiler as optimus
from optimus_compiler.config import CheckpointSection
from optimus_compiler.models import build, from_name
from optimus_compiler.runtime.checkpoint.contents import parameter_table
from optimus_compiler.runtime.checkpoint.find import find_newest
from optimus_compiler.runtime.checkpoint.folder import CheckpointFolder
from optimus_compiler.runtime.checkpoint.load import StoredTensors, load_masters, load_moments, load_weights
from optimus_compiler.runtime.checkpoint.saver import CheckpointSaver
from tests.ranks import Ranks
from tests.runtime.checkpoint.small_run import plain_manifest, progress

SIZES = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 256, "num_experts": 16, "num_hidden_layers": 4}
WAYS = {
    "in the step": {"async": False, "scattered": False},
    "in the step, scattered": {"async": False, "scattered": True},
    "in the background": {"async": True, "scattered": False},
    "in the background, scattered": {"async": True, "scattered": True},
}
ROUNDS = 7

Figures = dict[str, float]


@pytest.fixture
def four_ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.stop()


def measure(directory: Path) -> tuple[dict[str, Figures], Figures]:
    """For each way to save: seconds of waiting and of a save, bytes this rank writes; seconds to verify and to load."""
    mesh = optimus.Mesh(dp=2, ep=2)
    model = build(from_name("olmoe-tiny", **SIZES)).bfloat16()
    compiled = optimus.compile(model, mesh, sequence_length=64, backend="eager")
    optimizer = optimus.ShardedAdamW(compiled, lr=1e-4)
    describe = partial(plain_manifest, mesh=mesh.sizes(), parameters=parameter_table(compiled.program))
    savers = {
        name: CheckpointSaver(
            CheckpointFolder(directory / name.replace(" ", "-")),
            CheckpointSection.model_validate(settings),
            compiled,
            optimizer,
            describe,
            lambda sentence: None,
        )
        for name, settings in WAYS.items()
    }
    ids = torch.randint(0, 8192, (1, 64))
    stalls: dict[str, list[float]] = {name: [] for name in WAYS}
    totals: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(1, ROUNDS + 1):
        order = list(WAYS)[number % 4 :] + list(WAYS)[: number % 4]
        for name in order:
            dist.barrier()
            started = time.perf_counter()
            stalls[name].append(savers[name].save(["full"], progress(number)))
            compiled.train_step(ids, ids.clone())  # training goes on meanwhile
            optimizer.step()
            optimizer.zero_grad()
            savers[name].wait()
            dist.barrier()
            totals[name].append(time.perf_counter() - started)
    figures: dict[str, Figures] = {}
    for name in WAYS:
        found = find_newest(CheckpointFolder(directory / name.replace(" ", "-")), mesh, print)
        assert found is not None
        written = found.manifest.files[f"__{mesh.rank}_0.distcp"].bytes
        figures[name] = {"stall": median(stalls[name][1:]), "total": median(totals[name][1:]), "bytes": written}
    started = time.perf_counter()
    found = find_newest(CheckpointFolder(directory / "in-the-step"), mesh, print)
    verified = time.perf_counter() - started
    assert found is not None
    stored = StoredTensors(found.path)
    load_weights(compiled, stored, "broadcast")
    load_masters(compiled, optimizer, stored)
    load_moments(compiled, optimizer, stored)
    dist.barrier()
    return figures, {"verify": verified, "load": time.perf_counter() - started - verified}


def test_checkpoint(four_ranks: Ranks, tmp_path: Path, benchmark: Any, publish: Callable[..., None]) -> None:
    results = benchmark.pedantic(four_ranks.run, args=(4, measure, tmp_path), kwargs={"seconds": 900})
    total = sum(figures["in the step"]["bytes"] for figures, _ in results)
    rows = []
    for name in WAYS:
        ranks = [figures[name] for figures, _ in results]
        stall, seconds = (max(figures[key] for figures in ranks) for key in ("stall", "total"))
        written = " / ".join(f"{figures['bytes'] / 1e6:.1f}" for figures in ranks)
        rows.append([name, f"{stall:.3f}", f"{seconds:.2f}", written])
    verify, load = (max(times[key] for _, times in results) for key in ("verify", "load"))
    publish(
        "checkpoint",
        f"Full checkpoint of {total / 1e6:.0f} MB, bf16, dp=2 x ep=2, medians of {ROUNDS - 1} interleaved rounds; "
        f"verified in {verify:.2f} s, loaded in {load:.2f} s",
        ["save", "waits s", "save + step s", "MB written by rank 0 / 1 / 2 / 3"],
        rows,
    )
    shutil.rmtree(tmp_path)
