"""verify finds nothing in what prepare wrote, under every option, and names every fault that is put there."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.data.manifest import Manifest
from optimus_compiler.runtime.data.prepare import prepare
from optimus_compiler.runtime.data.stats import stats
from optimus_compiler.runtime.data.verify import verify
from tests.runtime.data.conftest import EOS, TEXTS, json_lines


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files, one with a bad line."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.jsonl").write_bytes(json_lines(TEXTS * 3))
    (folder / "b.jsonl").write_bytes(json_lines(TEXTS[::-1]) + b"{bad\n")
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, corpus: Path, tokenizer_file: Path) -> Path:
    """A folder that is whole."""
    folder = tmp_path_factory.mktemp("prepared") / "out"
    prepare_to(folder, corpus, tokenizer_file)
    return folder


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


def prepare_to(folder: Path, corpus: Path, tokenizer: Path, **options: Any) -> None:
    prepare(
        [corpus],
        tokenizer=tokenizer,
        context_length=8,
        output=folder,
        shard_tokens=400,
        max_bad_documents=1,
        **options,
    )


@pytest.mark.parametrize("tails", ["drop", "keep"])
@pytest.mark.parametrize("documents", ["join", "separate"])
@pytest.mark.parametrize("weight", [None, 0.0, 2.3])
def test_what_prepare_wrote_has_no_fault(
    tmp_path: Path, corpus: Path, tokenizer_file: Path, tails: str, documents: str, weight: float | None
) -> None:
    weights = {} if weight is None else {"*/b.jsonl": weight}
    prepare_to(tmp_path / "out", corpus, tokenizer_file, tails=tails, documents=documents, weights=weights)
    calls: list[tuple[int, int]] = []
    assert verify(tmp_path / "out", lambda done, total: calls.append((done, total))) == []
    files = [path for path in (tmp_path / "out").iterdir() if path.name != "manifest.json"]
    size = sum(path.stat().st_size for path in files)
    assert calls == sorted(calls)
    assert calls[-1] == (size, size)


def test_a_flipped_bit_is_found_wherever_it_is(copy: Path) -> None:
    for path in sorted(copy.iterdir()):
        whole = path.read_bytes()
        for place in (3, len(whole) // 2, len(whole) - 1):
            data = bytearray(whole)
            data[place] ^= 1
            path.write_bytes(data)
            assert first_fault(copy).startswith(str(path))
        path.write_bytes(whole)
    assert verify(copy) == []


def first_fault(folder: Path) -> str:
    """The one without which nothing else is checked, or the first that is listed."""
    try:
        return verify(folder)[0]
    except DataError as error:
        return str(error)


def test_values_of_the_manifest_that_nothing_else_contradicts_are_checked_too(copy: Path) -> None:
    path = copy / "manifest.json"
    whole = path.read_bytes()
    for damaged_bytes in (whole.replace(b"a.jsonl", b"c.jsonl"), whole.replace(b'"seed": 0', b'"seed": 8'), whole[:-1]):
        assert damaged_bytes != whole
        path.write_bytes(damaged_bytes)
        with pytest.raises(DataError, match=r"manifest\.json is not what was written \(another sha256\): restore it"):
            verify(copy)


def test_all_faults_are_listed(copy: Path) -> None:
    first, second, third = sorted(copy.glob("shard-*.npy"))[:3]
    first.unlink()
    size, third_size = second.stat().st_size, third.stat().st_size
    second.write_bytes(second.read_bytes()[:-5])
    third.write_bytes(third.read_bytes() + b"\0")
    (copy / "documents.npy").write_bytes(b"")
    (copy / "tokenizer.json").unlink()
    assert verify(copy)[:5] == [
        f"{copy / 'tokenizer.json'} is missing",
        f"{copy / 'documents.npy'} is not what was written (0 bytes with another sha256)",
        f"{first} is missing",
        f"{second} is truncated: {size - 5} bytes, not {size}",
        f"{third} is too long: {third_size + 1} bytes, not {third_size}",
    ]


def damaged(folder: Path, shard: int, change: Callable[[np.ndarray], None]) -> list[str]:
    """The faults after `change` of a shard's rows, with a manifest that has the new sha256."""
    path = sorted(folder.glob("shard-*.npy"))[shard]
    rows = np.load(path)
    change(rows)
    np.save(path, rows)
    return rehashed(folder, path)


def rehashed(folder: Path, path: Path) -> list[str]:
    manifest = json.loads((folder / "manifest.json").read_text())
    for listed in [*manifest["shards"], manifest["document_ends"], manifest["bad_documents"]]:
        if listed["file"] == path.name:
            listed["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    write_manifest(folder, manifest)
    return verify(folder)


def write_manifest(folder: Path, record: dict[str, Any]) -> None:
    """One that knows its own sha256."""
    fields = {name: value for name, value in record.items() if name != "sha256"}
    Manifest.model_validate_json(json.dumps(fields)).write(folder)


def test_an_id_outside_the_vocabulary_is_named(copy: Path) -> None:
    def change(rows: np.ndarray) -> None:
        rows[1, 2] = 60_000

    (fault, *_) = damaged(copy, 1, change)
    assert fault.endswith("shard-00001.npy holds token id 60000, outside the vocabulary of 300")


def test_a_lost_end_of_document_is_missed(copy: Path) -> None:
    def change(rows: np.ndarray) -> None:
        rows[rows == EOS] = 5

    (fault,) = damaged(copy, 0, change)
    assert fault.startswith(f"the shards of {copy} hold ")
    assert "EOS tokens, the documents make" in fault


def test_document_ends_that_do_not_fit_the_counts_are_named(copy: Path) -> None:
    path = copy / "documents.npy"
    ends = np.load(path)
    np.save(path, ends[:-1])
    (fault,) = rehashed(copy, path)
    assert fault == f"{path} holds {len(ends) - 1} documents, the manifest counts {len(ends)}"
    ends[14] += 1  # the last document of the first file
    np.save(path, ends)
    (fault,) = rehashed(copy, path)
    assert f"{path} does not divide the " in fault


@pytest.mark.parametrize("name", ["instances", "dropped_tokens"])
def test_counts_that_do_not_follow_from_the_documents_are_named(copy: Path, name: str) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    one, other = (source["counts"] for source in manifest["sources"])
    one[name] += 1
    other[name] -= 1
    write_manifest(copy, manifest)
    faults = verify(copy)
    assert [fault.split(" should be ")[0].rsplit("/", 1)[1] for fault in faults[:2]] == ["a.jsonl", "b.jsonl"]


def test_other_vocabulary_and_other_number_of_bad_documents_are_named(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest.update(vocab_size=301, eos_id=2)
    (copy / "bad_documents.jsonl").write_text("")
    write_manifest(copy, manifest)
    faults = rehashed(copy, copy / "bad_documents.jsonl")
    assert faults[:3] == [
        f"{copy / 'tokenizer.json'} has a vocabulary of 300, the manifest says 301",
        f"{copy / 'tokenizer.json'} has id 1 for <|endoftext|>, the manifest says 2",
        f"{copy} lists 0 bad documents, the manifest counts 1",
    ]


def test_shards_of_unknown_sources_are_checked_and_described_without_them(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest.update(sources=[], document_ends=None)
    write_manifest(copy, manifest)
    assert verify(copy) == []
    assert stats(copy).splitlines()[-1].split() == ["seed", "0"]


def test_a_folder_without_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a prepared data folder"):
        verify(tmp_path)
