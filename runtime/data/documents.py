"""Finds input files and streams their documents, naming file and line of anything that is damaged."""

import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from optimus_compiler.runtime.data.errors import DataError

SUFFIXES = (".json.gz", ".jsonl.gz", ".jsonl", ".txt")


@dataclass(frozen=True)
class Document:
    """One document: its text exactly as stored, its line (from 1), and how many bytes of its file have been read."""

    text: str
    line: int
    bytes_read: int


def find_files(inputs: Sequence[str | Path]) -> list[Path]:
    """The input files that `inputs` (files, folders, glob patterns) name: absolute, sorted, each real file once.

    A folder stands for all files below it except dot-files; one that cannot be read as documents is an error,
    because skipping it would lose documents silently. Raises DataError for an input that names nothing.
    """
    files: dict[str, Path] = {}  # by real path, so that links and overlapping patterns are read once
    for path in sorted(Path(os.path.abspath(found)) for item in inputs for found in _expand(str(item))):
        if not path.name.lower().endswith(SUFFIXES):
            raise DataError(
                f"{path} is not a document file: name only files ending in {', '.join(SUFFIXES)}, "
                f"for example with a pattern such as '{path.parent}/*.jsonl'"
            )
        files.setdefault(os.path.realpath(path), path)
    if not files:
        raise DataError("no input file was named: give files, folders or patterns")
    return list(files.values())


def _expand(item: str) -> list[str]:
    matches = [item] if os.path.exists(item) else glob.glob(item, recursive=True)
    files = [file for match in matches for file in (_walk(match) if os.path.isdir(match) else [match])]
    if not files:
        raise DataError(f"{item} names no input file: check the path or pattern")
    return files


def _walk(folder: str) -> Iterator[str]:
    def refuse(error: OSError) -> NoReturn:  # os.walk skips what it cannot list unless told otherwise
        raise error

    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(parent, name) for name in names if not name.startswith("."))


def read_documents(path: Path, text_field: str = "text") -> Iterator[Document]:
    """Streams the documents of one file: a .txt file is one document, the others hold one JSON object a line.

    Text is passed on unchanged (CRLF, NUL and blank space included); blank lines between JSON objects are skipped.
    Raises DataError, naming file and line, for an empty file, a damaged gzip stream, bytes that are not UTF-8, a line
    that is not a JSON object, and a `text_field` that is absent, not a string, or not encodable (lone surrogate).
    """
    with open(path, "rb") as raw:
        if os.fstat(raw.fileno()).st_size == 0:
            raise DataError(f"{path} is empty (0 bytes): restore it or leave it out of the inputs")
        if path.name.lower().endswith(".txt"):
            data = raw.read()
            yield Document(_decode(data, path, line=1), 1, len(data))
            return
        lines = gzip.GzipFile(fileobj=raw) if path.name.lower().endswith(".gz") else raw
        for number, line in _numbered_lines(lines, path):
            if line.strip():
                yield Document(_text_of(line, path, number, text_field), number, raw.tell())


def _numbered_lines(lines: IO[bytes] | gzip.GzipFile, path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        for line in lines:
            number += 1
            yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}, line {number + 1}: the gzip stream is damaged ({error}): restore the file") from error


def _decode(data: bytes, path: Path, line: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}, line {line}: byte 0x{data[error.start]:02x} is not UTF-8 ({error.reason}): re-encode the file"
        ) from error


def _text_of(data: bytes, path: Path, line: int, text_field: str) -> str:
    decoded = _decode(data, path, line)
    try:
        record = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        cause = getattr(error, "msg", error)  # without "line 1", which json counts inside this line
        raise DataError(f"{path}, line {line}: not a complete JSON object ({cause}): repair the line") from error
    if not isinstance(record, dict):
        raise DataError(f"{path}, line {line}: a JSON object is needed, found {type(record).__name__}: repair the line")
    text = record.get(text_field)
    if not isinstance(text, str):
        found = f"is {type(text).__name__}" if text_field in record else f"is absent (found: {', '.join(record)})"
        raise DataError(f"{path}, line {line}: field {text_field!r} must be a string and {found}: name the text field")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{path}, line {line}: a lone surrogate at character {error.start} of {text_field!r}: repair the line"
        ) from error
    return text
