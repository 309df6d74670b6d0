"""Turns a folder that Intel's Optimus-LM prepared into ours: the same instances in the same order."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.data.files import disk_full_named, npy_header, whole_file, write_vector
from optimus_compiler.runtime.data.manifest import (
    DOCUMENT_ENDS,
    Counts,
    HashedFile,
    Manifest,
    Shard,
    Source,
    total,
)
from optimus_compiler.runtime.data.optimus_layout import IdFile, OptimusLayout
from optimus_compiler.runtime.data.text_tokenizer import TextTokenizer
from optimus_compiler.runtime.data.working_folder import LOCK, is_vacant, working_folder
from optimus_compiler.runtime.files import sha256_of

SEED = 42  # with which Optimus-LM draws its shuffling order
MOST_COMPARED = 1 << 16  # instances of the shards that are compared with the token files
BLOCK_TOKENS = 1 << 22  # what is held in memory at a time (one instance at the least)
IMPORT = "import"  # where the result grows in the working folder
Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, how much there is


def import_optimus(
    folder: str | Path,
    *,
    tokenizer: str | Path,
    output: str | Path,
    eos: str | None = None,
    layout: str | None = None,
    shard_tokens: int = 1 << 26,
    progress: Progress = lambda stage, done, total: None,
    report: Callable[[str], None] = lambda sentence: None,
) -> Manifest:
    """Writes the prepared folder `output` from what Optimus-LM left in `folder` (see `optimus_layout`).

    The shards are copied, in the smallest dtype; without shards, the instances come from the token files by the
    shuffling order. Token files, where present, also give the sources and the ends of documents; up to `MOST_COMPARED`
    instances of the shards, evenly spread, are compared with them. `layout` ("f2903_c2048") chooses where `folder`
    holds several; `eos` names the token that ends documents where the tokenizer does not make it plain. `progress` is
    called with (stage, done, total), and `report` with a sentence on what was compared. Without token files the counts
    are those of the shards. `output` is whole or absent.
    Raises DataError for missing, damaged or contradictory files, or another tokenizer's.
    """
    folder, output = Path(folder), Path(os.path.realpath(output))
    loaded = TextTokenizer.load(Path(tokenizer), eos)
    found = OptimusLayout.find(folder, layout)
    if shard_tokens < found.context_length:
        raise DataError(f"a shard of {shard_tokens} tokens holds no instance of {found.context_length}: make it larger")
    if not is_vacant(output):
        raise DataError(f"{output} exists and is not an empty folder: name another output or delete it")
    report(_compare(found))
    with working_folder(output) as working, disk_full_named(working):
        if others := {path.name for path in working.iterdir()} - {LOCK, IMPORT}:
            raise DataError(f"{working} holds an unfinished run ({min(others)}): finish it, or delete the folder")
        result = working / IMPORT
        shutil.rmtree(result, ignore_errors=True)  # of an import that was killed
        try:
            result.mkdir()
            manifest = _write(result, found, loaded, shard_tokens, progress)
            result.rename(output)
        finally:
            shutil.rmtree(result, ignore_errors=True)
    return manifest


def _compare(found: OptimusLayout) -> str:
    """Compares shards with token files and says how far; raises DataError for an instance that differs."""
    if not found.shards:
        return f"{found.folder} has no shards: they are made from its token files and shuffling order"
    if not found.token_files or found.order is None:
        return f"{found.folder} has no token files or no shuffling order: its shards are taken as they are"
    compared = min(MOST_COMPARED, found.instances)
    positions_P = np.arange(compared) * found.instances // compared
    step = max(1, BLOCK_TOKENS // found.context_length)
    for first in range(0, compared, step):
        positions_B = positions_P[first : first + step]
        differ_B = (found.read(positions_B) != found.read_by_order(positions_B)).any(axis=1)
        if differ_B.any():
            position = int(positions_B[differ_B.argmax()])
            raise DataError(
                f"{found.holder(position)} does not hold the instance of tokenized_data that the shuffling order "
                f"puts at position {position}: restore it, or urls.txt, which says the order of the files"
            )
    return f"{compared:,} of {found.instances:,} instances were compared with the token files"


def _write(
    result: Path, found: OptimusLayout, loaded: TextTokenizer, shard_tokens: int, progress: Progress
) -> Manifest:
    sources = tuple(_sources(found, loaded, progress))
    counts, ends = total(source.counts for source in sources), None
    if sources:
        ends = write_vector(result / DOCUMENT_ENDS, counts.documents, _document_ends(found, loaded.eos_id))
    shards, eos_tokens = _write_shards(result, found, loaded, shard_tokens, progress)
    if not sources:
        if eos_tokens == 0:
            raise DataError(
                f"{found.folder} holds no {loaded.eos} (id {loaded.eos_id}): give the tokenizer it was made with"
            )
        tokens = found.instances * found.context_length
        counts = Counts(documents=eos_tokens, empty_documents=0, tokens=tokens, instances=found.instances)
    loaded.copy(result)
    manifest = Manifest(
        tokenizer=HashedFile(file=loaded.path.name, sha256=loaded.sha256),
        eos=loaded.eos,
        context_length=found.context_length,
        seed=SEED,
        shard_tokens=shard_tokens,
        dtype="uint16" if loaded.dtype.itemsize == 2 else "uint32",
        vocab_size=loaded.vocab_size,
        eos_id=loaded.eos_id,
        counts=counts,
        sources=sources,
        shards=tuple(shards),
        document_ends=HashedFile(file=DOCUMENT_ENDS, sha256=ends) if ends else None,
    )
    manifest.write(result)
    return manifest


def _sources(found: OptimusLayout, loaded: TextTokenizer, progress: Progress) -> Iterator[Source]:
    done, size = 0, sum(file.tokens for file in found.token_files)
    for file in found.token_files:
        yield _source(file, loaded, found.context_length)
        done += file.tokens
        progress("reading token files", done, size)


def _source(file: IdFile, loaded: TextTokenizer, context_length: int) -> Source:
    """What a token file holds; raises DataError when its ids are not this tokenizer's."""
    documents, last = 0, loaded.eos_id
    for ids in file.blocks(BLOCK_TOKENS):
        _check_ids(ids, loaded, lambda number: file.path, 0)
        documents += int((ids == loaded.eos_id).sum())
        last = int(ids[-1])
    if last != loaded.eos_id:
        raise DataError(
            f"{file.path} ends with token {last}, not with {loaded.eos} ({loaded.eos_id}): give the tokenizer it was "
            f"made with and its --eos, or restore it"
        )
    instances, dropped = divmod(file.tokens, context_length)
    counts = Counts(
        documents=documents, empty_documents=0, tokens=file.tokens, instances=instances, dropped_tokens=dropped
    )
    return Source(file=str(file.path.absolute()), sha256=sha256_of(file.path), counts=counts)


