"""Peak of activation memory: every choice of checkpointing, and the schedules of a pipeline; measured and estimated.

python -m pytest bench/test_activation_memory.py -s
"""

from collections.abc import Iterator
from itertools import chain, combinations
from typing import Any

import pytest
import torch

import optimus_compiler as optimus
from optimus_compiler.activation_memory import activation_bytes
from optimus_compiler.models import build, from_name
from tests.peak_memory import peak_of
from tests.ranks import Ranks

SIZES = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 256, "num_experts": 16, "num_hidden_layers": 6,
         "num_attention_heads": 8}  # fmt: skip
LENGTH = 1024
BLOCKS = ("norm", "attention", "moe")
CHOICES = list(chain.from_iterable(combinations(BLOCKS, size) for size in range(4)))
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved-1f1b": 2}


@pytest.fixture
def two_ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.stop()


def measure(sizes: dict[str, int], micro_batch_size: int, **options: Any) -> tuple[int, int]:
    """Measured and estimated bytes of the second step on this rank."""
    mesh = optimus.Mesh(**sizes)  # type: ignore[arg-type]
    count = options.get("micro_batches", 1)
    compiled = optimus.compile(
        build(from_name("olmoe-tiny", **SIZES)), mesh, sequence_length=LENGTH, micro_batch_size=micro_batch_size,
        backend="aot_eager", **options,
    )  # fmt: skip
    ids = torch.randint(0, SIZES["vocab_size"], (count * micro_batch_size, LENGTH))
    compiled.train_step(ids, ids.clone())
    measured = peak_of(lambda: compiled.train_step(ids, ids.clone()))
    return measured, sum(activation_bytes(compiled.program, stage) for stage in compiled.program.stages_here())


def row(name: str, measured: int, estimated: int) -> str:
    return f"{name:34}{measured / 2**20:12.0f}{estimated / 2**20:12.0f}{estimated / measured:10.2f}"


def test_checkpointing() -> None:
    print(f"\n{'recomputed':34}{'MiB':>12}{'estimate':>12}{'ratio':>10}")
    for blocks in CHOICES:
        measured, estimated = measure({}, 4, activation_checkpointing=blocks)
        print(row(" + ".join(blocks) or "nothing", measured, estimated), flush=True)


def test_schedules(two_ranks: Ranks) -> None:
    print(f"\n{'8 micro-batches, pp=2':34}{'MiB':>12}{'estimate':>12}{'ratio':>10}")
    for schedule, virtual_stages in SCHEDULES.items():
        for rank, (measured, estimated) in enumerate(two_ranks.run(2, one_schedule, schedule, virtual_stages)):
            print(row(f"{schedule}, rank {rank}", measured, estimated), flush=True)


def one_schedule(schedule: str, virtual_stages: int) -> tuple[int, int]:
    return measure({"pp": 2}, 4, schedule=schedule, virtual_stages=virtual_stages, micro_batches=8)
