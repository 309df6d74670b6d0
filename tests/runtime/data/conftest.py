"""A small byte-level tokenizer trained here, and writers of input files."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.byte_level import train_byte_level

EOS = 1  # of the tokenizer below
TEXTS = [
    "The quick brown fox jumps over the lazy dog.\r\nTwice.",
    "",
    " \n\t ",
    "an end <|endoftext|> that is no end, and a <pad> that is none",
    "naïve café — 漢字, \u2028 and a NUL \x00 inside",
    "a long one: " + "word after word " * 40,
]


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE of about 300 tokens, <pad> = 0, <|endoftext|> = 1; its file asks for truncation and padding."""
    tokenizer = train_byte_level(TEXTS, 300, ["<pad>", "<|endoftext|>"])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=64)
    path = tmp_path_factory.mktemp("tokenizer") / "tiny.json"
    tokenizer.save(str(path))
    return path


def json_lines(texts: Sequence[str]) -> bytes:
    """One JSON object a line, as dolma writes them."""
    return b"".join(json.dumps({"id": str(i), "text": text}).encode() + b"\n" for i, text in enumerate(texts))


def ids_of(text: str, tokenizer_file: Path) -> list[int]:
    """What the document must become, by a tokenizer that has no special tokens at all."""
    record = json.loads(tokenizer_file.read_text())
    record.update(added_tokens=[], truncation=None, padding=None)
    return Tokenizer.from_str(json.dumps(record)).encode(text).ids


def stream_of(texts: Sequence[str], tokenizer_file: Path) -> list[int]:
    """What the documents of a file must become: EOS after each, none for an empty one."""
    return [token for text in texts if text for token in [*ids_of(text, tokenizer_file), EOS]]


def stored(folder: Path) -> np.ndarray:
    """All rows of a prepared folder, in stored order."""
    return np.concatenate([np.load(path, mmap_mode="r") for path in sorted(folder.glob("shard-*.npy"))])


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, bytes], Path]:
    """write(name, data) puts a file below tmp_path/in, gzipped if its name says so."""

    def write_file(name: str, data: bytes) -> Path:
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
        return path

    return write_file
