"""Tile shapes: which block of a product one program computes, for each kind of device; tuned ones come from a file.

`tune.py` writes that file. Without it the defaults below hold: those for CUDA are checked to compile without spilling
registers and within shared memory (tests/runtime/kernels/test_triton_compiled.py), none has been timed.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import triton
from torch import Tensor

from optimus_compiler.runtime.kernels.triton import device

Product = Literal["gate_up", "down", "dh", "dx", "ddown", "dgate_up"]


class Tile(NamedTuple):
    """A program's block of the result, m rows by n columns, in steps of k; `group` row tiles run side by side."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8
    programs: int = 1  # on one multiprocessor

    def constants(self, x: Tensor, experts: int) -> dict[str, Any]:
        """The keyword arguments of a launch."""
        blocks = {"BLOCK_M": self.m, "BLOCK_N": self.n, "BLOCK_K": self.k, "GROUP": self.group}
        blocks["BLOCK_E"] = 1 if device.per_expert(x.device) else triton.next_power_of_2(experts)
        options: dict[str, Any] = {"PRECISION": device.precision(), "num_warps": self.warps, "num_stages": self.stages}
        if device.arch_of(x.device) == "xpu":
            options["grf_mode"] = "256"
        return {**blocks, **options}

    def grid(self, x: Tensor, experts: int, tiles: int) -> tuple[int, int]:
        """Programs for at most `tiles` tiles."""
        at_once = device.programs_of(x.device) * self.programs
        if device.per_expert(x.device):
            return max(1, min(tiles, triton.cdiv(4 * at_once, experts))), experts
        return min(tiles, at_once), 1


# For two-byte dtypes. gate_up holds two sums of m x n, the others one. dgate_up reads rows through an index, which
# takes two stages of its own.
DEFAULTS: dict[str, dict[Product, Tile]] = {
    "sm_80": {
        "gate_up": Tile(128, 64, 64, 8, 3),
        "down": Tile(128, 128, 64, 8, 3),
        "dh": Tile(128, 128, 64, 8, 3),
        "dx": Tile(128, 128, 64, 8, 3),
        "ddown": Tile(128, 128, 64, 8, 3),
        "dgate_up": Tile(128, 128, 64, 8, 5),
    },
    "sm_90": {
        "gate_up": Tile(128, 128, 64, 8, 4),
        "down": Tile(128, 256, 64, 8, 4),
        "dh": Tile(128, 128, 64, 8, 4),
        "dx": Tile(128, 256, 64, 8, 4),
        "ddown": Tile(128, 256, 64, 8, 3),
        "dgate_up": Tile(128, 256, 64, 8, 5),
    },
    "xpu": {
        "gate_up": Tile(256, 128, 32, 32, 2),
        "down": Tile(256, 256, 32, 32, 2),
        "dh": Tile(256, 128, 32, 32, 2),
        "dx": Tile(256, 256, 32, 32, 2),
        "ddown": Tile(256, 256, 32, 32, 2),
        "dgate_up": Tile(256, 256, 32, 32, 2),
    },
}
FAMILY = {"sm_90": "sm_90", "sm_100": "sm_90", "sm_103": "sm_90", "xpu": "xpu"}  # the rest: sm_80, which is modest
EXACT = Tile(64, 32, 16, 4, 2, programs=2)  # fp32, which no tensor core multiplies exactly
INTERPRETED = Tile(16, 32, 32, 4, 2, group=2)


def tile_for(product: Product, x: Tensor, sizes: tuple[int, ...]) -> Tile:
    """The tile of a product of tensors like x; sizes: experts, the sides of an expert's matrix, rows."""
    tuned = tuned_tiles().get(key(product, x, sizes))
    return Tile(*tuned) if tuned else default(product, x)


def default(product: Product, x: Tensor) -> Tile:
    """The tile without tuning."""
    arch = device.arch_of(x.device)
    if arch == "interpreter":
        return INTERPRETED
    return EXACT if x.dtype.itemsize == 4 else DEFAULTS[FAMILY.get(arch, "sm_80")][product]


def key(product: Product, x: Tensor, sizes: tuple[int, ...]) -> str:
    """Where the file keeps a product's tile: by device, dtype and sizes, rows to the next power of two."""
    experts, height, width, rows = sizes
    dtype = str(x.dtype).removeprefix("torch.")
    rows = triton.next_power_of_2(max(rows, 1))
    return f"{device.name_of(x.device)}, {product}, {dtype}, {experts}x{height}x{width}, {rows} rows"


def tuned_file() -> Path:
    """The file of tuned tiles, in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "optimus_compiler" / "triton_tiles.json"


@cache
def tuned_tiles() -> dict[str, list[int]]:
    """What the file holds, by key; raises ValueError where it is damaged."""
    file = tuned_file()
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        raise ValueError(f"{file} is not JSON: delete it and run optimus doctor --tune again") from None
