"""Inputs are found once each and read exactly; damage is named by file and line, and what is good is kept."""

import gzip
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from optimus_compiler.runtime.data import documents
from optimus_compiler.runtime.data.documents import Document, find_files, read_documents
from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.data.tokenised import BadDocument
from tests.runtime.data.conftest import TEXTS, json_lines

Write = Callable[[str, bytes], Path]
GOOD = b'{"text": "good"}\n'


def read(path: Path, text_field: str = "text") -> list[tuple[int, str] | BadDocument]:
    """(line, text) of each good document, and the bad ones."""
    return [
        (item.line, item.text if isinstance(item.text, str) else "".join(item.text))
        if isinstance(item, Document)
        else item
        for item in read_documents(path, text_field, path.parent)
    ]


def texts_of(path: Path, text_field: str = "text") -> list[str]:
    """The texts of a file without damage."""
    return [item[1] for item in read(path, text_field) if not isinstance(item, BadDocument) or pytest.fail(item.cause)]


def damage_of(path: Path) -> tuple[list[str], int, str]:
    """The good texts, and line and cause of the one bad document."""
    items = read(path)
    [bad] = [item for item in items if isinstance(item, BadDocument)]
    assert bad.file == str(path)
    assert "\n" not in bad.cause
    return [item[1] for item in items if not isinstance(item, BadDocument)], bad.line, bad.cause


def test_overlapping_inputs_and_links_are_read_once_in_sorted_order(write: Write, tmp_path: Path) -> None:
    b, a, c = write("b.jsonl", b"{}"), write("a.txt", b"x"), write("deep/er/c.json.gz", b"{}")
    write(".hidden.txt", b"x")
    write(".git/d.txt", b"x")
    os.symlink(a, tmp_path / "in" / "z.txt")
    folder = tmp_path / "in"
    expected = [a, b, c]
    assert find_files([folder]) == expected
    assert find_files([f"{folder}/*.jsonl", b, folder, f"{folder}/**/*.gz", os.path.relpath(a)]) == expected


def test_a_file_with_glob_characters_in_its_name_is_taken_literally(write: Write) -> None:
    path = write("part[1].txt", b"x")
    assert find_files([str(path)]) == [path]


def test_symlinked_folders_are_read(write: Write, tmp_path: Path) -> None:
    write("a.txt", b"x")
    (tmp_path / "links").mkdir()
    os.symlink(tmp_path / "in", tmp_path / "links" / "in")
    assert find_files([tmp_path / "links"]) == [tmp_path / "links" / "in" / "a.txt"]


def test_a_link_to_a_folder_around_it_is_followed_once(write: Write, tmp_path: Path) -> None:
    inside, beside = write("folder/z.txt", b"x"), write("beside.txt", b"y")
    os.symlink("..", inside.parent / "up")
    assert find_files([inside.parent]) == [inside.parent / "up" / "beside.txt", inside]
    assert find_files([tmp_path / "in"]) == [beside, inside]


def test_a_link_to_nothing_is_refused(write: Write) -> None:
    good = write("a.jsonl", GOOD)
    os.symlink("absent", good.parent / "b.jsonl")
    with pytest.raises(DataError, match=r"b\.jsonl is not a file that can be read: remove it, or the link"):
        find_files([good.parent])


def test_a_name_that_is_not_utf8_is_refused(write: Write) -> None:
    good = write("漢 \u3000.txt", b"x")
    assert find_files([good.parent]) == [good]
    other = os.path.join(os.fsencode(good.parent), b"\xff.txt")
    try:
        open(other, "wb").close()
    except OSError:
        pytest.skip("this file system has no such names")
    with pytest.raises(DataError, match=r"udcff\.txt' has a name that is not UTF-8: rename it"):
        find_files([good.parent])


@pytest.mark.parametrize(
    ("name", "message"),
    [("absent.jsonl", "absent.jsonl names no input file"), ("*.txt", "names no input file"), ("", "no input file")],
)
def test_inputs_that_name_nothing_are_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message.replace("*", r"\*")):
        find_files([tmp_path / name] if name else [])


