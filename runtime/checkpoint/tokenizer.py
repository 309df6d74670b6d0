"""The tokenizer that belongs to a checkpoint: that of the data which its run was trained on."""

from pathlib import Path

from optimus_compiler.config import parse_config
from optimus_compiler.runtime.checkpoint.folder import Checkpoint
from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.data.manifest import TOKENIZER, Manifest


def tokenizer_of(source: Checkpoint) -> tuple[Path | None, str | None]:
    """The tokenizer.json of the run's data and its end-of-text token; (None, None) where they are no longer there."""
    data = parse_config(source.manifest.config, str(source.path)).data.path
    if data is None or not (Path(data) / TOKENIZER).is_file():
        return None, None
    try:
        return Path(data) / TOKENIZER, Manifest.read(Path(data)).eos
    except DataError:
        return None, None
