"""The tokenised stage's files: for each input its ids, where documents end, and a record that says both are whole."""

import hashlib
import os
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import numpy as np
from pydantic import Field, ValidationError

from optimus_compiler.runtime.data.files import npy_header, whole_file
from optimus_compiler.runtime.files import sha256_of
from optimus_compiler.runtime.records import SHA256, Record

ENDS_HELD = 1 << 16  # document ends kept in memory before they are written


class BadDocument(Record):
    """A document that was left out: where it is and what is wrong with it."""

    file: str
    line: int = Field(ge=0)  # from 1; a row of a parquet file; 0: the whole file
    cause: str


class TokenisedFile(Record):
    """What became of one input file."""

    file: str  # absolute
    bytes: int = Field(ge=0)
    sha256: str = SHA256  # of the input's bytes
    documents: int = Field(ge=0)  # written
    empty_documents: int = Field(ge=0)  # without a token: read and not written
    tokens: int = Field(ge=0)  # EOS included
    fast_documents: int = Field(ge=0)  # encoded by tiktoken alone
    reference_documents: int = Field(ge=0)  # encoded by tokenizers, wholly or in part
    bad_documents: tuple[BadDocument, ...]
    tokens_sha256: str = SHA256  # of the file of ids


def ids_file(folder: Path, number: int) -> Path:
    """Flat ids without a header, the EOS token after each document."""
    return folder / f"{number:05d}.bin"


def ends_file(folder: Path, number: int) -> Path:
    """int64 .npy [documents]: where in the ids each document ends, its EOS included, ascending."""
    return folder / f"{number:05d}.ends.npy"


def record_file(folder: Path, number: int) -> Path:
    """The `TokenisedFile`; it is there only when the other two are whole."""
    return folder / f"{number:05d}.json"


def read_tokenised(folder: Path, number: int, dtype: np.dtype) -> TokenisedFile | None:
    """The record of input file `number`, or None when it is not there, or the files have other sizes or other ids."""
    try:
        record = TokenisedFile.model_validate_json(record_file(folder, number).read_bytes())
        whole = (
            ids_file(folder, number).stat().st_size == record.tokens * dtype.itemsize
            and ends_file(folder, number).stat().st_size == len(_ends_header(record.documents)) + 8 * record.documents
            and sha256_of(ids_file(folder, number)) == record.tokens_sha256
        )
    except (FileNotFoundError, ValidationError):
        return None
    return record if whole else None


class TokenWriter(AbstractContextManager["TokenWriter"]):
    """Writes the files of input file `number`; nothing of them is seen before `commit`, and nothing stays without it.

    Until then the files carry the process's number in their names: a process that outlives its run cannot spoil those
    of the next. `documents` and `tokens` count what has been written (the document in progress too).
    """

    def __init__(self, folder: Path, number: int, dtype: np.dtype) -> None:
        self._folder, self._number, self._dtype = folder, number, dtype
        self._targets = [ids_file(folder, number), ends_file(folder, number)]
        self._partials = [path.with_name(f".{path.name}.{os.getpid()}") for path in self._targets]
        self._pending_ends = array("q")
        self._last_end = 0
        self._hash = hashlib.sha256()
        self._hash_at_last_end = self._hash.copy()
        self.documents = self.tokens = 0

    def __enter__(self) -> "TokenWriter":
        self._open = ExitStack()
        self._open.callback(self._remove_partials)
        self._ids = self._open.enter_context(open(self._partials[0], "wb"))
        self._ends = self._open.enter_context(open(self._partials[1], "wb"))
        self._ends.write(_ends_header(0))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _remove_partials(self) -> None:
        for path in self._partials:
            path.unlink(missing_ok=True)

    def write(self, ids: Sequence[int]) -> None:
        """Adds ids to the document in progress."""
        data = np.array(ids, self._dtype).tobytes()
        self._ids.write(data)
        self._hash.update(data)
        self.tokens += len(ids)

    @property
    def document_tokens(self) -> int:
        """How many ids the document in progress has."""
        return self.tokens - self._last_end

    def end_document(self) -> None:
        """Makes what was written since the last end a document."""
        self._last_end = self.tokens
        self._hash_at_last_end = self._hash.copy()
        self.documents += 1
        self._pending_ends.append(self.tokens)
        if len(self._pending_ends) == ENDS_HELD:
            self._write_ends()

    def drop_document(self) -> None:
        """Takes back what was written since the last end."""
        self._ids.seek(self._last_end * self._dtype.itemsize)
        self._ids.truncate()
        self._hash = self._hash_at_last_end.copy()
        self.tokens = self._last_end

    def _write_ends(self) -> None:
        self._ends.write(np.array(self._pending_ends, "<i8").tobytes())
        del self._pending_ends[:]

    @property
    def sha256(self) -> str:
        """Of the ids written so far."""
        return self._hash.hexdigest()

    def commit(self, record: TokenisedFile) -> None:
        """Gives the files their names, the record last."""
        self._write_ends()
        self._ends.seek(0)
        self._ends.write(_ends_header(self.documents))
        for file, partial, target in zip((self._ids, self._ends), self._partials, self._targets, strict=True):
            file.flush()
            os.fsync(file.fileno())
            partial.replace(target)
        with whole_file(record_file(self._folder, self._number)) as record_out:
            record_out.write(record.model_dump_json().encode() + b"\n")


def _ends_header(documents: int) -> bytes:
    """The same length for every number of documents: numpy leaves room for the number to grow."""
    return npy_header(np.dtype("<i8"), (documents,))
