"""The fast path of grouped_mlp on a CPU: grouped_mlp.cpp, compiled with Inductor's own tooling on first use.

A few seconds once, then from Inductor's cache on disk. Without a C++ compiler the reference runs instead, and a warning
says so.
"""

import logging
from ctypes import c_int64, c_void_p
from functools import cache
from importlib.resources import files
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus_compiler.runtime.kernels.matmul import matmul_dtype
from optimus_compiler.runtime.kernels.recycle import recycled_empty
from optimus_compiler.runtime.kernels.reduce_outputs import sum_rows_cpu
from optimus_compiler.runtime.kernels.rows import weight_of_rows

_log = logging.getLogger(__name__)


@cache
def _library() -> Any:
    """The compiled library; None, after a warning, where it cannot be compiled."""
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    source = files("optimus_compiler.runtime.kernels").joinpath("grouped_mlp.cpp").read_text()
    try:
        return CppCodeCache.load(source)
    except (CppCompileError, InvalidCxxCompiler, OSError) as error:
        reason = next((line for line in str(error).splitlines() if "error" in line), str(error).splitlines()[0])
        _log.warning(
            "experts run on the slow reference path: no C++ kernel could be compiled (%s); install g++", reason
        )
        return None


def compiles(dtype: torch.dtype) -> bool:
    """Whether there is a compiled kernel for activations and weights of this dtype."""
    return dtype in (torch.float32, torch.bfloat16) and _library() is not None


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
    scratch = rows * (hidden + width + max(hidden, 2 * width)) + 3 * width * hidden
    _run(
        "forward",
        (x_TH.dtype, matmul),
        (
            x_TH,
            weight_of_rows(weights_TK, row_TK, R).float(),
            gate_up_E2IH,
            down_EHI,
            token_R,
            offsets_E,
            gate_up_R2I,
            y_RH,
        ),
        (experts, hidden, width, rows),
        scratch,
    )
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
    scratch = rows * (hidden + 4 * width) + 2 * width * hidden + hidden * max(rows, 2 * width)
    _run(
        "backward",
        (x_TH.dtype, matmul, ddown_EHI.dtype),
        (dy_RH, x_TH, weight_R1, gate_up_E2IH, down_EHI, token_R, offsets_E, gate_up_R2I, dx_RH, dweight_R,
         dgate_up_E2IH, ddown_EHI),
        (int(adds), experts, hidden, width, rows),
        scratch,
    )  # fmt: skip
    if not adds:
        unused = (offsets_E.diff(prepend=offsets_E.new_zeros(1)) == 0).nonzero()[:, 0]
        dgate_up_E2IH.index_fill_(0, unused, 0)  # not a boolean mask, which passes over the whole table
        ddown_EHI.index_fill_(0, unused, 0)
    dweights_TK = F.pad(dweight_R, (0, 1))[row_TK].to(weights_TK.dtype)  # row -1 reads the padding
    return sum_rows_cpu(dx_RH, row_TK), dweights_TK


def _scratch_rows(offsets_E: Tensor) -> int:
    """Rows of the largest expert, rounded up to a power of two: few sizes, so that scratch memory is used again."""
    largest = int(offsets_E.diff(prepend=offsets_E.new_zeros(1)).max()) if len(offsets_E) else 0
    return 1 << max(largest - 1, 0).bit_length()


def _run(
    name: str, dtypes: tuple[torch.dtype, ...], tensors: tuple[Tensor, ...], sizes: tuple[int, ...], scratch: int
) -> None:
    """Calls the function called `name` and the dtypes, with scratch memory for each thread in the second of them."""
    threads = torch.get_num_threads()
    function = getattr(_library(), "_".join([name, *(str(dtype).removeprefix("torch.") for dtype in dtypes)]))
    memory = recycled_empty((threads, scratch), dtypes[1])
    arguments = [tensor.contiguous() for tensor in tensors]
    pointers = [c_void_p(tensor.data_ptr()) for tensor in (*arguments, memory)]
    function(*pointers, *map(c_int64, (*sizes, threads, scratch)))
