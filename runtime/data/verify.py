"""Checks a prepared folder against its manifest: every byte, every id, and every count that follows from the others."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from optimus_compiler.runtime.data.errors import DataError, counted
from optimus_compiler.runtime.data.files import read_vector
from optimus_compiler.runtime.data.instances import Units, cut, unweighted, weighted
from optimus_compiler.runtime.data.manifest import TOKENIZER, Manifest, Shard, Source
from optimus_compiler.runtime.files import CHUNK_BYTES, sha256_of

CHUNK = 1 << 18  # instances looked up at a time
OnBytes = Callable[[int], None]


def verify(path: str | Path, progress: Callable[[int, int], None] = lambda done, total: None) -> list[str]:
    """One sentence for each fault of a prepared folder; an empty list when there is none.

    Checked are the size and sha256 of every file the manifest names, token ids against the vocabulary, the tokenizer's
    vocabulary and EOS, document ends against the counts of each source, and the EOS tokens in all shards against what
    documents, tails and weights make of them. `progress` is called with (bytes read, bytes in all).
    Raises DataError when there is no valid manifest.
    """
    folder = Path(path)
    manifest = Manifest.read(folder)
    hashed = [(folder / TOKENIZER, manifest.tokenizer.sha256)]
    for listed in (manifest.document_ends, manifest.bad_documents):
        if listed is not None:
            hashed.append((folder / listed.file, listed.sha256))
    shards = [folder / shard.file for shard in manifest.shards]
    size = sum(file.stat().st_size for file in [*(file for file, _ in hashed), *shards] if file.is_file())
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        progress(done, size)

    faults: list[str] = []
    for file, sha256 in hashed:
        faults += _hash_faults(file, sha256, on_bytes)
    whole = not faults
    eos: int | None = 0
    for file, shard in zip(shards, manifest.shards, strict=True):
        found, eos_in_shard = _read_shard(file, shard, manifest, on_bytes)
        faults += found
        eos = None if found or eos is None else eos + eos_in_shard
    if whole:  # what follows reads these files
        faults += _tokenizer_faults(folder / TOKENIZER, manifest)
        faults += _bad_document_faults(folder, manifest)
        faults += _document_faults(folder, manifest, eos)
    return faults


def _hash_faults(file: Path, sha256: str, on_bytes: OnBytes) -> list[str]:
    if not file.is_file():
        return [f"{file} is missing"]
    if sha256_of(file, on_bytes) != sha256:
        return [f"{file} is not what was written ({file.stat().st_size} bytes with another sha256)"]
    return []


def _read_shard(file: Path, shard: Shard, manifest: Manifest, on_bytes: OnBytes) -> tuple[list[str], int]:
    """The faults of a shard, and the EOS tokens in it."""
    if not file.is_file():
        return [f"{file} is missing"], 0
    dtype, shape = np.dtype(manifest.dtype).newbyteorder("<"), (shard.instances, manifest.context_length)
    faults, eos, largest = [], 0, -1
    with open(file, "rb") as opened:
        try:
            np.lib.format.read_magic(opened)
            held_shape, _, held_dtype = np.lib.format.read_array_header_1_0(opened)
        except ValueError as error:
            return [f"{file} is not a .npy file ({error})"], 0
        start = opened.tell()
        held, wanted = file.stat().st_size, start + shape[0] * shape[1] * dtype.itemsize
        if (held_shape, held_dtype) != (shape, dtype):
            return [f"{file} holds {held_dtype} {list(held_shape)}, not {dtype} {list(shape)}"], 0
        if held != wanted:
            return [f"{file} is {'truncated' if held < wanted else 'too long'}: {held} bytes, not {wanted}"], 0
        opened.seek(0)
        digest = hashlib.sha256(opened.read(start))
        on_bytes(start)
        while data := opened.read(CHUNK_BYTES):
            ids = np.frombuffer(data, dtype)
            largest = max(largest, int(ids.max()))
            eos += int((ids == manifest.eos_id).sum())
            digest.update(data)
            on_bytes(len(data))
    if digest.hexdigest() != shard.sha256:
        faults.append(f"{file} is not what was written (another sha256)")
    if largest >= manifest.vocab_size:
        faults.append(f"{file} holds token id {largest}, outside the vocabulary of {manifest.vocab_size}")
    return faults, eos


def _tokenizer_faults(file: Path, manifest: Manifest) -> Iterator[str]:
    tokenizer = Tokenizer.from_file(str(file))
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if size != manifest.vocab_size:
        yield f"{file} has a vocabulary of {size}, the manifest says {manifest.vocab_size}"
    if (eos_id := tokenizer.token_to_id(manifest.eos)) != manifest.eos_id:
        yield f"{file} has id {eos_id} for {manifest.eos}, the manifest says {manifest.eos_id}"


def _bad_document_faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    listed = 0
    if manifest.bad_documents is not None:
        listed = (folder / manifest.bad_documents.file).read_bytes().count(b"\n")
    if listed != manifest.counts.bad_documents:
        yield f"{folder} lists {counted(listed, 'bad document')}, the manifest counts {manifest.counts.bad_documents}"


def _document_faults(folder: Path, manifest: Manifest, eos: int | None) -> Iterator[str]:
    """Without `eos` (shards are damaged) the tokens in them are not compared."""
    if manifest.document_ends is None:
        return
    file = folder / manifest.document_ends.file
    try:
        documents = sum(map(len, read_vector(file)))
    except DataError as error:
        yield str(error)
        return
    if documents != manifest.counts.documents:
        yield f"{file} holds {documents} documents, the manifest counts {manifest.counts.documents}"
        return
    ends_D = np.load(file, mmap_mode="r") if documents else np.empty(0, np.int64)
    first = before = expected_eos = 0
    for number, source in enumerate(manifest.sources):
        source_ends_D = ends_D[first : first + source.counts.documents] - before
        first, before = first + source.counts.documents, before + source.counts.tokens
        lengths_D = np.diff(source_ends_D, prepend=0)
        if lengths_D.sum() != source.counts.tokens or (lengths_D < 1).any():
            yield f"{file} does not divide the {source.counts.tokens} tokens of {source.file} into documents"
            return
        instances, eos_of_source = _expected(source_ends_D, source, number, manifest)
        expected_eos += eos_of_source
        unfilled = source.counts.tokens - instances * manifest.context_length
        wanted = (weighted(instances, source.weight), max(0, unfilled), max(0, -unfilled))
        if wanted != (source.counts.instances, source.counts.dropped_tokens, source.counts.padding_tokens):
            yield f"the instances, dropped and padding tokens of {source.file} should be {', '.join(map(str, wanted))}"
    if eos is not None and eos != expected_eos:
        yield f"the shards of {folder} hold {eos} EOS tokens, the documents make {expected_eos}"


def _expected(ends_D: NDArray[np.int64], source: Source, number: int, manifest: Manifest) -> tuple[int, int]:
    """How many instances a source gives before weighting, and how many EOS tokens are in its stored ones."""
    if not len(ends_D):
        return 0, 0
    ends_U = ends_D if manifest.documents == "separate" else ends_D[-1:]
    (instances_U,) = cut([ends_U], manifest.context_length, manifest.tails)
    units, instances = Units(ends_U, instances_U, manifest.context_length), int(instances_U[-1])
    eos = 0
    for first in range(0, source.counts.instances if instances else 0, CHUNK):
        stored_B = np.arange(first, min(first + CHUNK, source.counts.instances))
        starts_B, lengths_B = units.locate(
            unweighted(stored_B, instances, source.counts.instances, manifest.seed, number)
        )
        ended_B = np.searchsorted(ends_D, starts_B + lengths_B, "right") - np.searchsorted(ends_D, starts_B, "right")
        eos += int((ended_B + manifest.context_length - lengths_B).sum())
    return instances, eos
