"""A pseudo-random permutation of 0..size-1 that is computed element by element, so it takes no memory at any size."""

import numpy as np
from numpy.typing import NDArray

from optimus_compiler.runtime.data.errors import DataError

ROUNDS = 8
MINIMUM_BITS = 6  # a wider domain than a tiny `size` needs: few-bit halves reach only a few of its permutations


def permute(positions_N: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where each position of [0, size) goes under the permutation keyed by (seed, epoch): int64 [N] to int64 [N].

    A balanced Feistel network (Luby and Rackoff, 1988) is a bijection of 2^(2h) numbers; those that land past `size`
    walk on until they are inside (Black and Rogaway, 2002), at most about four steps on average. Integer arithmetic
    alone, with round keys from the raw Philox4x64 stream: the same on every machine and numpy, for ever.
    `seed` and `epoch` are in [0, 2^64). Raises DataError for a position outside [0, size).
    """
    if len(positions_N) and not 0 <= positions_N.min() <= positions_N.max() < size:  # one outside may never walk in
        raise DataError(f"positions {positions_N.min()} to {positions_N.max()} are not all in [0, {size}): give others")
    keys = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(ROUNDS)
    half = np.uint64((max(MINIMUM_BITS, (size - 1).bit_length()) + 1) // 2)
    result_N = _feistel(positions_N.astype(np.uint64), half, keys)
    while (outside_N := result_N >= np.uint64(size)).any():
        result_N[outside_N] = _feistel(result_N[outside_N], half, keys)
    return result_N.astype(np.int64)


def _feistel(value_N: NDArray[np.uint64], half: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    left_N, right_N = value_N >> half, value_N & ((np.uint64(1) << half) - np.uint64(1))
    for key in keys:
        left_N, right_N = right_N, left_N ^ (_mix(right_N ^ key) >> (np.uint64(64) - half))
    return (left_N << half) | right_N


def _mix(value_N: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # splitmix64's finaliser (Steele, Lea and Flood, 2014): every input bit flips every output bit half of the time
    value_N = (value_N ^ (value_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value_N = (value_N ^ (value_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value_N ^ (value_N >> np.uint64(31))
