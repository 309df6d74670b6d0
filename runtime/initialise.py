"""Counter-based weight initialisation: any slice of any parameter is drawn alone, bitwise the same in every layout."""

import hashlib

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


def _uniform(name: str, seed: int, first: int, last: int) -> np.ndarray:
    """Elements [first, last) of a parameter's stream of float64 in (0, 1)."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = np.random.Philox(key=np.frombuffer(digest[:16], dtype=np.uint64))
    block = 4  # a Philox counter yields four 64-bit numbers
    generator.advance(first // block)
    bits = generator.random_raw(last - first // block * block)[first % block :]
    return (bits >> np.uint64(11)) * 2.0**-53 + 2.0**-54