def test_a_folder_with_a_file_that_cannot_be_read_is_refused(write: Write, tmp_path: Path) -> None:
    write("a.txt", b"x")
    write("b.jsonl.bz2", b"x")
    with pytest.raises(DataError, match=r"b\.jsonl\.bz2 is not a document file"):
        find_files([tmp_path / "in"])


@pytest.mark.parametrize(
    ("name", "extra"), [("a.jsonl.zst", "zstandard"), ("a.JSON.ZST", "zstandard"), ("a.parquet", "parquet")]
)
def test_a_missing_package_is_named_before_work_begins(
    write: Write, monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(DataError, match=rf"needs the package \w+: pip install 'optimus-compiler\[{extra}\]'$"):
        find_files([write(name, b"x")])


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz", "a.jsonl.gz", "A.JSONL"])
def test_json_lines_give_every_text_unchanged(write: Write, name: str) -> None:
    path = write(name, json_lines(TEXTS))
    assert read(path) == list(enumerate(TEXTS, 1))
    last = list(read_documents(path, "text", path.parent))[-1]
    assert isinstance(last, Document)
    assert last.bytes_read == path.stat().st_size


def test_crlf_blank_lines_missing_id_other_fields_and_no_last_newline(write: Write) -> None:
    path = write("a.jsonl", b'{"body": "one\\r\\n"}\r\n\r\n  \n\n{"body": "first", "text": 3, "body": "two"}')
    assert read(path, "body") == [(1, "one\r\n"), (5, "two")]


@pytest.mark.parametrize("data", [b"", b"\n", b" \r\n\n"])
def test_a_byte_order_mark_at_the_start_is_no_text(write: Write, data: bytes) -> None:
    mark = b"\xef\xbb\xbf"
    assert texts_of(write("a.jsonl", mark + data + GOOD + b'{"text": "\xef\xbb\xbfkept"}')) == ["good", "\ufeffkept"]
    assert texts_of(write("a.txt", mark + data + mark)) == [data.decode() + "\ufeff"]
    assert texts_of(write("b.jsonl", mark + data)) == []


def test_a_byte_order_mark_on_another_line_is_damage(write: Write) -> None:
    texts, line, cause = damage_of(write("a.jsonl", GOOD + b"\xef\xbb\xbf" + GOOD))
    assert (texts, line) == (["good"], 2)
    assert "not a complete JSON object" in cause


def test_a_text_file_is_one_document_with_its_bytes_kept(write: Write) -> None:
    path = write("a.txt", "é\r\n\x00\n😀".encode())
    assert read(path) == [(1, "é\r\n\x00\n😀")]
    assert texts_of(write("b.txt", b"\n")) == ["\n"]


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (b'{"text": "ha', r"not a complete JSON object (Unterminated string starting at)"),
        (b'"text"', "a JSON object is needed, found a string"),
        (b'{"id": 1, "x": 2}', "field 'text' is absent (found: id, x)"),
        (b'{"text": null}', "field 'text' must be a string and is null"),
        (b'{"text": "\xff"}', "byte 0xff is not UTF-8 (invalid start byte)"),
        (b'{"text": "\xed\xa0\x80"}', "byte 0xed is not UTF-8 (invalid continuation byte)"),
        (b'{"text": "\xc3', "byte 0xc3 is not UTF-8 (unexpected end of data)"),
        (b'{"text": "a\\ud800"}', "field 'text' holds a lone surrogate, which is no character"),
        (b'{"text": "a\x00"}', "not a complete JSON object (Invalid control character at)"),
        (b"\x00" * 99, "not a complete JSON object (Expecting value)"),
        (b"[" * 100_000, "not a complete JSON object (maximum recursion depth exceeded"),
        (b'{"n": ' + b"9" * 5000 + b"}", "not a complete JSON object (Exceeds the limit (4300 digits)"),
    ],
)
def test_a_bad_line_is_named_and_the_next_is_read(write: Write, line: bytes, cause: str) -> None:
    for name in ("a.jsonl", "a.jsonl.gz"):
        texts, number, found = damage_of(write(name, GOOD + b"\n" + line + b"\n" + GOOD))
        assert (texts, number) == (["good", "good"], 3)
        assert found.startswith(cause)
    assert damage_of(write("a.jsonl", GOOD + line))[:2] == (["good"], 2)  # without a newline at the end


