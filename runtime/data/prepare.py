"""Prepares a corpus for pretraining: tokenise each file, cut into instances, shuffle, shard, commit by one rename."""

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
    Split,
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
    validation_fraction: float | None = None,
    validation_output: str | Path | None = None,
    progress: Progress = lambda stage, done, total: None,
    report: Callable[[str], None] = lambda sentence: None,
) -> Manifest:
    """Writes the folder `output`: shards, manifest.json, documents.npy, tokenizer.json. Its bytes depend on the inputs
    and options alone, not on `workers`, nor on whether it was done in one run or in many that were killed.

    `inputs` are files, folders or patterns (`documents.find_files`). Each file's documents are tokenised, EOS after
    each, and cut into instances of `context_length` tokens: joined, or separately. Tails that fill no instance are
    dropped, as in the paper's pipeline (Optimus-LM), or kept. `weights` maps patterns (fnmatch on absolute paths) to
    how often a file's instances are stored (1 where none matches). With a `validation_fraction`, about that share of
    the documents is held out (`split_of`), and another such folder, `validation_output`, holds those. `progress` is
    called with (stage, done, total), and `report` with sentences about the run that the manifest does not hold.
    Returns the manifest of `output`.

    All is written to the dot-folder beside `output` and renamed at the end, so `output` is whole or absent, and there
    only after `validation_output`. A run that was killed or failed is continued by another with the same arguments; one
    that ended well is found and kept. Raises DamagedInputError for more than `max_bad_documents` bad documents in both
    folders, DataError or OSError for anything else.
    """
    _check_arguments(context_length, workers, seed, shard_tokens, max_bad_documents)
    outputs = _outputs(output, validation_fraction, validation_output)
    files = find_files(inputs)
    _check_outputs(outputs.values(), inputs)
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
        validation_fraction=validation_fraction or 0.0,
        inputs=tuple(map(Input.of, files, weigh(files, weights or {}))),
    )
    with ExitStack() as stack:
        jobs = [
            _Job(path, stack.enter_context(working_folder(path)), plan.model_copy(update={"split": split}))
            for split, path in outputs.items()
        ]
        stack.enter_context(disk_full_named(" or ".join(str(job.folder) for job in jobs)))
        done = [job for job in jobs if not is_vacant(job.output)]
        manifests = _finished(done, max_bad_documents, progress) if done else {}
        for job in done:
            report(f"{job.output} is already there, made from the same inputs in the same way: nothing to do")
            shutil.rmtree(job.folder)
        if left := [job for job in jobs if job.plan.split not in manifests]:
            manifests |= _make(left, loaded, workers, max_bad_documents, progress, report)
    return manifests["training"]


@dataclass(frozen=True)
class _Job:
    """A folder to write, the dot-folder in which it grows, and what is to be in it."""

    output: Path
    folder: Path
    plan: Plan


def _outputs(
    output: str | Path, validation_fraction: float | None, validation_output: str | Path | None
) -> dict[Split, Path]:
    """The folder of each split, links resolved: a rename would replace a link, and "." has no name."""
    training = Path(os.path.realpath(output))
    if validation_fraction is None and validation_output is None:
        return {"training": training}
    if validation_fraction is None or validation_output is None:
        raise DataError(
            "validation fraction and validation output belong together: give both, the fraction as in "
            "--validation-fraction 0.01, or neither"
        )
    if not 0 < validation_fraction < 1:
        raise DataError(f"validation fraction {validation_fraction} is not possible: give a number between 0 and 1")
    validation = Path(os.path.realpath(validation_output))
    if validation.is_relative_to(training) or training.is_relative_to(validation):
        raise DataError(f"{validation} for validation and {training} are not two folders side by side: name another")
    return {"training": training, "validation": validation}


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


def _check_outputs(outputs: Collection[Path], inputs: Sequence[str | Path]) -> None:
    for item in inputs:
        for output in outputs:
            if os.path.isdir(item) and output.is_relative_to(os.path.realpath(item)):
                raise DataError(
                    f"{output} is inside the input folder {item}, which would hold it the next time: move it out"
                )


def _finished(jobs: Sequence[_Job], max_bad_documents: int, progress: Progress) -> dict[Split, Manifest]:
    """The manifests of outputs that are there already; raises DataError unless this run would write the same."""
    manifests: dict[Split, Manifest] = {}
    for job in jobs:
        if not (job.output / MANIFEST).is_file():
            raise DataError(f"{job.output} exists and is not an empty folder: name another output or delete it")
        manifests[job.plan.split] = Manifest.read(job.output)
        if difference := job.plan.difference(manifests[job.plan.split]):
            raise _differs(job, difference)
    _check_inputs(jobs, manifests, progress)
    if (bad := sum(manifest.counts.bad_documents for manifest in manifests.values())) > max_bad_documents:
        raise DataError(
            f"{' with '.join(str(job.output) for job in jobs)} exists and leaves out {counted(bad, 'bad document')}: "
            f"run again with --max-bad-documents {bad}"
        )
    return manifests


