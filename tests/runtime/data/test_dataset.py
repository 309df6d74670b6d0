"""A batch depends on (seed, epoch, position) alone, and a damaged folder is named when it is opened."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

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


def test_the_first_epoch_is_in_stored_order_whatever_the_batch_size(folder: Path) -> None:
    data = PreparedData.open(folder)
    expected = torch.from_numpy(stored(folder).astype(np.int64))
    assert data.context_length == 8
    assert len(data) == len(expected) > 36
    for size in (1, 5, len(data)):
        starts = range(0, len(data), size)
        batches = [data.batch(start, min(size, len(data) - start), seed=9) for start in starts]
        assert all(batch.dtype == torch.int64 for batch in batches)
        torch.testing.assert_close(torch.cat(batches), expected, rtol=0, atol=0)


def test_every_epoch_holds_every_instance_once_in_an_order_of_its_own(folder: Path) -> None:
    data = PreparedData.open(folder)
    n = len(data)
    epochs = [data.batch(epoch * n, n, seed=0).tolist() for epoch in range(4)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) == 4
    assert data.batch(n, n, seed=1).tolist() != epochs[1]


def test_slices_of_ranks_and_batches_across_an_epochs_end_join_to_the_whole(folder: Path) -> None:
    data = PreparedData.open(folder)
    n = len(data)
    whole = data.batch(0, 3 * n, seed=4)
    torch.testing.assert_close(data.batch(n - 2, n + 4, seed=4), whole[n - 2 : 2 * n + 2], rtol=0, atol=0)
    sliced = [PreparedData.open(folder).batch(2 * n - 6 + rank * 3, 3, seed=4) for rank in range(4)]
    torch.testing.assert_close(torch.cat(sliced), whole[2 * n - 6 : 2 * n + 6], rtol=0, atol=0)
    assert data.batch(5, 0, seed=0).shape == (0, 8)


def test_one_instance_is_enough(tmp_path: Path, tokenizer_file: Path, write: Callable[[str, bytes], Path]) -> None:
    prepare([write("a.txt", b"a")], tokenizer=tokenizer_file, context_length=2, output=tmp_path / "out")
    data = PreparedData.open(tmp_path / "out")
    assert len(data) == 1
    assert data.batch(0, 7, seed=0).tolist() == stored(tmp_path / "out").tolist() * 7


@pytest.mark.parametrize(("position", "count", "seed"), [(-1, 1, 0), (0, -1, 0), (0, 1, -1), (0, 1, 1 << 64)])
def test_arguments_out_of_range_are_refused(folder: Path, position: int, count: int, seed: int) -> None:
    with pytest.raises(DataError):
        PreparedData.open(folder).batch(position, count, seed)


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


def other_rows(path: Path) -> None:
    np.save(path, np.load(path)[1:])


def other_dtype(path: Path) -> None:
    np.save(path, np.load(path).astype(np.int32))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("shard-00001.npy", Path.unlink, "is missing"),
        ("shard-00001.npy", truncate, "is truncated"),
        ("shard-00001.npy", empty, "is truncated"),
        ("shard-00001.npy", lengthen, "has bytes after its end"),
        ("shard-00001.npy", other_rows, r"holds uint16 \[11, 8\], not the manifest's uint16 \[12, 8\]"),
        ("shard-00001.npy", other_dtype, "holds int32"),
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


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ('"version": 1', '"version": 2', "version"),
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


def test_an_id_outside_the_vocabulary_is_refused(folder: Path) -> None:
    path = folder / "shard-00000.npy"
    rows = np.load(path)
    rows[3, 3] = 60_000
    np.save(path, rows)
    data = PreparedData.open(folder)
    assert data.batch(0, 3, seed=0).shape == (3, 8)
    with pytest.raises(DataError, match=r"shard-00000\.npy holds token id 60000"):
        data.batch(0, 4, seed=0)
