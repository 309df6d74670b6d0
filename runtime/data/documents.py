"""Finds input files and streams their documents; what is damaged comes as a BadDocument, in its place."""

import codecs
import glob
import importlib.util
import io
import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.data.json_line import TextFieldError, copy_text, text_of
from optimus_compiler.runtime.data.parquet import read_rows
from optimus_compiler.runtime.data.streams import DamagedStreamError, open_stream
from optimus_compiler.runtime.data.tokenised import BadDocument

SUFFIXES = (".json.gz", ".jsonl.gz", ".json.zst", ".jsonl.zst", ".json", ".jsonl", ".parquet", ".txt")
PACKAGES = {".zst": ("zstandard", "zstandard"), ".parquet": ("pyarrow", "parquet")}  # suffix: module, our extra
LARGE_LINE = 1 << 22  # bytes; parsed JSON can take 60 times its length, so a longer line is not parsed as a whole
PIECE = 1 << 18  # bytes of a large document held at a time
BLANK = b" \t\r\n"  # as JSON has it
BYTE_ORDER_MARK = codecs.BOM_UTF8


@dataclass(frozen=True)
class Document:
    """One document: its text exactly as stored, its line (from 1), and how many bytes of its file end with it.

    The text of a large document comes in pieces, which can be read until the next document is asked for.
    """

    text: "str | LargeText"
    line: int
    bytes_read: int


class LargeText:
    """The text of a file from the byte `start` on, read in pieces (str, never empty) as often as it is iterated."""

    def __init__(self, file: IO[bytes], start: int = 0) -> None:
        self._file, self._start = file, start

    def __iter__(self) -> Iterator[str]:
        self._file.seek(self._start)
        return _decoded(iter(lambda: self._file.read(PIECE), b""))

    @property
    def share_read(self) -> float:
        """How much of the text the iteration has read, from 0 to 1."""
        return self._file.tell() / max(1, os.fstat(self._file.fileno()).st_size)


def find_files(inputs: Sequence[str | Path]) -> list[Path]:
    """The input files that `inputs` (files, folders, glob patterns) name: absolute, sorted, each real file once.

    A folder stands for all files below it except dot-files; one that cannot be read as documents is an error,
    because skipping it would lose documents silently. Raises DataError for an input that names nothing.
    """
    files: dict[str, Path] = {}  # by real path, so that links and overlapping patterns are read once
    for path in sorted(Path(os.path.abspath(found)) for item in inputs for found in _expand(str(item))):
        _check_readable(path)
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


def _walk(folder: str, above: frozenset[str] = frozenset()) -> Iterator[str]:
    real = os.path.realpath(folder)
    if real in above:  # a link back to a folder around it, whose files are found already
        return
    for entry in os.scandir(folder):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _walk(entry.path, above | {real})
        else:
            yield entry.path


def _check_readable(path: Path) -> None:
    if not path.name.lower().endswith(SUFFIXES):
        raise DataError(
            f"{path} is not a document file: name only files ending in {', '.join(SUFFIXES)}, "
            f"for example with a pattern such as '{path.parent}/*.jsonl'"
        )
    if not path.name.isascii() and os.fsencode(path) != str(path).encode("utf-8", "replace"):
        raise DataError(f"{str(path)!r} has a name that is not UTF-8: rename it")
    if not path.is_file():
        raise DataError(f"{path} is not a file that can be read: remove it, or the link that leads nowhere")
    module, extra = PACKAGES.get(path.suffix.lower(), (None, None))
    if module and importlib.util.find_spec(module) is None:
        raise DataError(f"{path} needs the package {module}: pip install 'optimus-compiler[{extra}]'")


