"""Rows times their expert's matrix: gate and up with SwiGLU behind them, plain, and with SwiGLU's backward behind.

Each program takes row tiles of one expert at a time and runs along the contraction in steps of BLOCK_K, summing in
fp32. What follows a product elementwise happens on the sums, before they leave the chip.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimus_compiler.runtime.kernels.triton import device
from optimus_compiler.runtime.kernels.triton.blocks import (
    element,
    halves,
    load_block,
    load_rows,
    locate,
    matrix,
    ordered,
    row_tiles,
    store_block,
)
from optimus_compiler.runtime.kernels.triton.launch import launch
from optimus_compiler.runtime.kernels.triton.tiles import Product, Tile, tile_for


def multiply_gate_up(
    x: Tensor, token_R: Tensor | None, weight_R: Tensor, gate_up_E2IH: Tensor, offsets_E: Tensor,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(gate_up_R2I, h_RI) in x's dtype: gate and up of each row, and silu(gate) * up * weight.

    x is x_TH, its rows read through token_R, or x_RH where token_R is None.
    """
    E, _, width, H = gate_up_E2IH.shape
    R = len(weight_R)
    tile = tile or tile_for("gate_up", x, (E, H, width, R))
    gate_up_R2I, h_RI = x.new_empty(R, 2 * width), x.new_empty(R, width)
    launch(
        gate_up_kernel, _grid(x, tile, E, R, width),
        x, token_R, weight_R, gate_up_E2IH, offsets_E, gate_up_R2I, h_RI,
        R=R, E=E, H=H, WIDTH=width, DESCRIBED=device.aligned(x, gate_up_E2IH), **tile.constants(x, E),
    )  # fmt: skip
    return gate_up_R2I, h_RI


def multiply(
    a_RC: Tensor, table: Tensor, offsets_E: Tensor, *, transposed: bool, product: Product, tile: Tile | None = None
) -> Tensor:
    """[R, N]: each row times its expert's matrix, [C, N] or, transposed, [N, C]."""
    E, R, C = len(table), *a_RC.shape
    N = table.shape[1] if transposed else table.shape[2]
    tile = tile or tile_for(product, a_RC, (E, N, C, R))
    out_RN = a_RC.new_empty(R, N)
    launch(
        multiply_kernel, _grid(a_RC, tile, E, R, N), a_RC, table, offsets_E, out_RN,
        R=R, E=E, C=C, N=N, TRANSPOSED=transposed, DESCRIBED=_described(a_RC, table, transposed, tile),
        **tile.constants(a_RC, E),
    )  # fmt: skip
    return out_RN


