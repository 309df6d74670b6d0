"""`optimus export`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from optimus_compiler.cli.checkpoint import fault_with_progress


def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="RUN/checkpoints/step-N, or RUN: newest.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; must not exist, or be empty.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json to add; default: that of the run's data.path.")
    ] = None,
    max_file_size: Annotated[str, typer.Option(help="Most weights in one file.")] = "5GB",
) -> None:
    """Write a checkpoint as a Hugging Face folder.

    The folder has safetensors files with the published names, config.json and the tokenizer, as
    transformers.OlmoeForCausalLM.from_pretrained loads them. Any layout exports the same bytes; memory is that of one
    tensor.

    \b
    Example:
      optimus export run/checkpoints/step-1000 exported
      optimus export run exported --max-file-size 2GB
    """
    from optimus_compiler.activation_memory import parse_bytes
    from optimus_compiler.cli.stages import StageProgress
    from optimus_compiler.mesh import Mesh
    from optimus_compiler.runtime.checkpoint.export import export as export_checkpoint
    from optimus_compiler.runtime.checkpoint.find import open_newest
    from optimus_compiler.runtime.checkpoint.manifest import CheckpointError
    from optimus_compiler.runtime.checkpoint.tokenizer import tokenizer_of

    source = open_newest(checkpoint, Mesh.abstract(), print)
    try:
        file_bytes = parse_bytes(max_file_size)
    except ValueError:
        raise CheckpointError(f"--max-file-size {max_file_size!r} is no size: write for example 5GB or 500MB") from None
    found, eos = (tokenizer, None) if tokenizer else tokenizer_of(source)
    if tokenizer and not tokenizer.is_file():
        raise CheckpointError(f"--tokenizer {tokenizer} does not exist: name a tokenizer.json")
    with StageProgress() as progress:
        if (fault := fault_with_progress(source, progress)) is not None:
            raise CheckpointError(f"{source.path} is damaged: {fault}: export another checkpoint")
        export_checkpoint(source, output, tokenizer=found, eos=eos, file_bytes=file_bytes, progress=progress.show)
    missing = "" if found else " (no tokenizer: the data of the run is not at its data.path; add one with --tokenizer)"
    print(f"{output}: {source.path} as a Hugging Face folder{missing}")
