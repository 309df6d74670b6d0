"""reduce_outputs on a GPU: a program adds up the rows of one token, in the order of k, by inverse index."""

import triton
import triton.language as tl
from torch import Tensor

from optimus_compiler.runtime.kernels.triton.blocks import element
from optimus_compiler.runtime.kernels.triton.launch import launch


def sum_rows_triton(y_RH: Tensor, row_TK: Tensor) -> Tensor:
    """[T, H]: out[t] = sum over k of y[row[t, k]], in fp32, without the rows of -1."""
    T, K, H = *row_TK.shape, y_RH.shape[1]
    out_TH = y_RH.new_empty(T, H)
    BLOCK_H = min(triton.next_power_of_2(max(H, 1)), 2048)
    grid = (T, triton.cdiv(H, BLOCK_H))
    launch(sum_rows_kernel, grid, y_RH.contiguous(), row_TK.contiguous(), out_TH, H=H, K=K, BLOCK_H=BLOCK_H)
    return out_TH


@triton.jit
def sum_rows_kernel(y_RH, row_TK, out_TH, H: tl.constexpr, K: tl.constexpr, BLOCK_H: tl.constexpr):
    t = tl.program_id(0)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total_H = tl.zeros([BLOCK_H], tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_TK + element(t, K) + k)
        width = tl.where(row >= 0, H, 0)
        total_H += tl.load(y_RH + element(row, H) + h, mask=h < width, other=0).to(tl.float32)
    tl.store(out_TH + element(t, H) + h, total_H.to(out_TH.dtype.element_ty), mask=h < H)
