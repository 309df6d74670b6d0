"""Prepares a corpus for pretraining: tokenise each file, cut into instances, shuffle, shard, commit by one rename."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optimus_compiler.runtime.data.documents import find_files
from optimus_compiler.runtime.data.encode import Encoder
from optimus_compiler.runtime.data.errors import DamagedInputError, DataError, counted
from optimus_compiler.runtime.data.files import disk_full_named, read_vector, whole_file, write_vector
from optimus_compiler.runtime.data.instances import CutFile, Instances
from optimus_compiler.runtime.data.manifest import (
    BAD_DOCUMENTS,
    DOCUMENT_ENDS,
    MANIFEST,
    Counts,
    Documents,
    HashedFile,
    Manifest,
    Recipe,
    Source,
    Tails,
    total,
)
from optimus_compiler.runtime.data.plan import Input, Plan, weigh
from optimus_compiler.runtime.data.shards import write_shards
from optimus_compiler.runtime.data.text_tokenizer import TextTokenizer
from optimus_compiler.runtime.data.tokenised import BadDocument, TokenisedFile, ends_file
from optimus_compiler.runtime.data.workers import tokenise_files
from optimus_compiler.runtime.data.working_folder import RESULT, SHARDS, TOKENS, begin, is_vacant, working_folder
from optimus_compiler.runtime.files import sha256_of

Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, how much there is


def prepare(
    inputs: Sequence[str | Path],
    *,
    tokenizer: str | Path,
    context_length: int,
    output: str | Path,
    workers: int = 1,
    seed: int = 0,
    text_field: str = "text",
    shard_tokens: int = 1 << 26,
    eos: str | None = None,
    tails: Tails = "drop",
    documents: Documents = "join",
    weights: Mapping[str, float] | None = None,
    max_bad_documents: int = 0,
    progress: Progress = lambda stage, done, total: None,
    report: Callable[[str], None] = lambda sentence: None,
) -> Manifest:
    """Writes the folder `output`: shards, manifest.json, documents.npy, tokenizer.json. Its bytes depend on the inputs
    and options alone, not on `workers`, nor on whether it was done in one run or in many that were killed.

    `inputs` are files, folders or patterns (`documents.find_files`). Each file's documents are tokenised, EOS after
    each, and cut into instances of `context_length` tokens: joined, or separately. Tails that fill no instance are
    dropped, as in the paper's pipeline (Optimus-LM), or kept. `weights` maps patterns (fnmatch on absolute paths) to
    how often a file's instances are stored (1 where none matches). `progress` is called with (stage, done, total), and
    `report` with sentences about the run that the manifest does not hold.

    All is written to the dot-folder beside `output` and renamed at the end, so `output` is whole or absent. A run that
    was killed or failed is continued by another with the same arguments; one that ended well is found and kept.
    Raises DamagedInputError for more than `max_bad_documents` bad documents, DataError or OSError for anything else.
    """
    output = Path(os.path.realpath(output))  # a rename would replace a link, and "." has no name
    _check_arguments(context_length, workers, seed, shard_tokens, max_bad_documents)
    files = find_files(inputs)
    _check_output(output, inputs)
    loaded = TextTokenizer.load(Path(tokenizer), eos)
    plan = Plan(
        tokenizer=HashedFile(file=loaded.path.name, sha256=loaded.sha256),
        eos=loaded.eos,
        text_field=text_field,
        context_length=context_length,
        tails=tails,
        documents=documents,
        seed=seed,
        shard_tokens=shard_tokens,
        inputs=tuple(map(Input.of, files, weigh(files, weights or {}))),
    )
    with working_folder(output) as folder, disk_full_named(folder):
        if not is_vacant(output):
            manifest = _finished(output, plan, max_bad_documents, progress)
            report(f"{output} is already there, made from the same inputs in the same way: nothing to do")
            shutil.rmtree(folder)
            return manifest
        if begin(folder, plan):
            report(f"continuing the run that left {folder}")
        tokenised = _tokenise(folder, plan, loaded, workers, max_bad_documents, progress)
        report(_encoders(tokenised, loaded))
        manifest = _store(folder, plan, loaded, tokenised, workers, progress)
        (folder / RESULT).rename(output)
        shutil.rmtree(folder)
    return manifest


def _check_arguments(context_length: int, workers: int, seed: int, shard_tokens: int, max_bad_documents: int) -> None:
    if context_length < 2:
        raise DataError(f"context length {context_length} is too short: a loss needs a token and the one after it")
    if workers < 1:
        raise DataError(f"{workers} workers cannot tokenise: give 1 or more")
    if not 0 <= seed < 1 << 64:
        raise DataError(f"seed {seed} is out of range: give one from 0 to 2^64 - 1")
    if shard_tokens < context_length:
        raise DataError(f"a shard of {shard_tokens} tokens cannot hold an instance of {context_length}: make it larger")
    if max_bad_documents < 0:
        raise DataError(f"{max_bad_documents} bad documents cannot be allowed: give 0 or more")


def _check_output(output: Path, inputs: Sequence[str | Path]) -> None:
    for item in inputs:
        if os.path.isdir(item) and output.is_relative_to(os.path.realpath(item)):
            raise DataError(
                f"{output} is inside the input folder {item}, which would hold it the next time: move it out"
            )


def _finished(output: Path, plan: Plan, max_bad_documents: int, progress: Progress) -> Manifest:
    """The manifest of an output that is there already; raises DataError unless this run would write the same."""
    if not (output / MANIFEST).is_file():
        raise DataError(f"{output} exists and is not an empty folder: name another output or delete it")
    manifest = Manifest.read(output)
    if difference := plan.difference(manifest) or _changed_input(manifest, plan, progress):
        raise DataError(f"{output} exists and was prepared with {difference}: name another output or delete it")
    if (bad := manifest.counts.bad_documents) > max_bad_documents:
        raise DataError(
            f"{output} exists and leaves out {counted(bad, 'bad document')}: run again with --max-bad-documents {bad}"
        )
    return manifest


def _changed_input(manifest: Manifest, plan: Plan, progress: Progress) -> str:
    done, size = 0, sum(each.bytes for each in plan.inputs)

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        progress("checking inputs", done, size)

    for source in manifest.sources:
        if sha256_of(Path(source.file), on_bytes) != source.sha256:
            return f"other bytes in {source.file}"
    return ""


def _tokenise(
    folder: Path, plan: Plan, loaded: TextTokenizer, workers: int, max_bad_documents: int, progress: Progress
) -> list[TokenisedFile]:
    size = sum(each.bytes for each in plan.inputs)
    try:
        tokenised = tokenise_files(
            [Path(each.file) for each in plan.inputs],
            folder / TOKENS,
            tokenizer=loaded,
            text_field=plan.text_field,
            workers=min(workers, len(plan.inputs)),
            max_bad_documents=max_bad_documents,
            progress=lambda done: progress("tokenising", done, size),
        )
    except DamagedInputError as error:
        _write_bad_documents(folder, error.bad_documents)
        raise
    for each in plan.inputs:
        if Input.of(Path(each.file), each.weight) != each:
            raise DataError(f"{each.file} was changed while it was being read: run the same command again")
    return tokenised


def _encoders(tokenised: Sequence[TokenisedFile], loaded: TextTokenizer) -> str:
    """Which path encoded how many documents, and why none took the fast one."""
    fast = sum(each.fast_documents for each in tokenised)
    reference = sum(each.reference_documents for each in tokenised)
    why_not = "" if fast else Encoder(loaded.tokenizer).why_not
    counts = f"{counted(fast + reference, 'document')} read: tiktoken encoded {fast:,}, tokenizers {reference:,}"
    return f"{counts} ({why_not})" if why_not else counts


def _store(
    folder: Path,
    plan: Plan,
    loaded: TextTokenizer,
    tokenised: Sequence[TokenisedFile],
    workers: int,
    progress: Progress,
) -> Manifest:
    """Writes everything of the output into `folder`/RESULT, the manifest last."""
    cut = [
        CutFile.of(folder / TOKENS, number, each, planned.weight, plan)
        for number, (each, planned) in enumerate(zip(tokenised, plan.inputs, strict=True))
    ]
    sources = tuple(_source(each, file, plan.context_length) for each, file in zip(tokenised, cut, strict=True))
    counts = total(source.counts for source in sources)
    if counts.instances == 0:
        shutil.rmtree(folder)  # nothing in it can become a result
        raise DataError(
            f"no instance of {plan.context_length} tokens fits: the inputs hold {counts.tokens} tokens in "
            f"{counted(len(sources), 'file')}, of which tails and weights leave nothing: add text or use a smaller "
            f"context length"
        )
    result, records = folder / RESULT, folder / SHARDS
    result.mkdir(exist_ok=True)
    records.mkdir(exist_ok=True)
    shards = write_shards(
        result,
        records,
        Instances(cut, loaded.dtype, plan.context_length, loaded.eos_id, plan.seed),
        shard_tokens=plan.shard_tokens,
        workers=workers,
        progress=lambda done, shards: progress("shuffling", done, shards),
    )
    ends = write_vector(result / DOCUMENT_ENDS, counts.documents, _document_ends(folder / TOKENS, tokenised))
    loaded.copy(result)
    manifest = Manifest(
        **{name: getattr(plan, name) for name in Recipe.model_fields},
        dtype="uint16" if loaded.dtype.itemsize == 2 else "uint32",
        vocab_size=loaded.vocab_size,
        eos_id=loaded.eos_id,
        counts=counts,
        sources=sources,
        shards=tuple(shards),
        document_ends=HashedFile(file=DOCUMENT_ENDS, sha256=ends),
        bad_documents=_write_bad_documents(result, [bad for each in tokenised for bad in each.bad_documents]),
    )
    manifest.write(result)
    return manifest


def _source(tokenised: TokenisedFile, cut: CutFile, context_length: int) -> Source:
    unfilled = tokenised.tokens - cut.instances * context_length
    counts = Counts(
        documents=tokenised.documents,
        empty_documents=tokenised.empty_documents,
        bad_documents=len(tokenised.bad_documents),
        tokens=tokenised.tokens,
        instances=cut.stored,
        dropped_tokens=max(0, unfilled),
        padding_tokens=max(0, -unfilled),
    )
    return Source(file=tokenised.file, sha256=tokenised.sha256, weight=cut.weight, counts=counts)


def _document_ends(folder: Path, tokenised: Sequence[TokenisedFile]) -> Iterator[NDArray[np.int64]]:
    before = 0
    for number, each in enumerate(tokenised):
        for ends_D in read_vector(ends_file(folder, number)):
            yield before + ends_D
        before += each.tokens


def _write_bad_documents(folder: Path, bad: Sequence[BadDocument]) -> HashedFile | None:
    if not bad:
        return None
    with whole_file(folder / BAD_DOCUMENTS) as file:
        file.write("".join(document.model_dump_json() + "\n" for document in bad).encode())
    return HashedFile(file=BAD_DOCUMENTS, sha256=file.sha256)
