"""Counter-based weight initialisation: any slice of any parameter is drawn alone, bitwise the same in every layout."""

import hashlib
import itertools
import math

import numpy as np
import torch
from torch import Tensor

CHUNK = 2**20  # elements drawn at a time


def draw(name: str, shape: tuple[int, ...], seed: int, std: float, start: int = 0, stop: int | None = None) -> Tensor:
    """Elements [start, stop) of the flattened parameter, fp32 on cpu, [stop - start].

    Biases are zeros, norms ones, everything else is normal(0, std): a Philox stream keyed by (seed, name), advanced to
    an element's flat index, uniform to normal by the inverse CDF.
    """
    stop = torch.Size(shape).numel() if stop is None else stop
    if name.endswith("bias"):
        return torch.zeros(stop - start)
    if len(shape) == 1 and "norm" in name.rpartition(".")[0]:
        return torch.ones(stop - start)
    drawn = torch.empty(stop - start)
    for first in range(start, stop, CHUNK):
        last = min(first + CHUNK, stop)
        normal = torch.special.ndtri(torch.from_numpy(_uniform(name, seed, first, last)))
        drawn[first - start : last - start] = normal * std
    return drawn


def draw_box(name: str, shape: tuple[int, ...], seed: int, std: float, box: tuple[slice, ...]) -> Tensor:
    """The part of a parameter that `box` cuts out (a slice with ends for each dimension), fp32 on cpu, in its shape."""
    sizes = [cut.stop - cut.start for cut in box]
    cut_axes = [axis for axis, size in enumerate(sizes) if size != shape[axis]]
    axis = cut_axes[-1] if cut_axes else 0  # from here on, what the box holds is one run of the flat parameter
    run, pitch = math.prod(sizes[axis:]), math.prod(shape[axis:])
    offset = box[axis].start * math.prod(shape[axis + 1 :]) if box else 0
    outer = itertools.product(*(range(cut.start, cut.stop) for cut in box[:axis]))
    rows = [sum(i * math.prod(shape[d + 1 : axis]) for d, i in enumerate(index)) for index in outer]
    runs = [draw(name, shape, seed, std, row * pitch + offset, row * pitch + offset + run) for row in rows]
    return torch.cat(runs).view(sizes)


def _uniform(name: str, seed: int, first: int, last: int) -> np.ndarray:
    """Elements [first, last) of a parameter's stream of float64 in (0, 1)."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = np.random.Philox(key=np.frombuffer(digest[:16], dtype=np.uint64))
    block = 4  # a Philox counter yields four 64-bit numbers
    generator.advance(first // block)
    bits = generator.random_raw(last - first // block * block)[first % block :]
    return (bits >> np.uint64(11)) * 2.0**-53 + 2.0**-54
