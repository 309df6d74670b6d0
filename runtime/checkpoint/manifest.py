"""The manifest of a checkpoint: what manifest.json holds, and whether the files are those that were written."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from optimus_compiler.runtime.files import sha256_of, synced_file
from optimus_compiler.runtime.records import SHA256, BrokenRecordError, Record, SealedRecord

MANIFEST = "manifest.json"

Kind = Literal["full", "model"]  # weights, masters, moments; or weights alone


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or used; the message names the file and what to do."""


class StoredFile(Record):
    """Size and checksum of a file."""

    bytes: int = Field(ge=0)
    sha256: str = SHA256


class StoredParameter(Record):
    """A weight by its name in the checkpoint, and how the run that saved it had it laid out."""

    shape: tuple[int, ...]
    dtype: str  # "bfloat16"
    placement: dict[str, int]  # mesh dimension -> sharded tensor dimension
    stages: tuple[int, ...]


class Progress(Record):
    """How far training has come: what a resumed run continues from, beside weights and moments."""

    step: int = Field(ge=0)  # steps taken
    tokens: int = Field(ge=0)
    epoch: int = Field(ge=0)  # with `offset` the data position
    offset: int = Field(ge=0)
    updates: int = Field(ge=0)  # steps that the moments have seen: fewer than `step` after a restart without them
    random_state: str  # torch's CPU generator, in hex
    recent_losses: tuple[float, ...] = ()  # what the loss-spike guard compares with


class CheckpointManifest(SealedRecord):
    """Everything about a checkpoint but its tensors. It is written last, and the checkpoint renamed into place then."""

    format: Literal["optimus-checkpoint"] = "optimus-checkpoint"
    version: Literal[1] = 1
    kind: Kind
    number: int = Field(ge=1)  # saves of this run count up: the newest checkpoint has the largest
    progress: Progress
    config: str  # TOML, resolved: the learning-rate schedule is in it
    model: dict[str, Any]  # as in a Hugging Face config.json
    data_sha256: str = SHA256  # of the prepared data's manifest
    mesh: dict[str, int]
    parameters: dict[str, StoredParameter]
    files: dict[str, StoredFile]

    @property
    def bytes(self) -> int:
        """Of all files but this."""
        return sum(stored.bytes for stored in self.files.values())

    def write(self, folder: Path) -> None:
        """Writes manifest.json, to the disk."""
        with synced_file(folder / MANIFEST) as file:
            file.write(self.sealed())

    @staticmethod
    def read(folder: Path) -> "CheckpointManifest":
        """The manifest of a checkpoint; raises CheckpointError when there is none, or it is damaged."""
        try:
            return CheckpointManifest.read_sealed(folder / MANIFEST)
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from None
        except OSError as error:
            raise CheckpointError(f"{folder / MANIFEST} cannot be read: {error.strerror}") from None
        except BrokenRecordError as error:
            raise CheckpointError(str(error)) from None

    def fault(
        self, folder: Path, part: int = 0, parts: int = 1, on_bytes: Callable[[int], None] = lambda count: None
    ) -> str | None:
        """The first file that is missing or not what was written, in words; None when all are whole.

        All sizes are looked at, and of the contents those of every `parts`-th file from `part` on.
        """
        try:
            for name, stored in self.files.items():
                if not (folder / name).is_file():
                    return f"{name} is missing"
                if (size := os.path.getsize(folder / name)) != stored.bytes:
                    return f"{name} has {size:,} bytes and was written with {stored.bytes:,}"
            for name in sorted(self.files)[part::parts]:
                if sha256_of(folder / name, on_bytes) != self.files[name].sha256:
                    return f"{name} is not what was written (another sha256)"
        except OSError as error:
            return f"{error.filename or folder} cannot be read: {error.strerror}"
        return None