def read_documents(path: Path, text_field: str, scratch: Path) -> Iterator[Document | BadDocument]:
    """Streams the documents of one file: a .txt file is one document, a .parquet file one a row, others one a line.

    Text is passed on unchanged (CRLF, NUL and blank space included), without a byte order mark at the file's start;
    blank lines between JSON objects are skipped. A document is bad when it is not UTF-8, not a JSON object, or has no
    string in `text_field` that can be encoded; the next line is read all the same. Where a compressed stream is
    damaged the file ends, as a bad document at that line; a file of 0 bytes is bad as a whole (line 0).
    Memory does not depend on the size of a document: a large one is copied to a nameless file in `scratch`.
    Raises OSError.
    """
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            yield BadDocument(file=str(path), line=0, cause="the file is empty (0 bytes)")
        elif path.name.lower().endswith(".txt"):
            yield _read_text(path, file)
        elif path.name.lower().endswith(".parquet"):
            yield from _read_rows(path, file, text_field)
        else:
            yield from _read_lines(path, file, text_field, scratch)


def _read_text(path: Path, file: io.BufferedReader) -> Document | BadDocument:
    text = LargeText(file, len(BYTE_ORDER_MARK) if file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK else 0)
    line = 1
    try:
        for piece in text:
            line += piece.count("\n")
    except UnicodeDecodeError as error:
        line += error.object.count(b"\n", 0, error.start)
        return BadDocument(file=str(path), line=line, cause=_cause(error))
    return Document(text, 1, file.tell())


def _read_rows(path: Path, file: io.BufferedReader, text_field: str) -> Iterator[Document | BadDocument]:
    row = 0
    try:
        for row, text in enumerate(read_rows(file, text_field), 1):
            if isinstance(text, str):
                yield Document(text, row, file.tell())
            else:
                yield BadDocument(file=str(path), line=row, cause=_cause(text))
    except DamagedStreamError as error:
        yield BadDocument(file=str(path), line=row + 1, cause=f"{error}; the rest of the file is lost")


def _read_lines(
    path: Path, file: io.BufferedReader, text_field: str, scratch: Path
) -> Iterator[Document | BadDocument]:
    stream = open_stream(path, file)
    number = 1
    try:
        for number in itertools.count(1):
            line = stream.readline(LARGE_LINE)
            if not line:
                return
            whole = line.endswith(b"\n") or len(line) < LARGE_LINE
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            try:
                if not whole:
                    with tempfile.TemporaryFile(dir=scratch, prefix=".") as copy:
                        if _copy_large_line(line, stream, text_field, copy):
                            yield Document(LargeText(copy), number, file.tell())
                elif line := line.strip(BLANK):
                    yield Document(text_of(line.decode("utf-8"), text_field), number, file.tell())
            except (ValueError, RecursionError) as error:
                yield BadDocument(file=str(path), line=number, cause=_cause(error))
    except DamagedStreamError as error:
        yield BadDocument(file=str(path), line=number, cause=f"{error}; the rest of the file is lost")


def _copy_large_line(begun: bytes, stream: io.BufferedReader, text_field: str, copy: IO[bytes]) -> bool:
    rest = _rest_of_line(stream)
    try:
        return copy_text(_decoded(itertools.chain([begun], rest)), text_field, copy)
    finally:
        for _ in rest:  # after a fault, go on to the end of the line
            pass


def _rest_of_line(stream: io.BufferedReader) -> Iterator[bytes]:
    while chunk := stream.readline(PIECE):
        yield chunk
        if chunk.endswith(b"\n"):
            return


def _decoded(chunks: Iterable[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    for chunk in chunks:
        if piece := decoder.decode(chunk):
            yield piece
    decoder.decode(b"", final=True)


def _cause(error: ValueError | RecursionError) -> str:
    match error:
        case UnicodeDecodeError():
            return f"byte 0x{error.object[error.start]:02x} is not UTF-8 ({error.reason})"
        case TextFieldError():
            return str(error)
        case _:  # of JSONDecodeError only the message: its "line 1" counts inside the line
            return f"not a complete JSON object ({getattr(error, 'msg', error)})"
