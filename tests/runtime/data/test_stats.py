"""stats prints what was counted: totals, a row for each source, and the distribution of document lengths."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_compiler.runtime.data import files
from optimus_compiler.runtime.data.files import write_vector
from optimus_compiler.runtime.data.prepare import prepare
from optimus_compiler.runtime.data.stats import length_counts, length_table, quantile, stats
from tests.runtime.data.conftest import TEXTS, ids_of, json_lines


def test_tables_of_a_prepared_folder(tmp_path: Path, tokenizer_file: Path) -> None:
    for name, texts in (("wiki/a.jsonl", TEXTS * 2), ("books/b.jsonl", TEXTS[:1])):
        (tmp_path / "in" / name).parent.mkdir(parents=True)
        (tmp_path / "in" / name).write_bytes(json_lines(texts))
    (tmp_path / "in" / "wiki" / "a.jsonl").write_bytes(json_lines(TEXTS * 2) + b"{\n")
    counts = prepare(
        [tmp_path / "in"],
        tokenizer=tokenizer_file,
        context_length=8,
        output=tmp_path / "out",
        weights={"*/wiki/*": 2.5},
        max_bad_documents=1,
    ).counts
    text = stats(tmp_path / "out")
    lines = text.splitlines()
    cells = {line.split()[0]: line.split() for line in lines if line}
    assert f"  tokens            {counts.tokens:,}" in lines
    assert f"  instances         {counts.instances:,} of 8 tokens" in lines
    assert f"sources in {tmp_path / 'in'}" in lines
    header = ["source", "weight", "documents", "empty", "bad", "tokens", "instances", "share", "dropped", "padding"]
    assert cells["source"] == header
    assert cells["wiki/a.jsonl"][:5] == ["wiki/a.jsonl", "2.5", "10", "2", "1"]
    assert cells["books/b.jsonl"][:5] == ["books/b.jsonl", "1", "1", "0", "0"]
    assert cells["all"][1:5] == ["11", "2", "1", f"{counts.tokens:,}"]
    lengths = [len(ids_of(text, tokenizer_file)) + 1 for text in [*TEXTS * 2, TEXTS[0]] if text]
    assert f"  min {min(lengths)}  median {sorted(lengths)[5]}  mean {np.mean(lengths):.1f}  p90 " in text
    assert f"max {max(lengths)}" in text
    bars = {line.split("  ")[1]: line.split() for line in lines if line.endswith("#")}
    assert sum(int(bar[-2]) for bar in bars.values()) == len(lengths)
    assert max(len(bar[-1]) for bar in bars.values()) == 40


@pytest.mark.parametrize(
    ("length", "row"), [(2, "2 to 3"), (3, "2 to 3"), (4, "4 to 7"), (1023, "512 to 1,023"), (1024, "1,024 to 2,047")]
)
def test_histogram_bins_are_powers_of_two(tmp_path: Path, length: int, row: str) -> None:
    write_vector(tmp_path / "documents.npy", 2, [np.array([length, 2 * length])])
    *_, header, only = length_table(*length_counts(tmp_path / "documents.npy")).splitlines()
    assert header.split() == ["tokens", "documents"]
    assert " ".join(only.split()) == f"{row} 2 {'#' * 40}"


@given(lengths=st.lists(st.integers(2, 50), min_size=1, max_size=60), share=st.sampled_from([0.5, 0.9, 0.99]))
def test_quantiles_are_those_of_all_lengths(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], share: float
) -> None:
    path = tmp_path_factory.mktemp("ends") / "documents.npy"
    write_vector(path, len(lengths), [np.cumsum(lengths)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "CHUNK_BYTES", 64)  # many pieces
        lengths_L, counts_L = length_counts(path)
    assert np.repeat(lengths_L, counts_L).tolist() == sorted(lengths)
    assert quantile(lengths_L, counts_L, share) == np.quantile(lengths, share, method="inverted_cdf")