def multiply_down_backward(
    dy_RH: Tensor, down_EHI: Tensor, gate_up_R2I: Tensor, weight_R: Tensor, offsets_E: Tensor, tile: Tile | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(h_RI, dgate_up_R2I, dweight_PR): the MLP's hidden state again, the gradient of gate and up, and P parts of the
    gradient of each row's routing weight, <dh, silu(gate) * up> over the columns of one tile each, in fp32."""
    E, H, width = down_EHI.shape
    R = len(dy_RH)
    tile = tile or tile_for("dh", dy_RH, (E, H, width, R))
    h_RI, dgate_up_R2I = dy_RH.new_empty(R, width), torch.empty_like(gate_up_R2I)
    dweight_PR = dy_RH.new_empty(triton.cdiv(width, tile.n), R, dtype=torch.float32)
    launch(
        down_backward_kernel, _grid(dy_RH, tile, E, R, width),
        dy_RH, down_EHI, gate_up_R2I, weight_R, offsets_E, h_RI, dgate_up_R2I, dweight_PR,
        R=R, E=E, H=H, WIDTH=width, DESCRIBED=_described(dy_RH, down_EHI, False, tile),
        **tile.constants(dy_RH, E),
    )  # fmt: skip
    return h_RI, dgate_up_R2I, dweight_PR


def _grid(x: Tensor, tile: Tile, experts: int, rows: int, columns: int) -> tuple[int, int]:
    return tile.grid(x, experts, min(rows, rows // tile.m + experts) * triton.cdiv(columns, tile.n))


def _described(a_RC: Tensor, table: Tensor, transposed: bool, tile: Tile) -> bool:
    """A block of a [C, N] matrix that sticks out at the bottom would read the next expert's."""
    return device.aligned(a_RC, table) and (transposed or a_RC.shape[1] % tile.k == 0)


@triton.jit
def gate_up_kernel(
    x, token_R, weight_R, gate_up_E2IH, offsets_E, gate_up_R2I, h_RI,
    R, E: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, DESCRIBED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    COLUMN_TILES: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    ROWS_DESCRIBED: tl.constexpr = DESCRIBED and token_R is None
    x_rows = matrix(x, R, H, H, BLOCK_M, BLOCK_K, ROWS_DESCRIBED)
    table = matrix(gate_up_E2IH, E * 2 * WIDTH, H, H, BLOCK_N, BLOCK_K, DESCRIBED)
    starts_E, ends_E, tiles_to_E = row_tiles(offsets_E, E, BLOCK_E, BLOCK_M)
    num_row_tiles = tl.max(tiles_to_E, 0)
    for tile in range(tl.program_id(0), num_row_tiles * COLUMN_TILES, tl.num_programs(0)):
        row_tile, column_tile = ordered(tile, num_row_tiles, COLUMN_TILES, GROUP)
        expert, row, end = locate(row_tile, starts_E, ends_E, tiles_to_E, BLOCK_E, BLOCK_M)
        rows, column = row + tl.arange(0, BLOCK_M), column_tile * BLOCK_N
        gate_row = expert * 2 * WIDTH + column
        up_row = gate_row + WIDTH
        gate_end = (expert * 2 + 1) * WIDTH
        tokens = rows if token_R is None else tl.load(token_R + rows, mask=rows < end, other=0)

        gate, up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, H, BLOCK_K):
            if ROWS_DESCRIBED:
                x_MK = x_rows.load([row, k])
            else:
                x_MK = load_rows(x, tokens, rows < end, k, H, BLOCK_K)
            gate_NK = load_block(table, gate_row, k, gate_end, H, H, BLOCK_N, BLOCK_K, DESCRIBED)
            gate = tl.dot(x_MK, gate_NK.T, gate, input_precision=PRECISION)
            up_NK = load_block(table, up_row, k, gate_end + WIDTH, H, H, BLOCK_N, BLOCK_K, DESCRIBED)
            up = tl.dot(x_MK, up_NK.T, up, input_precision=PRECISION)

        store_block(gate_up_R2I, row, column, gate, end, WIDTH, 2 * WIDTH)
        store_block(gate_up_R2I + WIDTH, row, column, up, end, WIDTH, 2 * WIDTH)
        # from the rounded values, as backward will compute it again
        gate, up = _rounded(gate, gate_up_R2I), _rounded(up, gate_up_R2I)
        weight = tl.load(weight_R + rows, mask=rows < end, other=0)
        store_block(h_RI, row, column, gate * tl.sigmoid(gate) * up * weight[:, None], end, WIDTH, WIDTH)


@triton.jit
def multiply_kernel(
    a_RC, table_E, offsets_E, out_RN,
    R, E: tl.constexpr, C: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr,
    DESCRIBED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    COLUMN_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    a = matrix(a_RC, R, C, C, BLOCK_M, BLOCK_K, DESCRIBED)
    if TRANSPOSED:
        table = matrix(table_E, E * N, C, C, BLOCK_N, BLOCK_K, DESCRIBED)
    else:
        table = matrix(table_E, E * C, N, N, BLOCK_K, BLOCK_N, DESCRIBED)
    starts_E, ends_E, tiles_to_E = row_tiles(offsets_E, E, BLOCK_E, BLOCK_M)
    num_row_tiles = tl.max(tiles_to_E, 0)
    for tile in range(tl.program_id(0), num_row_tiles * COLUMN_TILES, tl.num_programs(0)):
        row_tile, column_tile = ordered(tile, num_row_tiles, COLUMN_TILES, GROUP)
        expert, row, end = locate(row_tile, starts_E, ends_E, tiles_to_E, BLOCK_E, BLOCK_M)
        column = column_tile * BLOCK_N

        out = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for c in range(0, C, BLOCK_K):
            a_MK = load_block(a, row, c, end, C, C, BLOCK_M, BLOCK_K, DESCRIBED)
            if TRANSPOSED:
                b_KN = load_block(table, expert * N + column, c, (expert + 1) * N, C, C, BLOCK_N, BLOCK_K, DESCRIBED).T
            else:
                b_KN = load_block(table, expert * C + c, column, (expert + 1) * C, N, N, BLOCK_K, BLOCK_N, DESCRIBED)
            out = tl.dot(a_MK, b_KN, out, input_precision=PRECISION)
        store_block(out_RN, row, column, out, end, N, N)


@triton.jit
def down_backward_kernel(
    dy_RH, down_EHI, gate_up_R2I, weight_R, offsets_E, h_RI, dgate_up_R2I, dweight_PR,
    R, E: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, DESCRIBED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    COLUMN_TILES: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    QUARTER: tl.constexpr = BLOCK_N // 4
    dy = matrix(dy_RH, R, H, H, BLOCK_M, BLOCK_K, DESCRIBED)
    table = matrix(down_EHI, E * H, WIDTH, WIDTH, BLOCK_K, BLOCK_N, DESCRIBED)
    gate = matrix(gate_up_R2I, R, WIDTH, 2 * WIDTH, BLOCK_M, QUARTER, DESCRIBED)
    up = matrix(gate_up_R2I + WIDTH, R, WIDTH, 2 * WIDTH, BLOCK_M, QUARTER, DESCRIBED)
    starts_E, ends_E, tiles_to_E = row_tiles(offsets_E, E, BLOCK_E, BLOCK_M)
    num_row_tiles = tl.max(tiles_to_E, 0)
    for tile in range(tl.program_id(0), num_row_tiles * COLUMN_TILES, tl.num_programs(0)):
        row_tile, column_tile = ordered(tile, num_row_tiles, COLUMN_TILES, GROUP)
        expert, row, end = locate(row_tile, starts_E, ends_E, tiles_to_E, BLOCK_E, BLOCK_M)
        column = column_tile * BLOCK_N

        dh = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, H, BLOCK_K):
            dy_MK = load_block(dy, row, k, end, H, H, BLOCK_M, BLOCK_K, DESCRIBED)
            down_KN = load_block(
                table, expert * H + k, column, (expert + 1) * H, WIDTH, WIDTH, BLOCK_K, BLOCK_N, DESCRIBED
            )
            dh = tl.dot(dy_MK, down_KN, dh, input_precision=PRECISION)

        rows = row + tl.arange(0, BLOCK_M)
        weight = tl.load(weight_R + rows, mask=rows < end, other=0)[:, None]
        # in quarters: what follows holds five blocks, and registers have room for little beside dh
        left, right = halves(dh)
        a, b = halves(left)
        c, d = halves(right)
        dweight = _swiglu_backward(
            a, weight, gate, up, h_RI, dgate_up_R2I, row, column, end, WIDTH, BLOCK_M, QUARTER, DESCRIBED
        )
        dweight += _swiglu_backward(
            b, weight, gate, up, h_RI, dgate_up_R2I, row, column + QUARTER, end, WIDTH, BLOCK_M, QUARTER, DESCRIBED
        )
        dweight += _swiglu_backward(
            c, weight, gate, up, h_RI, dgate_up_R2I, row, column + 2 * QUARTER, end, WIDTH, BLOCK_M, QUARTER, DESCRIBED
        )
        dweight += _swiglu_backward(
            d, weight, gate, up, h_RI, dgate_up_R2I, row, column + 3 * QUARTER, end, WIDTH, BLOCK_M, QUARTER, DESCRIBED
        )
        tl.store(dweight_PR + element(column_tile, R) + rows, dweight, mask=rows < end)


@triton.jit
def _swiglu_backward(
    dh, weight, gate, up, h_RI, dgate_up_R2I, row, column, end,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Stores h and the gradient of gate and up for a block of dh; returns its part of the weights' gradient."""
    gate = load_block(gate, row, column, end, WIDTH, 2 * WIDTH, ROWS, COLUMNS, DESCRIBED).to(tl.float32)
    up = load_block(up, row, column, end, WIDTH, 2 * WIDTH, ROWS, COLUMNS, DESCRIBED).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    store_block(h_RI, row, column, silu * up * weight, end, WIDTH, WIDTH)
    dact = dh * weight
    dgate = dact * up * (sigmoid + silu * (1 - sigmoid))
    store_block(dgate_up_R2I, row, column, dgate, end, WIDTH, 2 * WIDTH)
    store_block(dgate_up_R2I + WIDTH, row, column, dact * silu, end, WIDTH, 2 * WIDTH)
    return tl.sum(dh * silu * up, 1)


@triton.jit
def _rounded(block, like):
    return block.to(like.dtype.element_ty).to(tl.float32)
