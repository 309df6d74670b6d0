"""The fast path of grouped_mlp on a CPU: memory for the compiled kernels, and what is around them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus_compiler.runtime.kernels.cpu import call
from optimus_compiler.runtime.kernels.matmul import matmul_dtype
from optimus_compiler.runtime.kernels.recycle import recycled_empty
from optimus_compiler.runtime.kernels.reduce_outputs import sum_rows_cpu
from optimus_compiler.runtime.kernels.rows import weight_of_rows


def grouped_mlp_cpu(
    x_TH: Tensor,
    weights_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    token_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
) -> tuple[Tensor, Tensor]:
    """grouped_mlp: y_RH and gate_up_R2I."""
    experts, hidden, width = down_EHI.shape
    R, rows, matmul = len(token_R), _scratch_rows(offsets_E), matmul_dtype(x_TH)
    gate_up_R2I = recycled_empty((R, 2 * width), x_TH.dtype)
    y_RH = recycled_empty((R, hidden), x_TH.dtype)
    scratch = rows * (hidden + width) + _room(rows, hidden, width)
    weight_R1 = weight_of_rows(weights_TK, row_TK, R).float()
    tensors = (x_TH, weight_R1, gate_up_E2IH, down_EHI, token_R, offsets_E, gate_up_R2I, y_RH)
    _call("forward", (x_TH.dtype, matmul), tensors, (experts, hidden, width, rows), scratch)
    return y_RH, gate_up_R2I


def grouped_mlp_backward_cpu(
    dy_RH: Tensor,
    x_TH: Tensor,
    weights_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    token_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    gate_up_R2I: Tensor,
    dgate_up_E2IH: Tensor,
    ddown_EHI: Tensor,
    adds: bool,
) -> tuple[Tensor, Tensor]:
    """grouped_mlp's backward: dx_TH and dweights_TK; the weights' gradients are added to the tables, or written."""
    experts, hidden, width = down_EHI.shape
    R, rows, matmul = len(token_R), _scratch_rows(offsets_E), matmul_dtype(x_TH)
    weight_R1 = weight_of_rows(weights_TK, row_TK, R).float()
    dweight_R = torch.zeros(R)
    dx_RH = recycled_empty((R, hidden), x_TH.dtype)
    scratch = rows * (hidden + 4 * width) + _room(rows, hidden, width)
    inputs = (dy_RH, x_TH, weight_R1, gate_up_E2IH, down_EHI, token_R, offsets_E, gate_up_R2I)
    outputs = (dx_RH, dweight_R, dgate_up_E2IH, ddown_EHI)
    dtypes = (x_TH.dtype, matmul, ddown_EHI.dtype)
    _call("backward", dtypes, (*inputs, *outputs), (int(adds), experts, hidden, width, rows), scratch)
    if not adds:
        unused = (offsets_E.diff(prepend=offsets_E.new_zeros(1)) == 0).nonzero()[:, 0]
        dgate_up_E2IH.index_fill_(0, unused, 0)  # not a boolean mask, which passes over the whole table
        ddown_EHI.index_fill_(0, unused, 0)
    dweights_TK = F.pad(dweight_R, (0, 1))[row_TK].to(weights_TK.dtype)  # row -1 reads the padding
    return sum_rows_cpu(dx_RH, row_TK), dweights_TK


def _room(rows: int, hidden: int, width: int) -> int:
    """Elements that one product of cpu.cpp needs beside its operands: a widened block of a table, at least 32 rows of
    it, and the result; or one operand packed."""
    largest = max(hidden, 2 * width)
    return max(2**17, 32 * largest) + (rows + 1) * largest


def _scratch_rows(offsets_E: Tensor) -> int:
    """Rows of the largest expert, rounded up to a power of two: few sizes, so that scratch memory is used again."""
    largest = int(offsets_E.diff(prepend=offsets_E.new_zeros(1)).max()) if len(offsets_E) else 0
    return 1 << max(largest - 1, 0).bit_length()


def _call(
    name: str, dtypes: tuple[torch.dtype, ...], tensors: tuple[Tensor, ...], sizes: tuple[int, ...], scratch: int
) -> None:
    """Calls a compiled function with `scratch` elements for each thread, of the second dtype."""
    threads = torch.get_num_threads()
    memory = recycled_empty((threads, scratch), dtypes[1])
    call(name, dtypes, (*tensors, memory), (*sizes, threads, scratch))
