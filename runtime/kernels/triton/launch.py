"""Launching a kernel: on the device of its tensors, or interpreted on CPU tensors where TRITON_INTERPRET=1."""

from functools import cache
from typing import Any

import numpy
import torch
import triton
from torch import Tensor


def interpreted() -> bool:
    """Whether kernels are interpreted in this process (decided when triton was imported first)."""
    return bool(triton.knobs.runtime.interpret)


def launch(kernel: Any, grid: tuple[int, ...], *tensors: Tensor | None, **constants: Any) -> None:
    """kernel[grid](*tensors, **constants) on the device of the first tensor; nothing for an empty grid."""
    if 0 not in grid:
        run = _interpret if interpreted() else _run
        run(kernel, grid, tensors, constants)


def _run(kernel: Any, grid: tuple[int, ...], tensors: tuple[Tensor | None, ...], constants: dict[str, Any]) -> None:
    device = tensors[0].device  # type: ignore[union-attr]
    triton.set_allocator(_scratch_on(device))  # for descriptors; known to one thread only, and backward has its own
    with torch.accelerator.device_index(device.index):
        kernel[grid](*tensors, **constants, enable_fp_fusion=True)


@cache
def _scratch_on(device: torch.device) -> Any:
    return lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device)


def _interpret(
    kernel: Any, grid: tuple[int, ...], tensors: tuple[Tensor | None, ...], constants: dict[str, Any]
) -> None:
    """The interpreter computes with the bits of bf16 as if they were integers: it gets fp32 copies instead."""
    narrow = [t is not None and t.dtype == torch.bfloat16 for t in tensors]
    wide = [t.float() if n else t for t, n in zip(tensors, narrow, strict=True)]  # type: ignore[union-attr]
    with numpy.errstate(over="ignore", invalid="ignore"):  # in lanes without a row, whose memory may hold anything
        kernel[grid](*wide, **{name: value for name, value in constants.items() if name in kernel.arg_names})
    for tensor, copy, is_narrow in zip(tensors, wide, narrow, strict=True):
        if is_narrow:
            tensor.copy_(copy)  # type: ignore[union-attr,arg-type]
