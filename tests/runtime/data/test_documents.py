"""Inputs are found once each and read exactly; damage is named by file and line."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from optimus_compiler.runtime.data.documents import Document, find_files, read_documents
from optimus_compiler.runtime.data.errors import DataError
from tests.runtime.data.conftest import TEXTS, json_lines

Write = Callable[[str, bytes], Path]


def texts_of(path: Path, text_field: str = "text") -> list[str]:
    return [document.text for document in read_documents(path, text_field)]


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


@pytest.mark.parametrize(
    ("name", "message"),
    [("absent.jsonl", "absent.jsonl names no input file"), ("*.txt", "names no input file"), ("", "no input file")],
)
def test_inputs_that_name_nothing_are_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message.replace("*", r"\*")):
        find_files([tmp_path / name] if name else [])


def test_a_folder_with_a_file_that_cannot_be_read_is_refused(write: Write, tmp_path: Path) -> None:
    write("a.txt", b"x")
    write("b.jsonl.zst", b"x")
    with pytest.raises(DataError, match=r"b\.jsonl\.zst is not a document file"):
        find_files([tmp_path / "in"])


@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz", "a.jsonl.gz"])
def test_json_lines_give_every_text_unchanged(write: Write, name: str) -> None:
    path = write(name, json_lines(TEXTS))
    assert texts_of(path) == TEXTS
    assert [document.line for document in read_documents(path)] == list(range(1, len(TEXTS) + 1))
    assert list(read_documents(path))[-1].bytes_read == path.stat().st_size


def test_crlf_blank_lines_other_fields_and_no_last_newline(write: Write) -> None:
    path = write("a.jsonl", b'{"body": "one\\r\\n"}\r\n\r\n  \n{"body": "two", "text": 3}')
    assert texts_of(path, "body") == ["one\r\n", "two"]
    assert [document.line for document in read_documents(path, "body")] == [1, 4]


def test_a_text_file_is_one_document_with_its_bytes_kept(write: Write) -> None:
    assert texts_of(write("a.txt", "é\r\n\x00\n".encode())) == ["é\r\n\x00\n"]


def test_gzip_members_one_after_another_are_all_read(write: Write) -> None:
    path = write("a.json.gz", b"")
    path.write_bytes(gzip.compress(json_lines(["one"])) + gzip.compress(json_lines(["two"])))
    assert texts_of(path) == ["one", "two"]


GOOD = b'{"text": "good"}\n'


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b"", r"a\.jsonl is empty \(0 bytes\)"),
        ("a.txt", b"", r"a\.txt is empty \(0 bytes\)"),
        ("a.jsonl", GOOD + b'{"text": "ha', r"a\.jsonl, line 2: not a complete JSON object \(Unterminated string"),
        ("a.jsonl", GOOD + b'"text"\n', "line 2: a JSON object is needed, found str"),
        (
            "a.jsonl",
            GOOD + b'{"id": 1, "x": 2}',
            r"line 2: field 'text' must be a string and is absent \(found: id, x\)",
        ),
        ("a.jsonl", GOOD + b'{"text": null}', "line 2: field 'text' must be a string and is NoneType"),
        ("a.jsonl", GOOD + b'{"text": "\xff"}', "line 2: byte 0xff is not UTF-8"),
        ("a.jsonl", GOOD + b'{"text": "a\\ud800"}', "line 2: a lone surrogate at character 1"),
        ("a.jsonl", GOOD + b"[" * 100_000, "line 2: not a complete JSON object"),
        ("a.jsonl", GOOD + b'{"n": ' + b"9" * 5000 + b"}", "line 2: not a complete JSON object"),
        ("a.jsonl.gz", GOOD + b'{"text": "\xc3"}', r"a\.jsonl\.gz, line 2: byte 0xc3"),
        ("a.txt", b"one\ntwo\n\x80", r"a\.txt, line 3: byte 0x80"),
    ],
)
def test_damage_is_named_by_file_and_line(write: Write, name: str, data: bytes, message: str) -> None:
    path = write(name, data)
    with pytest.raises(DataError, match=message) as caught:
        texts_of(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kept", ["header", "half", "no trailer", "garbage after", "flipped checksum"])
def test_damaged_gzip_is_an_error_after_the_good_lines(write: Write, kept: str) -> None:
    path = write("a.json.gz", json_lines([str(i) * 9 for i in range(2000)]))
    data = path.read_bytes()
    damaged = {
        "header": data[:8],
        "half": data[: len(data) // 2],
        "no trailer": data[:-8],
        "garbage after": data + b"garbage",
        "flipped checksum": data[:-8] + bytes([data[-8] ^ 1]) + data[-7:],
    }[kept]
    path.write_bytes(damaged)
    read: list[Document] = []
    with pytest.raises(DataError, match=r"a\.json\.gz, line \d+: the gzip stream is damaged") as caught:
        read.extend(read_documents(path))  # keeps what came before the error
    assert f"line {len(read) + 1}:" in str(caught.value)
    assert [document.text for document in read] == [str(i) * 9 for i in range(len(read))]


def test_json_with_a_byte_order_mark_is_named(write: Write) -> None:
    with pytest.raises(DataError, match="line 1: not a complete JSON object"):
        texts_of(write("a.jsonl", b"\xef\xbb\xbf" + json.dumps({"text": "x"}).encode()))
