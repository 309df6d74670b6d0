"""What the grouped products share: which rows a tile has, in which order tiles run, and how blocks come to the chip.

The schedule is computed where it is used: every program reads offsets_E, counts the row tiles of each expert and looks
its own up. Nothing of it passes through the host, and no table of tiles is written.

Grid: axis 0 is persistent, a program takes every num_programs(0)-th tile; axis 1 has one program, which serves all
experts (CUDA), or one for each expert (XPU, whose block loads want an expert that is a program id).
"""

import triton
import triton.language as tl


@triton.jit
def row_tiles(offsets_E, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """For the experts of this program (BLOCK_E of them, from program_id(1) on): where their rows start and end, and how
    many row tiles they and those before them have."""
    e = tl.program_id(1) + tl.arange(0, BLOCK_E)
    starts_E = tl.load(offsets_E + e - 1, mask=(e > 0) & (e < E), other=0)
    ends_E = tl.load(offsets_E + e, mask=e < E, other=0)
    tiles_E = tl.where(e < E, tl.cdiv(ends_E - starts_E, BLOCK_M), 0)
    return starts_E, ends_E, tl.cumsum(tiles_E, 0)


@triton.jit
def ordered(tile, num_row_tiles, NUM_COLUMN_TILES: tl.constexpr, GROUP: tl.constexpr):
    """(row tile, column tile): GROUP row tiles share a column tile before the next one, so that L2 keeps both."""
    group = tile // (GROUP * NUM_COLUMN_TILES)
    within = tile % (GROUP * NUM_COLUMN_TILES)
    height = tl.minimum(num_row_tiles - group * GROUP, GROUP)
    return group * GROUP + within % height, within // height


@triton.jit
def locate(row_tile, starts_E, ends_E, tiles_to_E, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, first row, end of the expert's rows) of a row tile."""
    e = tl.arange(0, BLOCK_E)
    index = tl.sum((tiles_to_E <= row_tile).to(tl.int32), 0)
    earlier = tl.max(tl.where(e < index, tiles_to_E, 0), 0)
    start = tl.sum(tl.where(e == index, starts_E, 0), 0)
    end = tl.sum(tl.where(e == index, ends_E, 0), 0)
    return tl.program_id(1) + index, start + (row_tile - earlier) * BLOCK_M, end


@triton.jit
def matrix(
    pointer, height, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """A matrix with rows STRIDE elements apart, for load_block: a tensor descriptor, or the plain pointer where memory
    is not aligned."""
    if DESCRIBED:
        return tl.make_tensor_descriptor(pointer, [height, WIDTH], [STRIDE, 1], [ROWS, COLUMNS])
    else:
        return pointer


@triton.jit
def load_block(
    source, row, column, end, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLUMNS] of a `matrix` from (row, column); columns past WIDTH are 0. Rows from `end` on may be anything
    with a descriptor, and are 0 without one."""
    if DESCRIBED:
        return source.load([row, column])
    else:
        rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        # one address in 64 bits and offsets in 32: half the registers of 64-bit addresses
        addresses = source + element(row, STRIDE) + column + rows[:, None] * STRIDE + columns[None, :]
        inside = (row + rows < end)[:, None] & (column + columns < WIDTH)[None, :]
        return tl.load(addresses, mask=inside, other=0)


@triton.jit
def load_rows(pointer, rows, used, column, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """[len(rows), COLUMNS] of the rows of a row-major matrix; unused rows and columns past WIDTH are 0."""
    columns = column + tl.arange(0, COLUMNS)
    addresses = pointer + element(rows, WIDTH)[:, None] + columns[None, :]
    return tl.load(addresses, mask=used[:, None] & (columns < WIDTH)[None, :], other=0)


@triton.jit
def store_block(pointer, row, column, block, end, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """Store a block at (row, column) of a matrix; rows from `end` on and columns past WIDTH stay as they are."""
    rows, columns = tl.arange(0, block.shape[0]), tl.arange(0, block.shape[1])
    addresses = pointer + element(row, STRIDE) + column + rows[:, None] * STRIDE + columns[None, :]
    inside = (row + rows < end)[:, None] & (column + columns < WIDTH)[None, :]
    tl.store(addresses, block.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def halves(block):
    """The left and the right half of a block's columns."""
    return block.reshape(block.shape[0], 2, block.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def element(rows, WIDTH):
    """The index of a row's first element, in 64 bits: matrices may have more than 2**31 elements."""
    return tl.cast(rows, tl.int64) * WIDTH