def test_a_bad_text_file_names_the_line(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE", 3)
    assert damage_of(write("a.txt", b"one\ntwo\n3\x80")) == ([], 3, "byte 0x80 is not UTF-8 (invalid start byte)")
    assert damage_of(write("a.txt", b"one\ntwo\xc3")) == ([], 2, "byte 0xc3 is not UTF-8 (unexpected end of data)")


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.json.gz", "a.jsonl.zst", "a.parquet"])
def test_a_file_of_no_bytes_is_bad_as_a_whole(write: Write, name: str) -> None:
    path = write(name, b"")
    path.write_bytes(b"")
    assert damage_of(path) == ([], 0, "the file is empty (0 bytes)")


LARGE_LINES = [
    json.dumps({"id": 1, "text": "é\n\x00 😀 \\" * 20}),
    json.dumps({"text": "first" * 9, "meta": {"text": [1, {}]}}, ensure_ascii=False) + "  \r",
    '{"text": "first and longer", "text": "last"}',
    " " * 60,
    '{"text": "no end and then',
    '{"text": "a bad escape \\x in it", "more": "and a lot to skip"}',
    '{"text": 5, "more": "and a lot more to be skipped"}',
    '{"more": "and a lot more to be skipped", "a": "b"}',
    '{"text": "a lone surrogate \\ud800 in the middle of it"}',
    "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]",
]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 32])
@pytest.mark.parametrize("line", LARGE_LINES)
def test_a_line_above_the_limit_reads_as_below_it(
    write: Write, monkeypatch: pytest.MonkeyPatch, line: str, limit: int
) -> None:
    path = write("a.jsonl", GOOD + line.encode() + b"\n" + GOOD + line.encode())
    expected = read(path)
    monkeypatch.setattr(documents, "LARGE_LINE", limit)
    monkeypatch.setattr(documents, "PIECE", limit)
    for item, wanted in zip(read(path), expected, strict=True):
        if isinstance(wanted, BadDocument):
            assert isinstance(item, BadDocument)
            assert (item.line, item.cause[:20]) == (wanted.line, wanted.cause[:20])
        else:
            assert item == wanted
    assert list(path.parent.iterdir()) == [path]  # nothing is left of the copies


@pytest.mark.parametrize("garbage", [b"\xff" * 99, b"\x00" * 99, b'{"text": "' + b"a" * 90 + b"\xc3(" + b"b" * 90])
def test_garbage_in_a_large_line_is_skipped_to_its_end(
    write: Write, monkeypatch: pytest.MonkeyPatch, garbage: bytes
) -> None:
    monkeypatch.setattr(documents, "LARGE_LINE", 20)
    monkeypatch.setattr(documents, "PIECE", 8)
    texts, line, _ = damage_of(write("a.jsonl", GOOD + garbage + b"\n" + GOOD))
    assert (texts, line) == (["good", "good"], 2)


def test_a_stream_that_breaks_in_a_large_line_is_one_bad_document(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "LARGE_LINE", 40)
    monkeypatch.setattr(documents, "PIECE", 8)
    path = write("a.json.gz", b"")
    for start in (b'{"text": "', b"no JSON "):
        path.write_bytes(gzip.compress(GOOD + start + os.urandom(5000).replace(b"\n", b""))[:-100])
        texts, line, cause = damage_of(path)
        assert (texts, line) == (["good"], 2)
        assert cause.startswith("the gzip stream is truncated")


def test_a_large_text_tells_how_much_of_it_is_read(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE", 5)
    reading = read_documents(write("a.txt", b"0123456789" * 2), "text", Path())
    document = next(reading)  # the file is open until the next is asked for
    assert isinstance(document, Document)
    assert not isinstance(document.text, str)
    assert [(piece, document.text.share_read) for piece in document.text] == [
        ("01234", 0.25),
        ("56789", 0.5),
        ("01234", 0.75),
        ("56789", 1.0),
    ]