def _check_ids(ids: NDArray[np.int32], loaded: TextTokenizer, holder: Callable[[int], Path], first: int) -> None:
    """Raises DataError for an id outside the vocabulary, naming the file that holds that row, counted from `first`."""
    outside = (ids < 0) | (ids >= loaded.vocab_size)
    if outside.any():
        row = int(outside.reshape(len(ids), -1).any(axis=1).argmax())
        raise DataError(
            f"{holder(first + row)} holds token id {ids[outside][0]}, outside the tokenizer's vocabulary of "
            f"{loaded.vocab_size}: give the tokenizer it was made with, or restore it"
        )


def _document_ends(found: OptimusLayout, eos_id: int) -> Iterator[NDArray[np.int64]]:
    before = 0
    for file in found.token_files:
        for ids in file.blocks(BLOCK_TOKENS):
            yield before + 1 + np.flatnonzero(ids == eos_id)
            before += len(ids)


def _write_shards(
    result: Path, found: OptimusLayout, loaded: TextTokenizer, shard_tokens: int, progress: Progress
) -> tuple[list[Shard], int]:
    """Writes the shards; returns them and how many EOS tokens they hold."""
    rows, block = shard_tokens // found.context_length, max(1, BLOCK_TOKENS // found.context_length)
    shards: list[Shard] = []
    eos_tokens = 0
    for first in range(0, found.instances, rows):
        last = min(first + rows, found.instances)
        path = result / f"shard-{len(shards):05d}.npy"
        with whole_file(path) as file:
            file.write(npy_header(loaded.dtype, (last - first, found.context_length)))
            for start in range(first, last, block):
                end = min(start + block, last)
                ids_BC = found.read(np.arange(start, end))
                _check_ids(ids_BC, loaded, found.holder, start)
                eos_tokens += int((ids_BC == loaded.eos_id).sum())
                file.write(ids_BC.astype(loaded.dtype))
                progress("writing shards", end, found.instances)
        shards.append(Shard(file=path.name, instances=last - first, sha256=file.sha256))
    return shards, eos_tokens
