"""The manifest of a prepared folder: what manifest.json holds, and how it is written and read."""

from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from optimus_compiler.runtime.data.errors import DataError

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"

SHA256 = Field(pattern="^[0-9a-f]{64}$")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Counts(_Record):
    """How much of a source, or of all of them, there is: documents and tokens (EOS included) became instances."""

    documents: int = Field(ge=0)
    empty_documents: int = Field(ge=0)  # documents without a token: read, counted here only, not written
    tokens: int = Field(ge=0)
    instances: int = Field(default=0, ge=0)
    dropped_tokens: int = Field(default=0, ge=0)  # the tail of a file that does not fill an instance


class Source(_Record):
    """One input file, the sha256 of its bytes, and what it contributed."""

    file: str
    sha256: str = SHA256
    counts: Counts


class TokenizerFile(_Record):
    """The name the tokenizer file had, and the sha256 of its bytes (of the copy in the folder, too)."""

    file: str
    sha256: str = SHA256


class Shard(_Record):
    """One .npy file of the folder: [instances, context_length] of the manifest's dtype."""

    file: str
    instances: int = Field(gt=0)
    sha256: str = SHA256


class Manifest(_Record):
    """Everything a reader must know of a prepared folder. Sources are in reading order, shards in stored order."""

    format: Literal["optimus-data"] = "optimus-data"
    version: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(gt=0)  # largest id of the tokenizer + 1
    eos: str
    eos_id: int = Field(ge=0)
    tokenizer: TokenizerFile
    context_length: int = Field(gt=0)
    seed: int = Field(ge=0)
    counts: Counts
    sources: tuple[Source, ...]
    shards: tuple[Shard, ...]

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if sum(shard.instances for shard in self.shards) != self.counts.instances:
            raise ValueError("the shards' instances do not add up to counts.instances")
        if not self.eos_id < self.vocab_size <= 1 << 8 * np.dtype(self.dtype).itemsize:
            raise ValueError("eos_id, vocab_size and dtype contradict each other")
        return self

    def write(self, folder: Path) -> None:
        """Writes manifest.json into `folder`. The text depends on the values alone: no time, no host."""
        (folder / MANIFEST).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """Reads and checks the manifest of `folder`; raises DataError when there is none or it is not valid."""
        path = folder / MANIFEST
        if not path.is_file():
            raise DataError(f"{folder} is not a prepared data folder (no {MANIFEST}): make one with `optimus prepare`")
        try:
            return Manifest.model_validate_json(path.read_bytes())
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(map(str, fault["loc"])) or "the file"
            raise DataError(f"{path}: {where}: {fault['msg']}: prepare the data again") from error
