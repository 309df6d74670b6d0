"""The most memory a step takes: allocated (torch's profiler) and resident (a process of its own), ours beside HF's.

python -m pytest bench/test_memory.py -s
The block's figures are above weights and gradients, which all variants hold alike; the step's are everything.
"""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.blocks import LoopBlock, OurBlock, Shape, hf_block, training_step
from bench.test_step import BATCH, LENGTH, VOCABULARY, hf_model, hf_step, our_step
from tests.peak_memory import peak_of

MIB = 2**20
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
def test_block_memory(dtype: torch.dtype, benchmark: Any, publish: Callable[..., None]) -> None:
    rows = benchmark.pedantic(block_rows, args=(dtype,))
    short = str(dtype).removeprefix("torch.")
    publish(
        f"block-memory-{short}",
        f"Peak memory of the block's forward + backward above weights and gradients, {short}",
        ["shape", "ours MiB", "HF grouped_mm MiB", "v4 loop MiB"],
        rows,
    )
    for _, ours, grouped, _ in rows:
        assert float(ours) < float(grouped)


def block_rows(dtype: torch.dtype) -> list[list[str]]:
    rows = []
    for shape in (Shape(1024, 512, 256), Shape(4096, 512, 256), Shape(512, 2048, 1024)):
        x, dout = (torch.randn(1, shape.tokens, shape.hidden).to(dtype) for _ in range(2))
        blocks = {
            "ours": OurBlock(hf_block(shape, dtype, "eager")),
            "grouped": hf_block(shape, dtype, "grouped_mm"),
            "loop": LoopBlock(hf_block(shape, dtype, "eager")),
        }
        row = [str(shape)]
        for block in blocks.values():
            step = training_step(block, x, dout)
            step()
            row.append(f"{peak_of(step) / MIB:.0f}")
        rows.append(row)
    return rows


@DTYPES
def test_step_memory(dtype: torch.dtype, benchmark: Any, publish: Callable[..., None]) -> None:
    rows = benchmark.pedantic(lambda: [in_a_process(name, dtype) for name in ("ours", "HF grouped_mm", "HF eager")])
    short = str(dtype).removeprefix("torch.")
    publish(
        f"step-memory-{short}",
        f"Peak memory of a training step with AdamW, 4 layers, 4 x 512 tokens, {short}",
        ["variant", "allocated MiB (step)", "resident MiB (process)"],
        [[name, f"{allocated / MIB:.0f}", f"{resident / MIB:.0f}"] for name, allocated, resident in rows],
    )
    assert rows[0][1] < rows[1][1]


def in_a_process(name: str, dtype: torch.dtype) -> tuple[str, int, int]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(step_memory, (name, dtype))


def step_memory(name: str, dtype: torch.dtype) -> tuple[str, int, int]:
    """(name, bytes a step allocates at most above what is there between steps, the process's largest resident set)."""
    torch.set_num_threads(1)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    if name == "ours":
        step = our_step(hf_model(dtype, "grouped_mm"), ids, sharded=False)
    else:
        step = hf_step(hf_model(dtype, name.removeprefix("HF ")), ids)
    for _ in range(2):
        step()
    resident = most_resident()  # the profiler takes memory of its own
    return name, peak_of(step), resident


def most_resident() -> int:
    """This process's largest resident set in bytes; getrusage would count what its parent had when it was started."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
