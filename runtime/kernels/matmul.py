"""Matrix products on a CPU that has no bf16 GEMM: widen to fp32, multiply, round once.

Without AVX-512 or AMX, torch multiplies bf16 matrices in scalar code, 5 to 50 times slower than fp32. Widening costs a
pass over each operand and is never less exact: the result is rounded once, where it is stored.
"""

from functools import cache

import torch
from torch import Tensor


@cache
def _cpu_multiplies_bf16() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which matrices like x (dtype, device) multiply fast: its own, or fp32 for bf16 on most CPUs."""
    if x.device.type == "cpu" and x.dtype == torch.bfloat16 and not _cpu_multiplies_bf16():
        return torch.float32
    return x.dtype


def matmul_into(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    """out_MN = a_MK @ b_KN, with a and b in one dtype and out in that dtype or a narrower one (rounded once)."""
    if out_MN.dtype == a_MK.dtype:
        torch.mm(a_MK, b_KN, out=out_MN)
    else:
        out_MN.copy_(torch.mm(a_MK, b_KN))
