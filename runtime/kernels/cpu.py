"""The compiled CPU kernels, cpu.cpp: built by Inductor's own tooling on first use, called with plain pointers.

It takes some seconds once; later processes take it from Inductor's cache on disk. Without a C++ compiler the reference
implementations run instead, and a warning says so.
"""

import logging
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


def compiles(x: Tensor) -> bool:
    """Whether there are compiled kernels for activations and weights like x (dtype, device)."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16) and load() is not None


def call(name: str, dtypes: Sequence[torch.dtype], tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Calls the function `name_dtype_dtype...` of cpu.cpp with the tensors' memory, contiguous, then the sizes."""
    function = getattr(load(), "_".join([name, *(str(dtype).removeprefix("torch.") for dtype in dtypes)]))
    contiguous = [tensor.contiguous() for tensor in tensors]  # alive until the call is over
    function(*(c_void_p(tensor.data_ptr()) for tensor in contiguous), *map(c_int64, sizes))


@cache
def load() -> Any:
    """The library of them; None, after a warning, where they cannot be compiled.

    Even from the cache it takes a second, in which Inductor asks what vectors this CPU has: a process that forks those
    which compute does it before.
    """
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    folder = files("optimus_compiler.runtime.kernels")
    source = "".join(folder.joinpath(name).read_text() for name in ("bf16_products.h", "cpu.cpp"))
    try:
        return CppCodeCache.load(source)
    except (CppCompileError, InvalidCxxCompiler, OSError) as error:
        lines = str(error).splitlines()
        reason = next((line for line in lines if "error" in line), lines[0])
        _log.warning(
            "no C++ kernels could be compiled (%s): experts run on the slow reference path; install g++", reason
        )
        return None
