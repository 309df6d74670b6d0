"""[model] init: the weights of a new run, from a checkpoint of another or from a Hugging Face folder."""

from pathlib import Path

from optimus_compiler.models import ModelConfig, from_hf
from optimus_compiler.runtime.checkpoint.folder import open_checkpoint
from optimus_compiler.runtime.checkpoint.hugging_face import HuggingFaceWeights
from optimus_compiler.runtime.checkpoint.load import StoredTensors, WeightSource
from optimus_compiler.runtime.checkpoint.manifest import MANIFEST, CheckpointError


def check_initial_weights(path: str, config: ModelConfig, rank: int, ranks: int) -> None:
    """Raises CheckpointError, one sentence, unless `path` holds the weights of this very model.

    The files of a checkpoint are read through, file i by rank i mod `ranks`.
    """
    folder = Path(path)
    try:
        if (folder / MANIFEST).is_file():
            _check_checkpoint(folder, config, rank, ranks)
        else:
            HuggingFaceWeights(folder).check(config)
    except CheckpointError as error:
        raise CheckpointError(f"model.init: {error}") from None


def _check_checkpoint(folder: Path, config: ModelConfig, rank: int, ranks: int) -> None:
    manifest = open_checkpoint(folder).manifest
    if (fault := manifest.fault(folder, rank, ranks)) is not None:
        raise CheckpointError(f"{folder} is damaged: {fault}: choose another checkpoint")
    theirs = from_hf(manifest.model)
    for name in ("model_type", *config.SIZES, "tie_word_embeddings", "attention_bias"):
        if getattr(theirs, name, None) != getattr(config, name):
            raise CheckpointError(
                f"{folder} is a model with {name} = {getattr(theirs, name, None)!r}, and this configuration has "
                f"{getattr(config, name)!r}: change one of them"
            )


def initial_weights(path: str) -> WeightSource:
    """Where the weights at `path`, which has been checked, are read from."""
    folder = Path(path)
    if not (folder / MANIFEST).is_file():
        return HuggingFaceWeights(folder)
    return StoredTensors(folder)
