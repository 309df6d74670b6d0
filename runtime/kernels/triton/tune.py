"""Times tile shapes for one block's sizes on this device and keeps the fastest in a file, for later processes.

`optimus doctor --tune CONFIG` calls it. Training never tunes by itself: thousands of ranks would each do it, and a run
continued with other tiles would not repeat its sums bit by bit.
"""

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import get_args

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources, PTXASError

from optimus_compiler.runtime.kernels.triton.grouped_mlp import rows_of
from optimus_compiler.runtime.kernels.triton.outer import sum_outer
from optimus_compiler.runtime.kernels.triton.products import multiply, multiply_down_backward, multiply_gate_up
from optimus_compiler.runtime.kernels.triton.tiles import Product, Tile, default, key, tuned_file, tuned_tiles

PRODUCTS = get_args(Product)
REPEATS = 20


def tune(
    device: torch.device, dtype: torch.dtype, *, experts: int, hidden: int, width: int, tokens: int, rows: int
) -> Iterator[tuple[Product, Tile, float, float]]:
    """Tunes product by product; yields (product, the fastest tile, its seconds, the default tile's seconds).

    tokens, rows: of a micro-batch, as the local experts get them; rows are dealt out evenly. The file is written when
    the last product is done.
    """
    found = tuned_tiles().copy()
    for product, (x, sizes, run) in products(device, dtype, experts, hidden, width, tokens, rows).items():
        before = default(product, x)
        seconds = {tile: spent for tile in candidates(before) if (spent := _seconds(partial(run, tile), device))}
        if before not in seconds:
            raise RuntimeError(f"the default tile of {product}, {before}, does not run on {device}")
        best = min(seconds, key=lambda tile: seconds[tile])
        found[key(product, x, sizes)] = list(best)
        yield product, best, seconds[best], seconds[before]
    file = tuned_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(".new")
    draft.write_text(json.dumps(found, indent=1))
    draft.replace(file)
    tuned_tiles.cache_clear()


def candidates(tile: Tile) -> list[Tile]:
    """A tile and its neighbours: half as wide or high, turned, with more or fewer stages, in other orders."""
    m, n, k, warps, stages, group, programs = tile
    neighbours = [
        tile,
        tile._replace(n=n // 2),
        tile._replace(m=m // 2),
        tile._replace(m=n, n=m),
        tile._replace(n=n // 2, warps=max(warps // 2, 1), programs=2 * programs),
        tile._replace(stages=max(stages - 1, 1)),
        tile._replace(stages=stages + 1),
        tile._replace(k=k // 2, stages=stages + 2),
        tile._replace(group=2 * group),
        tile._replace(group=max(group // 2, 1)),
    ]
    return [tile for tile in dict.fromkeys(neighbours) if min(tile.m, tile.n, tile.k) >= 16]


def products(
    device: torch.device, dtype: torch.dtype, E: int, H: int, width: int, T: int, R: int
) -> dict[Product, tuple[Tensor, tuple[int, ...], Callable[[Tile], object]]]:
    """For each product, on random tensors: its first operand and sizes, which name its tile, and the product itself."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype) * 0.1

    x_TH, dy_RH, h_RI, gate_up_R2I = draw(T, H), draw(R, H), draw(R, width), draw(R, 2 * width)
    gate_up, down = draw(E, 2, width, H), draw(E, H, width)
    x, token_R = rows_of(x_TH, torch.randint(T, (R,), device=device))
    weight_R = torch.rand(R, device=device)
    offsets_E = (torch.arange(1, E + 1, device=device) * R // E).to(torch.int32)
    flat, dgate_up, ddown = gate_up.flatten(1, 2), torch.zeros_like(gate_up).flatten(1, 2), torch.zeros_like(down)

    def outer(a: Tensor, b: Tensor, tokens: Tensor | None, out: Tensor) -> Callable[[Tile], None]:
        return lambda tile: sum_outer(a, b, tokens, offsets_E, out, adds=True, tile=tile)

    return {
        "gate_up": (
            x,
            (E, H, width, R),
            lambda tile: multiply_gate_up(x, token_R, weight_R, gate_up, offsets_E, tile),
        ),
        "down": (
            h_RI,
            (E, H, width, R),
            lambda tile: multiply(h_RI, down, offsets_E, transposed=True, product="down", tile=tile),
        ),
        "dh": (
            dy_RH,
            (E, H, width, R),
            lambda tile: multiply_down_backward(dy_RH, down, gate_up_R2I, weight_R, offsets_E, tile),
        ),
        "dx": (
            gate_up_R2I,
            (E, H, 2 * width, R),
            lambda tile: multiply(gate_up_R2I, flat, offsets_E, transposed=False, product="dx", tile=tile),
        ),
        "ddown": (dy_RH, (E, H, width, R), outer(dy_RH, h_RI, None, ddown)),
        "dgate_up": (gate_up_R2I, (E, 2 * width, H, R), outer(gate_up_R2I, x, token_R, dgate_up)),
    }


def _seconds(run: Callable[[], object], device: torch.device) -> float | None:
    """Of one run, the best of three averages; None for a tile that this device has no room for."""
    try:
        run()
    except (OutOfResources, PTXASError):
        return None
    averages = []
    for _ in range(3):
        _wait(device)
        began = time.perf_counter()
        for _ in range(REPEATS):
            run()
        _wait(device)
        averages.append((time.perf_counter() - began) / REPEATS)
    return min(averages)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
