"""Parquet files are read row by row; what is damaged in them is named by its row."""

from pathlib import Path

import pytest

from optimus_compiler.runtime.data.documents import Document, find_files, read_documents
from optimus_compiler.runtime.data.tokenised import BadDocument
from tests.runtime.data.conftest import TEXTS

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def read(path: Path, text_field: str = "text") -> list[tuple[int, object]]:
    """(row, text or cause) of each document, good or bad."""
    return [
        (item.line, item.text if isinstance(item, Document) else item.cause)
        for item in read_documents(path, text_field, path.parent)
    ]


def write_table(path: Path, columns: dict, **options: object) -> Path:
    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


@pytest.mark.parametrize("options", [{}, {"row_group_size": 7}, {"use_dictionary": False, "compression": "zstd"}])
def test_every_row_is_a_document(tmp_path: Path, options: dict) -> None:
    texts = TEXTS * 20
    path = write_table(tmp_path / "a.parquet", {"id": list(range(len(texts))), "text": texts}, **options)
    assert find_files([tmp_path]) == [path]
    assert read(path) == list(enumerate(texts, 1))


def test_large_strings_and_another_column(tmp_path: Path) -> None:
    body = pyarrow.array(["one", "two" * 100_000], pyarrow.large_string())
    assert read(write_table(tmp_path / "a.parquet", {"body": body}), "body") == [(1, "one"), (2, "two" * 100_000)]


def test_rows_without_a_string_are_bad(tmp_path: Path) -> None:
    nulls = write_table(tmp_path / "a.parquet", {"text": ["one", None, "three"]})
    assert read(nulls) == [(1, "one"), (2, "field 'text' must be a string and is null"), (3, "three")]
    numbers = write_table(tmp_path / "b.parquet", {"text": [1]})
    assert read(numbers) == [(1, "field 'text' must be a string and is int64")]


def test_text_that_is_not_utf8_is_bad(tmp_path: Path) -> None:
    raw = pyarrow.array([b"one", b"\xff", b"three"], pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), 3, raw.buffers())
    path = write_table(tmp_path / "a.parquet", {"text": text})
    assert read(path) == [(1, "one"), (2, "byte 0xff is not UTF-8 (invalid start byte)"), (3, "three")]


def test_an_absent_column_is_named(tmp_path: Path) -> None:
    [(row, cause)] = read(write_table(tmp_path / "a.parquet", {"id": [1], "body": ["x"]}))
    assert row == 1
    assert cause == "field 'text' is absent (found: id, body); the rest of the file is lost"


def test_damage_ends_the_file_after_the_good_rows(tmp_path: Path) -> None:
    texts = [f"{n} " + "word " * 50 for n in range(400)]
    options = {"row_group_size": 100, "compression": "none", "use_dictionary": False, "write_page_checksum": True}
    path = write_table(tmp_path / "a.parquet", {"text": texts}, **options)
    data = bytearray(path.read_bytes())
    data[data.index(b"250 word")] ^= 1
    path.write_bytes(data)
    *good, bad = read_documents(path, "text", tmp_path)
    assert [item.text for item in good if isinstance(item, Document)] == texts[: len(good)]
    assert len(good) == 200
    assert isinstance(bad, BadDocument)
    assert bad.line == 201
    assert bad.cause.startswith("the parquet file is corrupt (")
    path.write_bytes(data[: len(data) // 2])
    [(row, cause)] = read(path)
    assert row == 1
    assert str(cause).startswith("the parquet file is corrupt (")
