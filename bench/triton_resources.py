"""What the Triton kernels become on GPUs that are not at hand: compiled for them, and the machine code looked into.

Nothing runs: the block's host code is executed on meta tensors, and each launch is compiled for the target instead.
"""

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

SHARED_LIMIT = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448}  # bytes a program may have
MATRIX_INSTRUCTION = {"sm_80": r"mma\.sync", "sm_90": r"wgmma\.mma_async", "sm_100": r"tcgen05\.mma"}
PRODUCTS = ("gate_up_kernel", "multiply_kernel", "down_backward_kernel", "outer_kernel")
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Resources(NamedTuple):
    """Of one kernel of the block."""

    kernel: str
    variant: str
    tile: str
    registers: int  # of a thread, at most 255
    stack: int  # bytes a thread; spilled registers lie there
    shared: int  # bytes a program
    matrix_instructions: int  # on tensor cores, in the code
    bulk_copies: int  # by the copy engine (TMA), in the code
    seconds: float


def resources(
    arch: str,
    dtype: torch.dtype,
    hidden: int = 2048,
    width: int = 1024,
    experts: int = 64,
    per_expert: bool = False,
) -> list[Resources]:
    """All kernels of the block's forward and backward as an arch runs them, OLMoE-7B's sizes by default.

    per_expert: with the grid and the loads that XPU has, for which Triton's wheels have no compiler.
    """
    from optimus_compiler.runtime.kernels.triton import device, launch
    from optimus_compiler.runtime.kernels.triton.grouped_mlp import grouped_mlp_backward_triton, grouped_mlp_triton
    from optimus_compiler.runtime.kernels.triton.index_tokens import index_tokens_triton
    from optimus_compiler.runtime.kernels.triton.sum_rows import sum_rows_triton

    found: list[Resources] = []

    def compile_launch(kernel: Any, grid: tuple[int, ...], tensors: tuple[Any, ...], constants: dict[str, Any]) -> None:
        found.append(_compiled(kernel, tensors, constants, arch))

    def meta(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    tokens, top_k = 4096, 8
    indices_TK = meta(tokens, top_k, dtype=torch.int64)
    gate_up, down = meta(experts, 2, width, hidden), meta(experts, hidden, width)
    with (
        mock.patch.object(launch, "_run", compile_launch),
        mock.patch.object(device, "arch_of", return_value=arch),
        mock.patch.object(device, "per_expert", return_value=per_expert),
        _fresh_cache(),
    ):
        indexed = index_tokens_triton(indices_TK, meta(dtype=torch.int64), experts, tokens * top_k)[:3]
        arguments = (meta(tokens, hidden), meta(tokens, top_k), gate_up, down, *indexed)
        y_RH, gate_up_R2I = grouped_mlp_triton(*arguments)
        sum_rows_triton(y_RH, indexed[1])
        buffers = (gate_up.float(), down.float())
        grouped_mlp_backward_triton(y_RH, *arguments, gate_up_R2I, *buffers, adds=True)
    return list({each[:3]: each for each in found}.values())


def _compiled(kernel: Any, tensors: tuple[Tensor | None, ...], constants: Mapping[str, Any], arch: str) -> Resources:
    """One launch, compiled with the specialisations that Triton's own launch would make."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arguments = {**dict(zip(kernel.arg_names, tensors, strict=False)), **constants}
    signature, fixed, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if isinstance(value, Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            attributes[index,] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value is None or value == 1:
            signature[parameter.name] = "constexpr"
            fixed[parameter.name] = value
        else:
            signature[parameter.name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[index,] = [["tt.divisibility", 16]]
    options = {name: value for name, value in constants.items() if name not in kernel.arg_names}
    began = time.perf_counter()
    compiled = triton.compile(
        ASTSource(kernel, signature, fixed, attributes),
        target=GPUTarget("cuda", int(arch.removeprefix("sm_")), 32),
        options={**options, "enable_fp_fusion": True},
    )
    ptx, (registers, stack) = compiled.asm["ptx"], _registers_and_stack(compiled.asm["cubin"])
    blocks = [str(constants[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K") if name in constants]
    tile = " x ".join(blocks) + f", {options['num_warps']} warps, {options['num_stages']} stages" if blocks else ""
    gathers = kernel.__name__ in PRODUCTS and arguments.get("token_R") is not None
    variants = {"transposed": constants.get("TRANSPOSED"), "gathers": gathers}
    return Resources(
        kernel.__name__,
        ", ".join(name for name, holds in variants.items() if holds),
        tile,
        registers,
        stack,
        compiled.metadata.shared,
        len(re.findall(MATRIX_INSTRUCTION[arch], ptx)),
        len(re.findall(r"cp\.async\.bulk\.tensor", ptx)),
        time.perf_counter() - began,
    )


def _registers_and_stack(cubin: bytes) -> tuple[int, int]:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [(int(registers), int(stack)) for registers, stack in re.findall(r"REG:(\d+) STACK:(\d+)", usage)]
    return max(registers for registers, _ in found), max(stack for _, stack in found)


@contextmanager
def _fresh_cache() -> Iterator[None]:
    """Everything is compiled anew, and leaves nothing behind."""
    import triton

    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        yield
