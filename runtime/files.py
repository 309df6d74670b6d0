"""Files that appear whole or not at all and know their sha256."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

CHUNK_BYTES = 1 << 23  # what is held in memory at a time


class HashingWriter:
    """Appends to an open file and keeps the sha256 of all that was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def write(self, data: bytes | memoryview | NDArray) -> int:
        """Appends bytes, or the bytes of a C-contiguous array; returns how many."""
        raw = data.reshape(-1).view(np.uint8).data if isinstance(data, np.ndarray) else memoryview(data)
        self._file.write(raw)
        self._hash.update(raw)
        return raw.nbytes

    def tell(self) -> int:
        """Bytes written so far, to a file that was empty."""
        return self._file.tell()

    @property
    def sha256(self) -> str:
        """Of the bytes written so far."""
        return self._hash.hexdigest()


@contextmanager
def synced_file(path: Path) -> Iterator[HashingWriter]:
    """Writes `path`, whose bytes are on the disk when the block has ended."""
    with open(path, "wb") as file:
        yield HashingWriter(file)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def whole_file(path: Path) -> Iterator[HashingWriter]:
    """Writes `path` under a dot-name and renames it when the block ends; leaves nothing if the block raises."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with synced_file(partial) as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Puts the names in a folder on the disk: what was created, renamed or deleted there stays so."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def sha256_of(path: Path, on_bytes: Callable[[int], None] = lambda count: None) -> str:
    """The sha256 of a file's bytes; `on_bytes` is told how many were read since its last call."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(CHUNK_BYTES):
            digest.update(data)
            on_bytes(len(data))
    return digest.hexdigest()
