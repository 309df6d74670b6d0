"""Cuts tokenised files into instances and writes them, shuffled by seed, as .npy shards."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optimus_compiler.runtime.data.manifest import Shard
from optimus_compiler.runtime.data.shuffle import permute

BLOCK_BYTES = 1 << 24  # what is gathered in memory at a time


def write_shards(
    folder: Path,
    token_files: Sequence[Path],
    instances: Sequence[int],
    dtype: np.dtype,
    *,
    context_length: int,
    shard_tokens: int,
    seed: int,
) -> list[Shard]:
    """Writes shard-00000.npy, ... into `folder`: [rows, context_length] of `dtype`, at most `shard_tokens` tokens each.

    Token file f (flat ids) holds `instances[f]` whole instances from its start; what follows them is left out. Stored
    row p is instance `permute(p, seed, epoch 0)` of all files in order, so the rows do not depend on `shard_tokens`.
    """
    ends_F = np.cumsum(instances)
    total = int(ends_F[-1])
    rows = shard_tokens // context_length
    shards = []
    for first in range(0, total, rows):
        path = folder / f"shard-{first // rows:05d}.npy"
        last = min(first + rows, total)
        with open(path, "xb") as file:
            header = {"descr": dtype.str, "fortran_order": False, "shape": (last - first, context_length)}
            np.lib.format.write_array_header_1_0(file, header)
            step = max(1, BLOCK_BYTES // (context_length * dtype.itemsize))
            for start in range(first, last, step):
                stored_B = np.arange(start, min(start + step, last))
                block_BT = _gather(permute(stored_B, total, seed, epoch=0), token_files, ends_F, dtype, context_length)
                file.write(block_BT.tobytes())
            file.flush()
            os.fsync(file.fileno())
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        shards.append(Shard(file=path.name, instances=last - first, sha256=sha256))
    return shards


def _gather(
    instances_B: NDArray[np.int64],
    token_files: Sequence[Path],
    ends_F: NDArray[np.int64],
    dtype: np.dtype,
    context_length: int,
) -> NDArray:
    files_B = np.searchsorted(ends_F, instances_B, side="right")
    block_BT = np.empty((len(instances_B), context_length), dtype)
    for f in np.unique(files_B):  # one map at a time: there may be more files than a process can hold open
        start = ends_F[f - 1] if f else 0
        held_IT = np.memmap(token_files[f], dtype, mode="r", shape=(int(ends_F[f] - start), context_length))
        block_BT[files_B == f] = held_IT[instances_B[files_B == f] - start]
    return block_BT
