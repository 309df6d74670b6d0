"""Whatever the inputs hold, every good document is kept once and in order, and every bad one is named."""

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optimus_compiler.runtime.data.errors import DamagedInputError
from optimus_compiler.runtime.data.manifest import Manifest
from optimus_compiler.runtime.data.prepare import prepare
from tests.runtime.data.conftest import TEXTS, json_lines, stored, stream_of

Write = Callable[[str, bytes], Path]
CONTEXT = 4


@dataclass(frozen=True)
class Line:
    """One line of a file: its bytes, and the text of its document, None for none; a line that is bad has neither."""

    data: bytes
    text: str | None = None
    bad: bool = False


texts = st.text(max_size=12) | st.sampled_from(TEXTS)
good = st.builds(
    lambda text, ascii_only, end: Line(json.dumps({"text": text}, ensure_ascii=ascii_only).encode() + end, text),
    texts,
    st.booleans(),
    st.sampled_from([b"\n", b"\r\n"]),
)
blank = st.sampled_from([b"\n", b"\r\n", b"  \n"]).map(Line)
bad = st.sampled_from(
    [
        b'{"text": "half',
        b'{"text": "bad \xff byte"}',
        b'{"txt": "absent"}',
        b'{"text": 5}',
        b'{"text": null}',
        b'["text"]',
        b'{"text": "lone \\ud800 surrogate"}',
        b'{"text": "raw surrogate \xed\xa0\x80"}',
        b"\x00",
        b'{"text": "a"} {"text": "b"}',
    ]
).map(lambda data: Line(data + b"\n", bad=True))


@dataclass(frozen=True)
class File:
    """A file's name and bytes, the documents in it, and the lines that are bad."""

    name: str
    data: bytes
    texts: list[str]
    bad_lines: list[int]


@st.composite
def files(draw: st.DrawFn) -> File:
    lines = draw(st.lists(good | blank | bad, max_size=8))
    data = b"".join(line.data for line in lines)
    name = draw(st.sampled_from(["a.jsonl", "a.json.gz", "a.txt"]))
    if name == "a.txt":
        text = draw(texts)
        return File(name, text.encode(), [text] if text else [], [] if text else [0])
    if name == "a.json.gz":
        middle = draw(st.integers(0, len(data)))
        stream = gzip.compress(data[:middle]) + gzip.compress(data[middle:])  # two members
        cut = draw(st.sampled_from([0, 1, 8, 9, 30]))
        if cut:
            whole = decompressed(stream[:-cut])
            count = whole.count(b"\n")
            kept = lines[:count]
            broken_at = [count + 1]
            return File(name, stream[:-cut], *documents(kept, broken_at))
        return File(name, stream, *documents(lines, []))
    return File(name, data, *documents(lines, [] if data else [0]))


def documents(lines: list[Line], bad_lines: list[int]) -> tuple[list[str], list[int]]:
    return (
        [line.text for line in lines if line.text is not None],
        [number for number, line in enumerate(lines, 1) if line.bad] + bad_lines,
    )


def decompressed(stream: bytes) -> bytes:
    """All bytes of the members of a truncated gzip stream that can be had."""
    data = b""
    while stream:
        member = zlib.decompressobj(wbits=31)
        data += member.decompress(stream) + member.flush()
        stream = member.unused_data
    return data


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(files(), min_size=1, max_size=3))
def test_every_document_is_stored_once_and_in_order_or_named(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path, corpus: list[File]
) -> None:
    folder = tmp_path_factory.mktemp("damage")
    paths = []
    for number, file in enumerate(corpus):
        path = folder / "in" / f"{number}" / file.name
        path.parent.mkdir(parents=True)
        path.write_bytes(file.data)
        paths.append(path)
    wanted_bad = [(str(path), line) for path, file in zip(paths, corpus, strict=True) for line in file.bad_lines]
    streams = [stream_of(file.texts, tokenizer_file) for file in corpus]
    instances = [
        [*stream[i : i + CONTEXT], *[1] * (CONTEXT - len(stream[i : i + CONTEXT]))]
        for stream in streams
        for i in range(0, len(stream), CONTEXT)
    ]

    def run(budget: int) -> Manifest:
        return prepare(
            [folder / "in"],
            tokenizer=tokenizer_file,
            context_length=CONTEXT,
            output=folder / "out",
            tails="keep",
            max_bad_documents=budget,
        )

    if wanted_bad:
        with pytest.raises(DamagedInputError) as raised:
            run(len(wanted_bad) - 1)
        assert [(each.file, each.line) for each in raised.value.bad_documents] == wanted_bad
        assert not (folder / "out").exists()
        for number, stream in enumerate(streams):
            ids = np.fromfile(folder / ".out.partial" / "tokens" / f"{number:05d}.bin", "<u2")
            assert ids.tolist() == stream
    if not instances:
        return
    manifest = run(len(wanted_bad))
    assert sorted(stored(folder / "out").tolist()) == sorted(instances)
    ends = np.load(folder / "out" / "documents.npy")
    assert ends.tolist() == (np.flatnonzero(np.concatenate([[0], *streams])[1:] == 1) + 1).tolist()
    assert [source.counts.bad_documents for source in manifest.sources] == [len(file.bad_lines) for file in corpus]
    listed = folder / "out" / "bad_documents.jsonl"
    records = [json.loads(line) for line in listed.read_text().splitlines()] if wanted_bad else []
    assert [(record["file"], record["line"]) for record in records] == wanted_bad
    assert listed.exists() == bool(wanted_bad)


