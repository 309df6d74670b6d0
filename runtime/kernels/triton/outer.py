"""The gradient of the experts' matrices: for each expert the sum over its rows of a x b, in fp32, added in place.

A program takes tiles of the result; the rows are what it sums over, so an expert's tiles all run the same length.
"""

import triton
import triton.language as tl
from torch import Tensor

from optimus_compiler.runtime.kernels.triton import device
from optimus_compiler.runtime.kernels.triton.blocks import (
    element,
    halves,
    load_block,
    load_rows,
    matrix,
    ordered,
    store_block,
)
from optimus_compiler.runtime.kernels.triton.launch import launch
from optimus_compiler.runtime.kernels.triton.tiles import Tile, tile_for


def sum_outer(
    a_RM: Tensor, b: Tensor, token_R: Tensor | None, offsets_E: Tensor, out_EMN: Tensor, *, adds: bool,
    tile: Tile | None = None,
) -> None:  # fmt: skip
    """out[e] = (adds: +=) the sum over e's rows r of a[r] x b[r], for b_TN read through token_R, or b_RN without.

    An expert without rows gets zeros, or is not touched.
    """
    E, M, N = out_EMN.shape
    R = len(a_RM)
    tile = tile or tile_for("ddown" if token_R is None else "dgate_up", a_RM, (E, M, N, R))
    launch(
        outer_kernel, tile.grid(a_RM, E, E * triton.cdiv(M, tile.m) * triton.cdiv(N, tile.n)),
        a_RM, b, token_R, offsets_E, out_EMN,
        E=E, M=M, N=N, ADDS=adds, DESCRIBED=device.per_expert(a_RM.device) and device.aligned(a_RM, b),
        **tile.constants(a_RM, E),
    )  # fmt: skip


@triton.jit
def outer_kernel(
    a_RM, b, token_R, offsets_E, out_EMN,
    E: tl.constexpr, M: tl.constexpr, N: tl.constexpr, ADDS: tl.constexpr,
    DESCRIBED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    ROW_TILES: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    COLUMN_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    HALF: tl.constexpr = BLOCK_N // 2
    TILES: tl.constexpr = ROW_TILES * COLUMN_TILES
    for tile in range(tl.program_id(0), E // tl.num_programs(1) * TILES, tl.num_programs(0)):
        expert = tl.program_id(1) + tile // TILES
        row_tile, column_tile = ordered(tile % TILES, ROW_TILES, COLUMN_TILES, GROUP)
        column = column_tile * BLOCK_N
        start = tl.load(offsets_E + expert - 1, mask=expert > 0, other=0)
        end = tl.load(offsets_E + expert)
        out = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if DESCRIBED:  # the descriptors end with the expert: rows behind it are read as 0
            a_rows = matrix(a_RM, end, M, M, BLOCK_K, BLOCK_M, DESCRIBED)
            b_rows = matrix(b, end, N, N, BLOCK_K, BLOCK_N, DESCRIBED)
            for row in range(start, end, BLOCK_K):
                a_KM = a_rows.load([row, row_tile * BLOCK_M])
                b_KN = b_rows.load([row, column])
                out = tl.dot(a_KM.T, b_KN, out, input_precision=PRECISION)
        else:
            for row in range(start, end, BLOCK_K):
                rows = row + tl.arange(0, BLOCK_K)
                used = rows < end
                sources = rows if token_R is None else tl.load(token_R + rows, mask=used, other=0)
                a_KM = load_block(a_RM, row, row_tile * BLOCK_M, end, M, M, BLOCK_K, BLOCK_M, False)
                b_KN = load_rows(b, sources, used, column, N, BLOCK_N)
                out = tl.dot(a_KM.T, b_KN, out, input_precision=PRECISION)

        table = out_EMN + element(expert, M * N)
        height = tl.where(end > start, M, 0) if ADDS else M  # an expert without rows is not touched
        # in halves: the sums and what they are added to would not fit the registers together
        left, right = halves(out)
        _add_or_store(table, row_tile * BLOCK_M, column, left, height, N, ADDS, BLOCK_M, HALF)
        _add_or_store(table, row_tile * BLOCK_M, column + HALF, right, height, N, ADDS, BLOCK_M, HALF)


@triton.jit
def _add_or_store(
    table, row, column, block, height,
    N: tl.constexpr, ADDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if ADDS:
        block += load_block(table, row, column, height, N, N, ROWS, COLUMNS, False).to(tl.float32)
    store_block(table, row, column, block, height, N, N)