def _differs(job: _Job, difference: str) -> DataError:
    return DataError(f"{job.output} exists and was prepared with {difference}: name another output or delete it")


def _check_inputs(jobs: Sequence[_Job], manifests: Mapping[Split, Manifest], progress: Progress) -> None:
    """Raises DataError for an input that is not what one of the outputs was made from; reads each input once."""
    done, size = 0, sum(each.bytes for each in jobs[0].plan.inputs)

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        progress("checking inputs", done, size)

    for sources in zip(*(manifests[job.plan.split].sources for job in jobs), strict=True):
        sha256 = sha256_of(Path(sources[0].file), on_bytes)
        for job, source in zip(jobs, sources, strict=True):
            if source.sha256 != sha256:
                raise _differs(job, f"other bytes in {source.file}")


def _make(
    jobs: Sequence[_Job],
    loaded: TextTokenizer,
    workers: int,
    max_bad_documents: int,
    progress: Progress,
    report: Callable[[str], None],
) -> dict[Split, Manifest]:
    """Makes the outputs of `jobs`; none gets its name before all are whole."""
    for job in jobs:
        if begin(job.folder, job.plan):
            report(f"continuing the run that left {job.folder}")
    tokenised = _tokenise(jobs, loaded, workers, max_bad_documents, progress)
    report(_encoders([each for of_split in tokenised.values() for each in of_split], loaded))
    cut = {job.plan.split: _cut(job, tokenised[job.plan.split]) for job in jobs}
    for job in jobs:
        if not any(file.stored for file in cut[job.plan.split]):
            for each in jobs:
                shutil.rmtree(each.folder)  # nothing in them can become a result
            raise _nothing_fits(job.plan, tokenised[job.plan.split])
    manifests = {
        job.plan.split: _store(job, loaded, tokenised[job.plan.split], cut[job.plan.split], workers, progress)
        for job in jobs
    }
    for job in reversed(jobs):  # training last: it is never there without validation
        (job.folder / RESULT).rename(job.output)
        shutil.rmtree(job.folder)
    return manifests


def _tokenise(
    jobs: Sequence[_Job], loaded: TextTokenizer, workers: int, max_bad_documents: int, progress: Progress
) -> dict[Split, list[TokenisedFile]]:
    plan = jobs[0].plan  # in what matters here the plans are the same
    size = sum(each.bytes for each in plan.inputs)
    try:
        tokenised = tokenise_files(
            [Path(each.file) for each in plan.inputs],
            {job.plan.split: job.folder / TOKENS for job in jobs},
            tokenizer=loaded,
            text_field=plan.text_field,
            validation_fraction=plan.validation_fraction,
            workers=min(workers, len(plan.inputs)),
            max_bad_documents=max_bad_documents,
            progress=lambda done: progress("tokenising", done, size),
        )
    except DamagedInputError as error:
        _write_bad_documents(jobs[0].folder, error.bad_documents)
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


def _cut(job: _Job, tokenised: Sequence[TokenisedFile]) -> list[CutFile]:
    return [
        CutFile.of(job.folder / TOKENS, number, each, planned.weight, job.plan)
        for number, (each, planned) in enumerate(zip(tokenised, job.plan.inputs, strict=True))
    ]


def _nothing_fits(plan: Plan, tokenised: Sequence[TokenisedFile]) -> DataError:
    holder = f"the documents for {plan.split}" if plan.validation_fraction else "the inputs"
    remedy = "hold out a larger fraction" if plan.split == "validation" else "add text"
    return DataError(
        f"no instance of {plan.context_length} tokens fits: {holder} hold {sum(each.tokens for each in tokenised)} "
        f"tokens in {counted(len(tokenised), 'file')}, of which tails and weights leave nothing: {remedy} or use a "
        f"smaller context length"
    )


def _store(
    job: _Job,
    loaded: TextTokenizer,
    tokenised: Sequence[TokenisedFile],
    cut: Sequence[CutFile],
    workers: int,
    progress: Progress,
) -> Manifest:
    """Writes everything of the output into RESULT of its dot-folder, the manifest last."""
    plan, folder = job.plan, job.folder
    sources = tuple(_source(each, file, plan.context_length) for each, file in zip(tokenised, cut, strict=True))
    counts = total(source.counts for source in sources)
    stage = "shuffling" if plan.split == "training" else "shuffling validation"
    result, records = folder / RESULT, folder / SHARDS
    result.mkdir(exist_ok=True)
    records.mkdir(exist_ok=True)
    shards = write_shards(
        result,
        records,
        Instances(cut, loaded.dtype, plan.context_length, loaded.eos_id, plan.seed),
        shard_tokens=plan.shard_tokens,
        workers=workers,
        progress=lambda done, shards: progress(stage, done, shards),
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