def test_damage_of_every_kind_is_named_with_its_line_and_the_rest_is_kept(
    write: Write, tmp_path: Path, tokenizer_file: Path
) -> None:
    truncated = gzip.compress(json_lines(["kept", "lost " * 2000]), mtime=0)[:-20]
    path = tmp_path / "in" / "a.json.gz"
    write("b.jsonl", json_lines(["one"]) + b'{"text": "half\n' + json_lines(["two"]))
    write("c.jsonl", json_lines(["three"]) + b'{"text": "\xff"}\n' + json_lines(["four"]))
    write("d.jsonl", b"")
    path.write_bytes(truncated)

    def run(budget: int) -> Manifest:
        return prepare(
            [tmp_path / "in"],
            tokenizer=tokenizer_file,
            context_length=2,
            output=tmp_path / "out",
            tails="keep",
            max_bad_documents=budget,
        )

    with pytest.raises(
        DamagedInputError, match=r"4 bad documents where 3 are allowed; the first is .*a\.json\.gz, line 2"
    ):
        run(3)
    listed = [json.loads(line) for line in (tmp_path / ".out.partial" / "bad_documents.jsonl").read_text().splitlines()]
    named = [(Path(record["file"]).name, record["line"]) for record in listed]
    assert named == [("a.json.gz", 2), ("b.jsonl", 2), ("c.jsonl", 2), ("d.jsonl", 0)]
    assert all(record["cause"] for record in listed)
    counts = run(4).counts
    assert (counts.documents, counts.bad_documents) == (5, 4)
    kept = [stream_of(texts, tokenizer_file) for texts in (["kept"], ["one", "two"], ["three", "four"])]
    rows = [stream[i : i + 2] for stream in kept for i in range(0, len(stream), 2)]
    assert sorted(stored(tmp_path / "out").tolist()) == sorted([*row, 1][:2] for row in rows)


def test_unusual_documents_are_handled_and_counted(write: Write, tmp_path: Path, tokenizer_file: Path) -> None:
    long = "one document that is longer than the context " * 3
    lines = [
        b'{"text": ""}',  # an empty first document
        b'{"text": " \\t\\n "}\r',
        b"",
        b'{"text": "no id"}',
        b"\r",
        b'{"id": "7", "text": "a <|endoftext|> b"}',
        b'{"text": "NUL \\u0000 inside"}',
        json.dumps({"text": long}).encode(),
    ]
    write("a.jsonl", b"\n".join(lines))
    manifest = prepare(
        [tmp_path / "in"], tokenizer=tokenizer_file, context_length=8, output=tmp_path / "out", tails="keep"
    )
    stream = stream_of([" \t\n ", "no id", "a <|endoftext|> b", "NUL \x00 inside", long], tokenizer_file)
    rows = [stream[i : i + 8] for i in range(0, len(stream), 8)]
    rows[-1] += [1] * (8 - len(rows[-1]))
    assert sorted(stored(tmp_path / "out").tolist()) == sorted(rows)
    assert (manifest.counts.documents, manifest.counts.empty_documents, manifest.counts.bad_documents) == (5, 1, 0)
    assert manifest.counts.padding_tokens == 8 * len(rows) - len(stream)
