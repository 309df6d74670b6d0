"""A prepared folder gives back what was stored, and whatever was damaged since is named when it is opened."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from optimus_compiler.runtime.data import dataset
from optimus_compiler.runtime.data.dataset import PreparedData
from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.data.prepare import prepare
from tests.runtime.data.conftest import TEXTS, json_lines


@pytest.fixture
def folder(write: Callable[[str, bytes], Path], tmp_path: Path, tokenizer_file: Path) -> Path:
    source = write("a.jsonl", json_lines([*TEXTS, *(f"document {i}" for i in range(40))]))
    prepare([source], tokenizer=tokenizer_file, context_length=8, output=tmp_path / "out", shard_tokens=100)
    return tmp_path / "out"


def stored(folder: Path) -> np.ndarray:
    return np.concatenate([np.load(path) for path in sorted(folder.glob("shard-*.npy"))])


def test_instances_are_read_by_number_in_any_order(folder: Path) -> None:
    data, rows = PreparedData.open(folder), stored(folder)
    assert data.context_length == 8
    assert len(data) == len(rows) > 36  # several shards of 12
    numbers = np.array([len(rows) - 1, 0, 12, 11, 12, 35])
    read = data.read(numbers)
    assert read.dtype == torch.int64
    assert read.tolist() == rows[numbers].tolist()
    assert data.read(numbers[:0]).shape == (0, 8)
    assert data.tokenizer().token_to_id("<|endoftext|>") == data.manifest.eos_id


def test_few_shards_are_mapped_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        pytest.skip("this system does not list a process's maps")
    monkeypatch.setattr(dataset, "OPEN_SHARDS", 2)
    data, rows = PreparedData.open(folder), stored(folder)
    assert len(data.manifest.shards) > 3
    assert maps.read_text().count(f"{folder}/shard-") == 0
    for _ in range(2):
        assert data.read(np.arange(len(data))).tolist() == rows.tolist()
        assert maps.read_text().count(f"{folder}/shard-") == 2


def test_what_is_not_a_prepared_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(DataError, match=r"is not a prepared data folder \(no manifest\.json\)"):
            PreparedData.open(path)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def fewer_rows(path: Path) -> None:
    np.save(path, np.load(path)[1:])


def other_rows(path: Path) -> None:
    np.save(path, np.load(path)[::-1].copy())


def other_dtype(path: Path) -> None:
    np.save(path, np.load(path).astype(np.int32))


def other_shape(path: Path) -> None:
    np.save(path, np.load(path).reshape(8, 12))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("shard-00001.npy", Path.unlink, "is missing"),
        ("shard-00001.npy", truncate, r"is truncated \(318 bytes, not 320\)"),
        ("shard-00001.npy", empty, r"is truncated \(0 bytes"),
        ("shard-00001.npy", lengthen, "has bytes after its end"),
        ("shard-00001.npy", fewer_rows, "is truncated"),
        ("shard-00001.npy", other_rows, "is damaged"),
        ("shard-00001.npy", other_dtype, "has bytes after its end"),
        ("shard-00001.npy", other_shape, r"does not begin as a \.npy file of uint16 \[12, 8\]"),
        ("tokenizer.json", Path.unlink, "is missing"),
        ("tokenizer.json", lengthen, "sha256 differs"),
        ("manifest.json", truncate, "Invalid JSON"),
        ("manifest.json", empty, "Invalid JSON"),
    ],
)
def test_damage_is_found_on_opening_and_named(
    folder: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    damage(folder / name)
    with pytest.raises(DataError, match=message) as caught:
        PreparedData.open(folder)
    assert str(folder / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << byte % 8
    path.write_bytes(data)


def test_a_flipped_bit_is_found_on_opening_wherever_it_is(folder: Path) -> None:
    shard = folder / "shard-00001.npy"
    for byte in range(shard.stat().st_size):
        flip(shard, byte)
        with pytest.raises(DataError, match=r"shard-00001\.npy (does not begin as|is damaged)"):
            PreparedData.open(folder)
        flip(shard, byte)
    assert len(PreparedData.open(folder)) > 36


def test_ranks_share_the_reading_of_all_shards(folder: Path) -> None:
    shards = sorted(folder.glob("shard-*.npy"))
    for number, shard in enumerate(shards):
        flip(shard, 200)
        for rank in range(3):
            if rank == number % 3:
                with pytest.raises(DataError, match=f"{shard.name} is damaged"):
                    PreparedData.open(folder, rank, ranks=3)
            else:
                PreparedData.open(folder, rank, ranks=3)
        flip(shard, 200)


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ('"version": 2', '"version": 1', "version"),
        ('"dtype": "uint16"', '"dtype": "float32"', "dtype"),
        ('"eos_id": 1', '"eos_id": 999999', "contradict"),
        ('"eos": ', '"oes": ', "eos"),
        ('"seed": 0', '"seed": "0"', "seed"),
    ],
)
def test_an_edited_manifest_is_refused(folder: Path, old: str, new: str, where: str) -> None:
    path = folder / "manifest.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(DataError, match=rf"manifest\.json: .*{where}"):
        PreparedData.open(folder)


def test_damage_after_opening_is_found_where_it_can_be(folder: Path) -> None:
    data, path = PreparedData.open(folder), folder / "shard-00000.npy"
    rows = np.load(path)
    rows[3, 3] = 60_000
    np.save(path, rows)
    assert data.read(np.arange(3)).shape == (3, 8)
    with pytest.raises(DataError, match=r"shard-00000\.npy holds token id 60000, outside the vocabulary of \d+"):
        data.read(np.arange(4))
    truncate(folder / "shard-00001.npy")
    with pytest.raises(DataError, match=r"shard-00001\.npy is truncated"):
        data.read(np.array([12]))
