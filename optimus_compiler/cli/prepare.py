"""`optimus prepare`: text files to shuffled, sharded token ids, and the checks and tables of such a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from optimus_compiler.runtime.data.manifest import Manifest


def prepare(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="INPUT", help="Files, patterns or folders of text.", show_default=False),
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer file (Hugging Face tokenizer.json).")] = None,
    context_length: Annotated[int | None, typer.Option(help="Tokens of a training sequence.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder to write; must not exist, or be empty.")] = None,
    workers: Annotated[int, typer.Option(help="Processes that tokenise, threads that shard; changes no byte.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the shuffle.")] = 0,
    text_field: Annotated[str, typer.Option(help="Field of a JSON line, or column, that holds the text.")] = "text",
    eos: Annotated[
        str | None, typer.Option(help="Token after each document; default: the tokenizer's end of text.")
    ] = None,
    shard_tokens: Annotated[int, typer.Option(help="Most tokens in a shard.")] = 1 << 26,
    tails: Annotated[
        Literal["drop", "keep"], typer.Option(help="Tokens left at the end of a file: drop, or keep and pad with EOS.")
    ] = "drop",
    documents: Annotated[
        Literal["join", "separate"],
        typer.Option(
            help="Cut each file's documents as one stream, or each alone: no sequence then crosses documents."
        ),
    ] = "join",
    weight: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=W",
            help="Store sequences of matching files (absolute paths) W times, e.g. '*/wiki/*=2.5'; repeatable, the "
            "last match counts.",
        ),
    ] = None,
    max_bad_documents: Annotated[int, typer.Option(help="Damaged documents to leave out; more end the run.")] = 0,
    validation_fraction: Annotated[
        float | None,
        typer.Option(help="Hold out about this share of the documents, by a hash of their text, in a second folder."),
    ] = None,
    validation_output: Annotated[
        Path | None, typer.Option(help="That folder, for data.validation_path.  [default: OUTPUT-validation]")
    ] = None,
    verify: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Check every byte and count of a prepared folder instead.")
    ] = None,
    stats: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Print tokens, documents, lengths and sources of one instead.")
    ] = None,
) -> None:
    """Turn text into shuffled token ids.

    Reads .json.gz, .jsonl, .jsonl.zst, .parquet and .txt; writes a folder of .npy shards and a manifest for `optimus
    pretrain`. A run that was stopped, by whatever, continues when it is run again with the same arguments.

    \b
    Example:
      optimus prepare corpus/*.json.gz --tokenizer tokenizer.json --context-length 2048 --output data
      optimus prepare corpus --tokenizer tokenizer.json --context-length 512 --output data --weight '*/wiki/*=2'
      optimus prepare corpus --tokenizer tokenizer.json --context-length 512 --output data --validation-fraction 0.01
      optimus prepare --verify data
      optimus prepare --stats data
    """
    from optimus_compiler.runtime.data.errors import DataError
    from optimus_compiler.runtime.data.stats import stats as describe

    chosen = [name for name, given in (("INPUT", inputs), ("--verify", verify), ("--stats", stats)) if given]
    if len(chosen) != 1:
        raise DataError(f"give one of INPUT..., --verify DIR and --stats DIR (found: {', '.join(chosen) or 'none'})")
    if verify is not None:
        _verify(verify)
    elif stats is not None:
        print(describe(stats))
    elif tokenizer is None or context_length is None or output is None:
        options = {"--tokenizer": tokenizer, "--context-length": context_length, "--output": output}
        raise DataError(f"Missing option '{next(name for name, value in options.items() if value is None)}'")
    else:
        _prepare(
            inputs or [],
            tokenizer=tokenizer,
            context_length=context_length,
            output=output,
            workers=workers,
            seed=seed,
            text_field=text_field,
            eos=eos,
            shard_tokens=shard_tokens,
            tails=tails,
            documents=documents,
            weights=_weights(weight or []),
            max_bad_documents=max_bad_documents,
            validation_fraction=validation_fraction,
            validation_output=validation_output,
        )


def _weights(options: list[str]) -> dict[str, float]:
    from optimus_compiler.runtime.data.errors import DataError

    weights = {}
    for option in options:
        pattern, equals, number = option.rpartition("=")
        try:
            weights[pattern] = float(number)
        except ValueError:
            equals = ""
        if not equals or not pattern:
            raise DataError(f"--weight {option!r} is not PATTERN=W with a number W: write for example '*/wiki/*=2.5'")
    return weights


def _prepare(
    inputs: list[str],
    *,
    output: Path,
    validation_fraction: float | None,
    validation_output: Path | None,
    **options: Any,
) -> None:
    from optimus_compiler.cli.stages import StageProgress
    from optimus_compiler.runtime.data.manifest import Manifest
    from optimus_compiler.runtime.data.prepare import prepare as prepare_data

    if validation_fraction is not None and validation_output is None:
        validation_output = Path(f"{output}-validation")
    with StageProgress() as progress:
        manifest = prepare_data(
            inputs,
            output=output,
            validation_fraction=validation_fraction,
            validation_output=validation_output,
            progress=progress.show,
            report=progress.say,
            **options,
        )
    _describe(output, manifest)
    if validation_output is not None:
        _describe(validation_output, Manifest.read(validation_output))


def _describe(output: Path, manifest: Manifest) -> None:
    from optimus_compiler.runtime.data.errors import counted
    from optimus_compiler.runtime.data.manifest import BAD_DOCUMENTS

    counts = manifest.counts
    if counts.bad_documents:
        print(f"{counted(counts.bad_documents, 'bad document')} left out, listed in {output / BAD_DOCUMENTS}")
    print(
        f"{output}: {counts.documents:,} documents, {counts.tokens:,} tokens, {counts.instances:,} sequences of "
        f"{manifest.context_length:,} ({counts.dropped_tokens:,} tokens left over at the ends of files), "
        f"vocabulary {manifest.vocab_size:,}"
    )


def _verify(folder: Path) -> None:
    from optimus_compiler.cli.stages import StageProgress
    from optimus_compiler.runtime.data.errors import DataError
    from optimus_compiler.runtime.data.verify import verify

    with StageProgress() as progress:
        faults = verify(folder, lambda done, total: progress.show("verifying", done, total))
    for fault in faults:
        print(fault)
    if faults:
        raise DataError(f"{folder} is damaged, faults found: {len(faults)}: restore the files or prepare it again")
    print(f"{folder}: no fault found")
