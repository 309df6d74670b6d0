"""A prepared folder, checked when it is opened: its instances by stored number, and its tokenizer."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.data.files import npy_header
from optimus_compiler.runtime.data.manifest import MANIFEST, TOKENIZER, Manifest
from optimus_compiler.runtime.files import sha256_of

OPEN_SHARDS = 64  # each holds a file descriptor


class PreparedData:
    """The instances of a prepared folder in stored order; at most OPEN_SHARDS of its shards are mapped at a time."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._ends_S = np.cumsum([shard.instances for shard in manifest.shards])
        self._shard = lru_cache(maxsize=OPEN_SHARDS)(self._map_shard)

    @staticmethod
    def open(path: str | Path, rank: int = 0, ranks: int = 1) -> "PreparedData":
        """Opens a folder that `prepare` wrote and checks that it holds the very bytes that were written.

        Every rank checks the manifest and the tokenizer. Shards are read through and compared with their sha256, shard
        i by rank i mod `ranks`: together the ranks find any flipped bit before the first step. At 1.5 GB/s a process
        100 GB take one process a minute, and 4 T tokens of 2 bytes take 3,072 ranks 2 s. Later damage is found only
        where it changes a shard's size or an id leaves the vocabulary.
        Raises DataError naming the file that is missing, damaged or not what the manifest says.
        """
        folder = Path(path)
        data = PreparedData(folder, Manifest.read(folder))
        tokenizer = folder / TOKENIZER
        if not tokenizer.is_file():
            raise DataError(f"{tokenizer} is missing: restore it or prepare the data again")
        if sha256_of(tokenizer) != data.manifest.tokenizer.sha256:
            raise DataError(f"{tokenizer} is not the tokenizer that wrote this data (sha256 differs): restore it")
        for number in range(rank, len(data.manifest.shards), ranks):
            data._map_shard(number)
            shard = data.manifest.shards[number]
            if sha256_of(folder / shard.file) != shard.sha256:
                raise DataError(
                    f"{folder / shard.file} is damaged (its sha256 is not the manifest's): restore it or prepare the "
                    f"data again"
                )
        return data

    @property
    def context_length(self) -> int:
        """Tokens in an instance."""
        return self.manifest.context_length

    @property
    def sha256(self) -> str:
        """Of the manifest, and so of everything in the folder."""
        return sha256_of(self.folder / MANIFEST)

    def __len__(self) -> int:
        """Instances in an epoch."""
        return self.manifest.counts.instances

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that wrote the data, as its file says: for decoding, and for encoding prompts."""
        return Tokenizer.from_file(str(self.folder / TOKENIZER))

    def read(self, stored_B: NDArray[np.int64]) -> Tensor:
        """The instances with these stored numbers, each in [0, len(self)): int64 [B, context_length].

        Raises DataError for an id outside the vocabulary, and for a shard that is missing or has another size.
        """
        shards_B = np.searchsorted(self._ends_S, stored_B, side="right")
        ids_BT = np.empty((len(stored_B), self.context_length), np.int64)
        for number in np.unique(shards_B):
            in_shard_B = shards_B == number
            start = self._ends_S[number - 1] if number else 0
            rows_NT = self._shard(int(number))[stored_B[in_shard_B] - start]
            if rows_NT.max() >= self.manifest.vocab_size:
                raise DataError(
                    f"{self.folder / self.manifest.shards[number].file} holds token id {rows_NT.max()}, outside the "
                    f"vocabulary of {self.manifest.vocab_size}: the shard is damaged, prepare the data again"
                )
            ids_BT[in_shard_B] = rows_NT
        return torch.from_numpy(ids_BT)

    def _map_shard(self, number: int) -> NDArray:
        shard = self.manifest.shards[number]
        path = self.folder / shard.file
        if not path.is_file():
            raise DataError(f"{path} is missing: restore it or prepare the data again")
        dtype, shape = np.dtype(self.manifest.dtype).newbyteorder("<"), (shard.instances, self.context_length)
        header = npy_header(dtype, shape)
        size, expected = path.stat().st_size, len(header) + shape[0] * shape[1] * dtype.itemsize
        if size != expected:
            what = "is truncated" if size < expected else "has bytes after its end"
            raise DataError(f"{path} {what} ({size} bytes, not {expected}): restore it or prepare the data again")
        with open(path, "rb") as file:
            if file.read(len(header)) != header:
                raise DataError(
                    f"{path} does not begin as a .npy file of {self.manifest.dtype} {list(shape)}: restore it or "
                    f"prepare the data again"
                )
            return np.memmap(file, dtype, mode="r", offset=len(header), shape=shape)
