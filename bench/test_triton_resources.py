"""What the Triton kernels take on GPUs: registers, shared memory, tensor core instructions.

python -m pytest bench/test_triton_resources.py -s
Compiled here for each GPU, without one; not a timing.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton

from bench.triton_resources import PRODUCTS, SHARED_LIMIT, resources


def test_triton_resources(benchmark: Any, publish: Callable[..., None]) -> None:
    rows = benchmark.pedantic(lambda: [row for arch in SHARED_LIMIT for row in products_on(arch)])
    publish(
        "triton-resources",
        f"Triton kernels of OLMoE-7B's layer in bf16, compiled by triton {triton.__version__} without a GPU",
        ["kernel", "GPU", "tile", "registers", "stack", "shared KiB", "matrix instructions", "bulk copies"],
        rows,
    )


def products_on(arch: str) -> list[list[str]]:
    """A row for each product as a GPU runs it."""
    return [
        [
            f"{each.kernel}{', ' + each.variant if each.variant else ''}",
            arch,
            each.tile,
            str(each.registers),
            str(each.stack),
            f"{each.shared / 1024:.0f} of {SHARED_LIMIT[arch] / 1024:.0f}",
            str(each.matrix_instructions),
            str(each.bulk_copies),
        ]
        for each in resources(arch, torch.bfloat16)
        if each.kernel in PRODUCTS
    ]
