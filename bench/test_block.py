"""One forward + backward of the SparseMoE block: ours beside transformers', torchtitan's and their compiled forms.

python -m pytest bench/test_block.py -s            OMP_NUM_THREADS=2 python -m pytest bench/test_block.py -s -k 4096
"floor" is the nine bare matrix products of each expert's forward and backward at this routing's row counts; "peak" is
one large square product. Every variant keeps its gradients between rounds and adds to them.
"""

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from bench.blocks import (
    LoopBlock,
    OurBlock,
    Shape,
    bare_products,
    hf_block,
    square_product,
    torchtitan_block,
    training_step,
)

SMALL, LARGE, TRUE = Shape(1024, 512, 256), Shape(4096, 512, 256), Shape(512, 2048, 1024)
TINY = Shape(64, 512, 256)  # batched_mm copies an expert's weights for every row: 1 GiB already here
Step = Callable[[], object]


def peers(shape: Shape, dtype: torch.dtype, x: torch.Tensor, dout: torch.Tensor) -> dict[str, Step]:
    """The blocks that are run at this shape, by name."""
    blocks = {
        "HF grouped_mm": hf_block(shape, dtype, "grouped_mm"),
        "v4 loop": LoopBlock(hf_block(shape, dtype, "eager")),
    }
    if shape in (SMALL, TINY):
        blocks["HF eager"] = hf_block(shape, dtype, "eager")
    if shape == TINY:
        blocks["HF batched_mm"] = hf_block(shape, dtype, "batched_mm")
    if shape == SMALL:
        blocks |= {f"torch.compile({name})": torch.compile(block) for name, block in blocks.items()}
    if dtype == torch.bfloat16:  # torchtitan computes in bf16 only
        with suppress(ImportError):
            blocks["torchtitan"] = torchtitan_block(shape, hf_block(shape, dtype, "eager"))
    return {name: training_step(block, x, dout) for name, block in blocks.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [SMALL, LARGE, TRUE, TINY], ids=lambda s: f"{s.hidden}x{s.width}-{s.tokens}")
def test_block(
    shape: Shape, dtype: torch.dtype, threads: int, interleave: Callable[..., tuple], publish: Callable[..., None]
) -> None:
    generator = torch.Generator().manual_seed(1)
    x, dout = (torch.randn(1, shape.tokens, shape.hidden, generator=generator).to(dtype) for _ in range(2))
    ours = OurBlock(hf_block(shape, dtype, "eager"))
    square, square_flops = square_product(dtype)
    variants: dict[str, Step] = {
        "ours": training_step(ours, x, dout),
        "ours, register_experts": training_step(hf_block(shape, dtype, "optimus"), x, dout),
        "floor": bare_products(ours, x),
        **peers(shape, dtype, x, dout),
        "peak": square,
    }
    wall, cpu = interleave(variants, 9)

    spent = cpu if threads == 1 else wall
    peak = square_flops / spent["peak"]
    rows = []
    for name in variants:
        rate = (square_flops if name == "peak" else shape.flops) / spent[name]
        share = "" if name == "peak" else f"{100 * spent['floor'] / spent[name]:.1f}"
        times = "" if name == "peak" else f"{spent[name] / spent['ours']:.2f}"
        rows.append(
            [
                name,
                f"{wall[name]:.1f}",
                f"{cpu[name]:.1f}",
                f"{rate / 1e6:.0f}",
                f"{100 * rate / peak:.0f}",
                share,
                times,
            ]
        )
    short = str(dtype).removeprefix("torch.")
    publish(
        f"block-{shape.hidden}x{shape.width}-{shape.tokens}-{short}" + (f"-{threads}threads" if threads > 1 else ""),
        f"Block, forward + backward: {shape}, {short}; medians of 9 interleaved rounds",
        ["variant", "wall ms", "CPU ms", "GFLOP/s", "% of peak", "% of floor", "x ours"],
        rows,
    )
    assert spent["ours"] <= 1.1 * min(spent["HF grouped_mm"], spent["v4 loop"])
