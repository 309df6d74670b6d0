"""`optimus export`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optimus_compiler.cli.checkpoint import fault_with_progress

if TYPE_CHECKING:
    from optimus_compiler.runtime.checkpoint.folder import Checkpoint


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
    from optimus_compiler.runtime.checkpoint.export import export as export_checkpoint
    from optimus_compiler.runtime.checkpoint.manifest import CheckpointError

    source = _open(checkpoint)
    try:
        file_bytes = parse_bytes(max_file_size)
    except ValueError:
        raise CheckpointError(f"--max-file-size {max_file_size!r} is no size: write for example 5GB or 500MB") from None
    found, eos = (tokenizer, None) if tokenizer else _tokenizer_of(source)
    if tokenizer and not tokenizer.is_file():
        raise CheckpointError(f"--tokenizer {tokenizer} does not exist: name a tokenizer.json")
    with StageProgress() as progress:
        if (fault := fault_with_progress(source, progress)) is not None:
            raise CheckpointError(f"{source.path} is damaged: {fault}: export another checkpoint")
        export_checkpoint(source, output, tokenizer=found, eos=eos, file_bytes=file_bytes, progress=progress.show)
    missing = "" if found else " (no tokenizer: the data of the run is not at its data.path; add one with --tokenizer)"
    print(f"{output}: {source.path} as a Hugging Face folder{missing}")


def _open(path: Path) -> Checkpoint:
    """The checkpoint at `path`, or the newest whole one of the run there."""
    from optimus_compiler.mesh import Mesh
    from optimus_compiler.runtime.checkpoint.find import find_newest
    from optimus_compiler.runtime.checkpoint.folder import CheckpointFolder, open_checkpoint
    from optimus_compiler.runtime.checkpoint.manifest import CheckpointError

    folder = CheckpointFolder(path)
    if not folder.path.is_dir():
        return open_checkpoint(path)
    newest = find_newest(folder, Mesh.abstract(), print)
    if newest is None:
        raise CheckpointError(f"{folder.path} holds no whole checkpoint: `optimus checkpoint verify {path}` says why")
    return newest


def _tokenizer_of(source: Checkpoint) -> tuple[Path | None, str | None]:
    """The tokenizer of the data that the run was trained on, and its end-of-text token, where they are still there."""
    from optimus_compiler.config import parse_config
    from optimus_compiler.runtime.data.errors import DataError
    from optimus_compiler.runtime.data.manifest import TOKENIZER, Manifest

    data = parse_config(source.manifest.config, str(source.path)).data.path
    if data is None or not (Path(data) / TOKENIZER).is_file():
        return None, None
    try:
        return Path(data) / TOKENIZER, Manifest.read(Path(data)).eos
    except DataError:
        return None, None
