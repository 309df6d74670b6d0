"""Reads a prepared folder: the batch at a position is a pure function of (seed, epoch, position), whoever asks."""

import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.data.manifest import TOKENIZER, Manifest
from optimus_compiler.runtime.data.shuffle import permute

OPEN_SHARDS = 64  # each holds a file descriptor


class PreparedData:
    """The instances of a prepared folder, in an order that never ends: epoch after epoch, each a fresh permutation."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._ends_S = np.cumsum([shard.instances for shard in manifest.shards])
        self._shard = lru_cache(maxsize=OPEN_SHARDS)(self._open_shard)

    @staticmethod
    def open(path: str | Path) -> "PreparedData":
        """Opens a folder that `prepare` wrote; checks manifest, tokenizer hash, and each shard's shape, type and size.

        Raises DataError naming the file that is missing, damaged or not what the manifest says.
        """
        folder = Path(path)
        data = PreparedData(folder, Manifest.read(folder))
        tokenizer = folder / TOKENIZER
        if not tokenizer.is_file():
            raise DataError(f"{tokenizer} is missing: prepare the data again")
        if hashlib.sha256(tokenizer.read_bytes()).hexdigest() != data.manifest.tokenizer.sha256:
            raise DataError(f"{tokenizer} is not the tokenizer that wrote this data (sha256 differs): restore it")
        for number in range(len(data.manifest.shards)):
            data._shard(number)
        return data

    @property
    def context_length(self) -> int:
        """Tokens in an instance."""
        return self.manifest.context_length

    def __len__(self) -> int:
        """Instances in an epoch."""
        return self.manifest.counts.instances

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that wrote the data, as its file says: for decoding, and for encoding prompts."""
        return Tokenizer.from_file(str(self.folder / TOKENIZER))

    def batch(self, position: int, count: int, seed: int) -> torch.Tensor:
        """Instances number `position` to `position + count - 1` of the run, counted through all epochs.

        int64 [count, context_length]. Epoch 0 is in stored order (which `prepare` shuffled); epoch e > 0 is in the
        order of the permutation keyed by (seed, e). Ranks take their slice by asking for it: nothing else enters.
        Raises DataError for a negative position or count, a seed outside [0, 2^64), and an id outside the vocabulary.
        """
        if position < 0 or count < 0:
            raise DataError(f"no batch of {count} instances at position {position}: neither may be negative")
        if not 0 <= seed < 1 << 64:
            raise DataError(f"seed {seed} is out of range: give one from 0 to 2^64 - 1")
        epochs_B, stored_B = np.divmod(np.arange(position, position + count), len(self))
        for epoch in np.unique(epochs_B[epochs_B > 0]):
            in_epoch_B = epochs_B == epoch
            stored_B[in_epoch_B] = permute(stored_B[in_epoch_B], len(self), seed, int(epoch))
        return torch.from_numpy(self._read(stored_B))

    def _read(self, stored_B: NDArray[np.int64]) -> NDArray[np.int64]:
        shards_B = np.searchsorted(self._ends_S, stored_B, side="right")
        ids_BT = np.empty((len(stored_B), self.context_length), np.int64)
        for number in np.unique(shards_B):
            start = self._ends_S[number - 1] if number else 0
            rows_BT = self._shard(int(number))[stored_B[shards_B == number] - start]
            if rows_BT.max() >= self.manifest.vocab_size:
                raise DataError(
                    f"{self.folder / self.manifest.shards[number].file} holds token id {rows_BT.max()}, outside the "
                    f"vocabulary of {self.manifest.vocab_size}: the shard is damaged, prepare the data again"
                )
            ids_BT[shards_B == number] = rows_BT
        return ids_BT

    def _open_shard(self, number: int) -> NDArray:
        shard = self.manifest.shards[number]
        path = self.folder / shard.file
        if not path.is_file():
            raise DataError(f"{path} is missing: restore it or prepare the data again")
        try:
            ids_IT = np.lib.format.open_memmap(path, mode="r")
        except (ValueError, EOFError) as error:
            raise DataError(f"{path} is truncated or not a .npy file ({error}): restore it") from error
        shape = (shard.instances, self.context_length)
        if ids_IT.shape != shape or ids_IT.dtype != np.dtype(self.manifest.dtype):
            raise DataError(
                f"{path} holds {ids_IT.dtype} {list(ids_IT.shape)}, not the manifest's {self.manifest.dtype} "
                f"{list(shape)}: restore it"
            )
        if path.stat().st_size != ids_IT.offset + ids_IT.nbytes:
            raise DataError(f"{path} has bytes after its end: restore it")
        return ids_IT
