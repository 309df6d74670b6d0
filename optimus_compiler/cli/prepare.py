"""`optimus prepare`: text files to shuffled, sharded token ids."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def prepare(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...", help="Files, patterns or folders of text.")],
    tokenizer: Annotated[Path, typer.Option(help="Tokenizer file (Hugging Face tokenizer.json).")],
    context_length: Annotated[int, typer.Option(help="Tokens of a training sequence.")],
    output: Annotated[Path, typer.Option(help="Folder to write; must not exist, or be empty.")],
    workers: Annotated[int, typer.Option(help="Processes that tokenise; the result does not depend on it.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the shuffle.")] = 0,
    text_field: Annotated[str, typer.Option(help="Field of a JSON line that holds the text.")] = "text",
    eos: Annotated[
        str | None, typer.Option(help="Token after each document; default: the tokenizer's end of text.")
    ] = None,
) -> None:
    """Turn text into shuffled token ids.

    Reads .json.gz, .jsonl and .txt; writes a folder of .npy shards and a manifest for `optimus pretrain`.

    \b
    Example:
      optimus prepare corpus/*.json.gz --tokenizer tokenizer.json --context-length 2048 --output data
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from optimus_compiler.runtime.data.prepare import prepare as prepare_data

    columns = (TextColumn("tokenising"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(), transient=True, disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("")
        manifest = prepare_data(
            inputs,
            tokenizer=tokenizer,
            context_length=context_length,
            output=output,
            workers=workers,
            seed=seed,
            text_field=text_field,
            eos=eos,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    counts = manifest.counts
    print(
        f"{output}: {counts.documents:,} documents, {counts.tokens:,} tokens, {counts.instances:,} sequences of "
        f"{manifest.context_length:,} ({counts.dropped_tokens:,} tokens left over at the ends of files), "
        f"vocabulary {manifest.vocab_size:,}"
    )
