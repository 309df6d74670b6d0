"""optimus::reduce_outputs: add up the expert outputs of every token (stage 5 of FastSparseMoE).

The routing weight is already inside the rows (grouped_mlp), so this is a plain sum by inverse index: no atomics, and
one order of additions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus_compiler.runtime.kernels.cpu import call, compiles
from optimus_compiler.runtime.kernels.dispatch import select
from optimus_compiler.runtime.kernels.recycle import recycled_empty


@torch.library.custom_op("optimus::reduce_outputs", mutates_args=())
def reduce_outputs(y_RH: Tensor, row_TK: Tensor, token_R: Tensor) -> Tensor:
    """out_TH[t] = sum over k of y_RH[row_TK[t, k]], skipping rows of -1 (paper, Algorithm 1, stage 5).

    y_RH: any float dtype; sums run in fp32 (fp64 for fp64) in the order of k and are rounded once to y's dtype. row_TK,
    token_R: from index_tokens; token_R is used by backward only, dy_RH = dout_TH[token_R]. Rows past the last offset
    belong to no token: their gradient is a copy of token 0's, finite, and grouped_mlp's backward never reads it.
    """
    return sum_rows(y_RH, row_TK)


@reduce_outputs.register_fake
def _fake(y_RH: Tensor, row_TK: Tensor, token_R: Tensor) -> Tensor:
    return y_RH.new_empty(row_TK.shape[0], y_RH.shape[1])


@torch.library.custom_op("optimus::reduce_outputs_backward", mutates_args=())
def reduce_outputs_backward(dout_TH: Tensor, token_R: Tensor) -> Tensor:
    """dy_RH = dout_TH[token_R]."""
    shape = (len(token_R), dout_TH.shape[1])
    if dout_TH.device.type == "cpu":
        return torch.index_select(dout_TH, 0, token_R, out=recycled_empty(shape, dout_TH.dtype))
    return dout_TH.index_select(0, token_R)


@reduce_outputs_backward.register_fake
def _fake_backward(dout_TH: Tensor, token_R: Tensor) -> Tensor:
    return dout_TH.new_empty(token_R.shape[0], dout_TH.shape[1])


def _setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])


def _backward(ctx: torch.autograd.function.FunctionCtx, dout_TH: Tensor) -> tuple[Tensor, None, None]:
    (token_R,) = ctx.saved_tensors  # type: ignore[attr-defined]
    return reduce_outputs_backward(dout_TH, token_R), None, None


reduce_outputs.register_autograd(_backward, setup_context=_setup_context)


def sum_rows(y_RH: Tensor, row_TK: Tensor) -> Tensor:
    """reduce_outputs' forward, for other ops too."""
    reduce = select(y_RH, reference=sum_rows_reference, cpu=sum_rows_cpu, triton=_sum_rows_triton)
    return reduce(y_RH, row_TK)


def sum_rows_reference(y_RH: Tensor, row_TK: Tensor) -> Tensor:
    """[T, H]: choice by choice; a row of -1 reads a row of zeros behind the last."""
    sum_TH = y_RH.new_zeros(row_TK.shape[0], y_RH.shape[1], dtype=torch.promote_types(y_RH.dtype, torch.float32))
    y_RH = F.pad(y_RH, (0, 0, 0, 1))
    for row_T in row_TK.unbind(1):
        sum_TH += y_RH[row_T]
    return sum_TH.to(y_RH.dtype)


def sum_rows_cpu(y_RH: Tensor, row_TK: Tensor) -> Tensor:
    """[T, H]: a token's rows added up in registers, in the order of k."""
    if not compiles(y_RH):
        return sum_rows_reference(y_RH, row_TK)
    T, K, H = *row_TK.shape, y_RH.shape[1]
    out_TH = recycled_empty((T, H), y_RH.dtype)
    call("sum_rows", (y_RH.dtype,), (y_RH, row_TK, out_TH), (T, K, H, torch.get_num_threads()))
    return out_TH


def _sum_rows_triton(y_RH: Tensor, row_TK: Tensor) -> Tensor:
    from optimus_compiler.runtime.kernels.triton.sum_rows import sum_rows_triton  # triton is optional

    return sum_rows_triton(y_RH, row_TK)
