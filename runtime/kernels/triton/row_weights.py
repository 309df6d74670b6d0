"""Routing weights, from a choice to its row and, for their gradient, back."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimus_compiler.runtime.kernels.triton.launch import launch

BLOCK = 512


def weight_of_rows_triton(weights_TK: Tensor, row_TK: Tensor, num_rows: int) -> Tensor:
    """[R] fp32: the routing weight of each row; undefined past the last offset."""
    weight_R = weights_TK.new_empty(num_rows, dtype=torch.float32)
    choices = row_TK.numel()
    tensors = (weights_TK.contiguous(), row_TK.contiguous(), weight_R)
    launch(scatter_kernel, (triton.cdiv(choices, BLOCK),), *tensors, choices=choices, BLOCK=BLOCK)
    return weight_R


def weights_gradient_triton(dweight_PR: Tensor, weights_TK: Tensor, row_TK: Tensor) -> Tensor:
    """[T, K] in the weights' dtype: the sum of the P parts of each row's gradient, 0 for a choice without a row."""
    P, R = dweight_PR.shape
    dweights_TK = torch.empty_like(weights_TK, memory_format=torch.contiguous_format)
    choices = row_TK.numel()
    tensors = (dweight_PR, row_TK.contiguous(), dweights_TK)
    launch(gather_sum_kernel, (triton.cdiv(choices, BLOCK),), *tensors, choices=choices, R=R, P=P, BLOCK=BLOCK)
    return dweights_TK


@triton.jit
def scatter_kernel(weights_TK, row_TK, weight_R, choices, BLOCK: tl.constexpr):
    choice = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_TK + choice, mask=choice < choices, other=-1)
    weight = tl.load(weights_TK + choice, mask=choice < choices, other=0)
    tl.store(weight_R + row, weight.to(tl.float32), mask=row >= 0)


@triton.jit
def gather_sum_kernel(dweight_PR, row_TK, dweights_TK, choices, R, P: tl.constexpr, BLOCK: tl.constexpr):
    choice = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_TK + choice, mask=choice < choices, other=-1)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(P):
        total += tl.load(dweight_PR + row, mask=row >= 0, other=0)
        dweight_PR += R
    tl.store(dweights_TK + choice, total.to(dweights_TK.dtype.element_ty), mask=choice < choices)
