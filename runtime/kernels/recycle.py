"""Large CPU tensors whose pages outlive them: the next tensor of that size takes over the memory.

malloc maps every block of 32 MiB or more afresh and unmaps it when freed, and gives back what is free at the end of its
heap: a page fault for each 4 KiB, up to a fifth of the expert block's whole time. An ordinary tensor comes out; its
memory returns here when its storage dies, whoever held it last.
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

SMALLEST = 2**20  # bytes; smaller ones malloc itself keeps well enough
KEPT = 2  # free blocks of one size; more are given back to the system

_free: dict[int, list[Tensor]] = defaultdict(list)


def recycled_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised contiguous CPU tensor."""
    size = math.prod(shape) * dtype.itemsize
    if size < SMALLEST:
        return torch.empty(shape, dtype=dtype)
    try:
        block = _free[size].pop()
    except IndexError:
        block = torch.empty(size, dtype=torch.uint8)
    lease = block.numpy()  # the new tensor's storage holds this array, and nothing else does
    weakref.finalize(lease, _give_back, block).atexit = False
    return torch.from_numpy(lease).view(dtype).view(shape)


def recycled_empty_like(like: Tensor) -> Tensor:
    """An uninitialised contiguous tensor of the same shape, dtype and device; recycled memory on a CPU."""
    if like.device.type == "cpu":
        return recycled_empty(like.shape, like.dtype)
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _give_back(block: Tensor) -> None:
    if len(_free[len(block)]) < KEPT:
        _free[len(block)].append(block)
