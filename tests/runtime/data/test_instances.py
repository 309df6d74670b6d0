"""Instances hold what a slow, obvious reading of the rules says: for tails, separate documents and weights."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.data.instances import CutFile, Instances, unweighted, weighted
from optimus_compiler.runtime.data.manifest import HashedFile, Recipe
from optimus_compiler.runtime.data.shuffle import permute
from optimus_compiler.runtime.data.tokenised import TokenisedFile

EOS, SEED = 9, 5
Document = list[int]


def instances_of(documents: Sequence[Document], context: int, tails: str, units: str) -> list[list[int]]:
    """All instances of one file, by the rules, one token after the other."""
    streams = [[token for document in documents for token in document]] if units == "join" else documents
    found = []
    for stream in streams:
        for start in range(0, len(stream), context):
            instance = list(stream[start : start + context])
            if len(instance) == context:
                found.append(instance)
            elif tails == "keep":
                found.append(instance + [EOS] * (context - len(instance)))
    return found


def write_files(folder: Path, files: Sequence[Sequence[Document]]) -> None:
    for number, documents in enumerate(files):
        np.array([token for document in documents for token in document], "<u2").tofile(folder / f"{number:05d}.bin")
        np.save(folder / f"{number:05d}.ends.npy", np.cumsum([len(document) for document in documents], dtype="<i8"))


def cut_all(
    folder: Path, files: Sequence[Sequence[Document]], context: int, tails: str, units: str, weights: Sequence[float]
) -> list[CutFile]:
    recipe = Recipe.model_validate(
        {
            "tokenizer": HashedFile(file="t.json", sha256="0" * 64),
            "eos": "</s>",
            "context_length": context,
            "tails": tails,
            "documents": units,
            "seed": SEED,
        }
    )
    cut = []
    for number, (documents, weight) in enumerate(zip(files, weights, strict=True)):
        record = TokenisedFile(
            file=f"/{number}.txt",
            bytes=1,
            sha256="0" * 64,
            documents=len(documents),
            empty_documents=0,
            tokens=sum(map(len, documents)),
            fast_documents=0,
            reference_documents=0,
            bad_documents=(),
            tokens_sha256="0" * 64,
        )
        cut.append(CutFile.of(folder, number, record, weight, recipe))
    return cut


tokens = st.integers(0, 8)
documents = st.lists(tokens, min_size=1, max_size=12).map(lambda ids: [*ids, EOS])


@settings(max_examples=40, deadline=None)
@given(
    files=st.lists(st.lists(documents, max_size=5), min_size=1, max_size=4),
    context=st.integers(2, 6),
    tails=st.sampled_from(["drop", "keep"]),
    units=st.sampled_from(["join", "separate"]),
    data=st.data(),
)
def test_stored_rows_are_the_permuted_weighted_instances(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[list[Document]],
    context: int,
    tails: str,
    units: str,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    weights = [data.draw(st.sampled_from([0.0, 0.4, 1.0, 1.5, 3.0])) for _ in files]
    write_files(folder, files)
    cut = cut_all(folder, files, context, tails, units, weights)

    expected: list[list[int]] = []
    for number, (contents, weight) in enumerate(zip(files, weights, strict=True)):
        found = instances_of(contents, context, tails, units)
        assert cut[number].instances == len(found)
        count = int(len(found) * weight + 1e-9)
        subset = permute(np.arange(len(found)), max(1, len(found)), SEED, (1 << 63) + number)
        expected += found * (count // max(1, len(found)))
        expected += [found[i] for i in subset[: count % max(1, len(found))]]

    instances = Instances(cut, np.dtype("<u2"), context, EOS, SEED)
    assert len(instances) == len(expected)
    if expected:
        order = permute(np.arange(len(expected)), len(expected), SEED, 0)
        assert instances.read(0, len(expected)).tolist() == [expected[i] for i in order]
        assert instances.read(len(expected) // 2, len(expected)).tolist() == [
            expected[i] for i in order[len(expected) // 2 :]
        ]


def test_an_example_of_each_rule(tmp_path: Path) -> None:
    files = [[[1, 2, 3, EOS], [4, EOS], [5, 6, EOS]]]
    write_files(tmp_path, files)
    expected = {
        ("drop", "join"): [[1, 2, 3, EOS], [4, EOS, 5, 6]],
        ("keep", "join"): [[1, 2, 3, EOS], [4, EOS, 5, 6], [EOS, EOS, EOS, EOS]],
        ("drop", "separate"): [[1, 2, 3, EOS]],
        ("keep", "separate"): [[1, 2, 3, EOS], [4, EOS, EOS, EOS], [5, 6, EOS, EOS]],
    }
    for (tails, units), rows in expected.items():
        cut = cut_all(tmp_path, files, 4, tails, units, [1.0])
        stored = Instances(cut, np.dtype("<u2"), 4, EOS, SEED).read(0, len(rows)).tolist()
        assert sorted(stored) == sorted(rows)


@pytest.mark.parametrize(
    ("instances", "weight", "stored"),
    [(100, 0.29, 29), (10, 0.1, 1), (3, 0.5, 1), (7, 2.0, 14), (5, 0.0, 0), (0, 3.0, 0)],
)
def test_weights_are_read_as_decimals(instances: int, weight: float, stored: int) -> None:
    assert weighted(instances, weight) == stored


def test_a_weight_repeats_whole_files_and_then_a_subset_without_repetition() -> None:
    chosen = unweighted(np.arange(250), 100, 250, SEED, number=3)
    times = np.bincount(chosen, minlength=100)
    assert sorted(times.tolist()) == [2] * 50 + [3] * 50
    other_file = unweighted(np.arange(250), 100, 250, SEED, number=4)
    other_seed = unweighted(np.arange(250), 100, 250, SEED + 1, number=3)
    assert set(chosen[200:]) != set(other_file[200:])
    assert set(chosen[200:]) != set(other_seed[200:])


def test_a_token_file_that_has_become_shorter_is_named(tmp_path: Path) -> None:
    files = [[[1, 2, 3, EOS]]]
    write_files(tmp_path, files)
    cut = cut_all(tmp_path, files, 4, "drop", "join", [1.0])
    (tmp_path / "00000.bin").write_bytes(b"\0" * 7)
    with pytest.raises(DataError, match=r"00000\.bin is shorter than when it was written"):
        Instances(cut, np.dtype("<u2"), 4, EOS, SEED).read(0, 1)
