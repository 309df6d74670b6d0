"""Compressed streams are read to their last frame, and damage is told from an end with nothing before it lost."""

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from optimus_compiler.runtime.data import documents
from optimus_compiler.runtime.data.documents import Document, read_documents
from optimus_compiler.runtime.data.streams import DamagedStreamError, open_stream
from optimus_compiler.runtime.data.tokenised import BadDocument

LINES = [b"line %d of a stream that compresses\n" % number for number in range(3000)]
DATA = b"".join(LINES)


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress(data)


Compress = Callable[[bytes], bytes]


@pytest.fixture(params=["gz", "zst"])
def compressed(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Compress]:
    """A file's path, and what compresses for it."""
    return tmp_path / f"a.jsonl.{request.param}", gzip.compress if request.param == "gz" else zstd


def lines_of(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from open_stream(path, file)


def damaged_lines_of(path: Path) -> tuple[list[bytes], str]:
    read: list[bytes] = []
    with pytest.raises(DamagedStreamError) as caught:
        read.extend(lines_of(path))  # keeps what came before the error
    return read, str(caught.value)


def test_frames_one_after_another_are_all_read(compressed: tuple[Path, Compress]) -> None:
    path, compress = compressed
    path.write_bytes(compress(DATA))
    assert list(lines_of(path)) == LINES
    cut = len(DATA) // 3 + 5  # inside a line
    path.write_bytes(compress(DATA[:cut]) + compress(b"") + compress(DATA[cut:]) + compress(b"end\n"))
    assert list(lines_of(path)) == [*LINES, b"end\n"]
    path.write_bytes(b"".join(compress(line) for line in LINES[:200]))
    assert list(lines_of(path)) == LINES[:200]


def test_every_truncation_is_seen(compressed: tuple[Path, Compress]) -> None:
    path, compress = compressed
    first, second = compress(b"".join(LINES[:3])), compress(LINES[3] + LINES[4])
    for cut in range(1, len(first) + len(second)):
        path.write_bytes((first + second)[:cut])
        if cut == len(first):
            assert list(lines_of(path)) == LINES[:3]
            continue
        read, cause = damaged_lines_of(path)
        assert read == LINES[: len(read)]
        assert len(read) >= (3 if cut > len(first) else 0)
        assert "is truncated" in cause


def test_lines_before_a_truncation_are_given(compressed: tuple[Path, Compress]) -> None:
    path, compress = compressed
    frame = compress(DATA)
    path.write_bytes(compress(LINES[0]) + frame[: len(frame) - 4])  # the end mark or the checksum
    read, cause = damaged_lines_of(path)
    assert read == [LINES[0], *LINES]
    assert "is truncated" in cause


def test_a_wrong_checksum_and_garbage_behind_come_after_all_that_decodes(compressed: tuple[Path, Compress]) -> None:
    path, compress = compressed
    frame = compress(DATA)
    at = -8 if path.suffix == ".gz" else -1
    flipped = bytearray(frame)
    flipped[at] ^= 1
    for damaged in (flipped, frame + b"garbage", frame + bytes(8)):
        path.write_bytes(compress(LINES[0]) + damaged)
        read, cause = damaged_lines_of(path)
        assert read == [LINES[0], *LINES]
        assert cause.startswith(("the gzip stream is", "the zstd stream is"))


def test_lines_before_a_corrupt_block_are_given(tmp_path: Path) -> None:
    """As zlib itself decodes them, a byte at a time."""
    path = tmp_path / "a.jsonl.gz"
    damaged = bytearray(gzip.compress(DATA))
    damaged[len(damaged) // 2] ^= 0xFF
    path.write_bytes(damaged)
    decoder, decoded = zlib.decompressobj(wbits=31), list[bytes]()
    with pytest.raises(zlib.error):
        decoded.extend(decoder.decompress(bytes([byte])) for byte in damaged)
    expected = b"".join(decoded)
    read, _ = damaged_lines_of(path)
    assert len(read) > 1000
    assert b"".join(read) == expected[: expected.rindex(b"\n") + 1]


def test_what_does_not_look_compressed_is_damage(compressed: tuple[Path, Compress]) -> None:
    path, _ = compressed
    path.write_bytes(DATA)
    read, cause = damaged_lines_of(path)
    assert read == []
    assert "is corrupt" in cause


def test_zstd_of_a_skippable_frame_and_of_unknown_size(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "a.jsonl.zst"
    stream = zstandard.ZstdCompressor().compressobj()
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"abcd"
    path.write_bytes(skippable + stream.compress(DATA) + stream.flush() + skippable)
    assert list(lines_of(path)) == LINES


def test_a_zstd_window_too_large_for_memory_is_refused(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "a.jsonl.zst"
    parameters = zstandard.ZstdCompressionParameters(window_log=28)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path.write_bytes(stream.compress(DATA) + stream.flush())
    read, cause = damaged_lines_of(path)
    assert read == []
    assert "too much memory" in cause


def test_a_damaged_stream_is_a_bad_document_after_the_good_ones(compressed: tuple[Path, Compress]) -> None:
    path, compress = compressed
    good = b"".join(b'{"text": "%d"}\n' % number for number in range(100))
    path.write_bytes(compress(good) + compress(good)[:-3])
    items = list(read_documents(path, "text", path.parent))
    assert [item.text for item in items if isinstance(item, Document)] == [str(n) for n in range(100)] * 2
    kind = "gzip" if path.suffix == ".gz" else "zstd"
    cause = f"the {kind} stream is truncated: it ends before its end mark; the rest of the file is lost"
    assert items[-1] == BadDocument(file=str(path), line=201, cause=cause)


def test_a_break_inside_a_line_is_named_by_that_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n') + gzip.compress(b'{"text": "b"', mtime=0)[:-2])
    for limit in (documents.LARGE_LINE, 5):
        monkeypatch.setattr(documents, "LARGE_LINE", limit)
        first, bad = read_documents(path, "text", tmp_path)
        assert isinstance(first, Document)
        assert isinstance(bad, BadDocument)
        assert bad.line == 2
        assert "truncated" in bad.cause
