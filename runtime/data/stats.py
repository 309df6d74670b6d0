"""What a prepared folder holds, as tables: totals, sources, and how long the documents are."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optimus_compiler.runtime.data.files import read_vector
from optimus_compiler.runtime.data.manifest import Counts, Manifest

BAR = 40  # characters of the histogram's longest bar


def stats(path: str | Path) -> str:
    """The tables of a prepared folder. Raises DataError when its manifest or documents.npy is missing or damaged."""
    folder = Path(path)
    manifest = Manifest.read(folder)
    parts = [_totals(folder, manifest)]
    if manifest.sources:
        parts.append(_sources(manifest))
    if manifest.document_ends is not None and manifest.counts.documents:
        parts.append(length_table(*length_counts(folder / manifest.document_ends.file)))
    return "\n\n".join(parts)


def length_counts(document_ends: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each document length that occurs (tokens, EOS included; ascending), and how many documents have it.

    The memory depends on how many different lengths there are, not on the documents.
    """
    lengths_L, counts_L = np.empty(0, np.int64), np.empty(0, np.int64)
    end = 0
    for ends_D in read_vector(document_ends):
        new_L, new_counts_L = np.unique(np.diff(ends_D, prepend=end), return_counts=True)
        end = ends_D[-1]
        merged = np.concatenate([counts_L, new_counts_L])
        lengths_L, place = np.unique(np.concatenate([lengths_L, new_L]), return_inverse=True)
        counts_L = np.bincount(place, merged).astype(np.int64)
    return lengths_L, counts_L


def quantile(lengths_L: NDArray[np.int64], counts_L: NDArray[np.int64], share: float) -> int:
    """The smallest length that at least `share` of the documents do not exceed."""
    ends_L = np.cumsum(counts_L)
    return int(lengths_L[np.searchsorted(ends_L, share * ends_L[-1])])


def _totals(folder: Path, manifest: Manifest) -> str:
    counts = manifest.counts
    stored = counts.instances * manifest.context_length * np.dtype(manifest.dtype).itemsize
    rows = [
        ("documents", f"{counts.documents:,}"),
        ("empty, left out", f"{counts.empty_documents:,}"),
        ("bad, left out", f"{counts.bad_documents:,}"),
        ("tokens", f"{counts.tokens:,}"),
        ("instances", f"{counts.instances:,} of {manifest.context_length:,} tokens"),
        ("dropped in tails", f"{counts.dropped_tokens:,} tokens"),
        ("padding", f"{counts.padding_tokens:,} tokens"),
        ("shards", f"{len(manifest.shards):,}, {stored:,} bytes of {manifest.dtype}"),
        ("vocabulary", f"{manifest.vocab_size:,}, {manifest.eos} = {manifest.eos_id}"),
        ("seed", f"{manifest.seed}"),
    ]
    if manifest.validation_fraction:
        rows.append(("split", f"{manifest.split}, validation fraction {manifest.validation_fraction}"))
    return "\n".join([str(folder), *(f"  {name:<18}{value}" for name, value in rows)])


def _sources(manifest: Manifest) -> str:
    header = ["source", "weight", "documents", "empty", "bad", "tokens", "instances", "share", "dropped", "padding"]

    def row(name: str, weight: str, counts: Counts) -> list[str]:
        share = f"{counts.instances / max(1, manifest.counts.instances):.1%}"
        numbers = (counts.documents, counts.empty_documents, counts.bad_documents, counts.tokens, counts.instances)
        ends = (counts.dropped_tokens, counts.padding_tokens)
        return [name, weight, *(f"{number:,}" for number in numbers), share, *(f"{number:,}" for number in ends)]

    common = os.path.commonpath([os.path.dirname(source.file) for source in manifest.sources])
    rows = [
        row(os.path.relpath(source.file, common), f"{source.weight:g}", source.counts) for source in manifest.sources
    ]
    return f"sources in {common}\n" + _table([header, *rows, row("all", "", manifest.counts)])


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def length_table(lengths_L: NDArray[np.int64], counts_L: NDArray[np.int64]) -> str:
    """The quantiles of document lengths, and a histogram with a bin for each power of two."""
    documents = int(counts_L.sum())
    mean = int((lengths_L * counts_L).sum()) / documents
    quantiles = [
        f"{name} {quantile(lengths_L, counts_L, q):,}" for name, q in (("median", 0.5), ("p90", 0.9), ("p99", 0.99))
    ]
    summary = [f"min {lengths_L[0]:,}", quantiles[0], f"mean {mean:,.1f}", *quantiles[1:], f"max {lengths_L[-1]:,}"]
    bins_L = np.frexp(lengths_L.astype(np.float64))[1] - 1  # lengths from 2^b to 2^(b+1) - 1
    in_bin = np.bincount(bins_L, counts_L).astype(np.int64)
    bins = range(int(bins_L[0]), len(in_bin))
    rows = _table(
        [["tokens", "documents"], *([f"{1 << b:,} to {(1 << b + 1) - 1:,}", f"{in_bin[b]:,}"] for b in bins)]
    ).splitlines()
    bars = ["", *("  " + "#" * -(-BAR * int(in_bin[b]) // int(in_bin.max())) for b in bins)]
    title = "tokens in a document (EOS included)"
    return "\n".join([title, "  " + "  ".join(summary), *map(str.__add__, rows, bars)])
