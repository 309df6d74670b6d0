"""`optimus import-optimus-data`: a folder that Intel's Optimus-LM prepared to one that `optimus pretrain` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_optimus_data(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with tokenized_data, sharded_data_f*_c*, ...")],
    tokenizer: Annotated[Path, typer.Option(help="The tokenizer it was made with (Hugging Face tokenizer.json).")],
    output: Annotated[Path, typer.Option(help="Folder to write; must not exist, or be empty.")],
    eos: Annotated[
        str | None, typer.Option(help="Token after each document; default: the tokenizer's end of text.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(metavar="fF_cC", help="Which files and context length, where DIR holds several.")
    ] = None,
) -> None:
    """Import data prepared by Intel's Optimus-LM.

    Keeps its instances and their order. Reads the shards, or makes them from tokenized_data and the shuffling order,
    and checks what is there against each other and against the tokenizer.

    \b
    Example:
      optimus import-optimus-data preprocessed/olmo --tokenizer tokenizer.json --output data
    """
    from optimus_compiler.cli.stages import StageProgress
    from optimus_compiler.runtime.data.import_optimus import import_optimus

    with StageProgress() as progress:
        manifest = import_optimus(
            folder,
            tokenizer=tokenizer,
            output=output,
            eos=eos,
            layout=layout,
            progress=progress.show,
            report=progress.say,
        )
    counts = manifest.counts
    print(
        f"{output}: {counts.documents:,} documents, {counts.tokens:,} tokens, {counts.instances:,} sequences of "
        f"{manifest.context_length:,}, vocabulary {manifest.vocab_size:,}"
    )
