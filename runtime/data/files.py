"""Whole files whose full disk is a DataError, and int64 .npy vectors in pieces."""

import errno
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optimus_compiler.runtime import files
from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.files import CHUNK_BYTES, HashingWriter

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def whole_file(path: Path) -> Iterator[HashingWriter]:
    """Writes `path` under a dot-name and renames it when the block ends; leaves nothing if the block raises.

    Raises DataError that names `path` when the disk is full.
    """
    with disk_full_named(path), files.whole_file(path) as file:
        yield file


@contextmanager
def disk_full_named(path: Path | str) -> Iterator[None]:
    """Turns the OSError of a full disk (or quota, or file size limit) into a DataError that names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise DataError(
            f"{error.filename or path} could not be written ({error.strerror}): free some space and run the same "
            f"command again, it continues where it stopped"
        ) from error


def npy_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """What a .npy file (version 1.0) of C-contiguous `shape` starts with."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": dtype.str, "fortran_order": False, "shape": shape})
    return header.getvalue()


def write_vector(path: Path, length: int, pieces: Iterable[NDArray[np.int64]]) -> str:
    """Writes `pieces`, `length` elements in all, as one int64 .npy vector; returns the file's sha256."""
    with whole_file(path) as file:
        file.write(npy_header(np.dtype("<i8"), (length,)))
        for piece in pieces:
            file.write(piece.astype("<i8"))
        return file.sha256


def read_vector(path: Path) -> Iterator[NDArray[np.int64]]:
    """The int64 .npy vector `path` in pieces that fit memory; raises DataError when it is anything else."""
    try:
        with open(path, "rb") as file:
            version = np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            if version != (1, 0) or len(shape) != 1 or dtype != np.dtype("<i8"):
                raise DataError(f"{path} holds {dtype} {list(shape)}, not an int64 vector: restore it")
            left = shape[0]
            while left:
                piece_N = np.fromfile(file, "<i8", min(left, CHUNK_BYTES // 8))
                if not len(piece_N):
                    raise DataError(f"{path} is truncated: {left} of {shape[0]} numbers are missing: restore it")
                left -= len(piece_N)
                yield piece_N
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{path} is truncated or not a .npy file ({error}): restore it") from error
