"""The manifest of a prepared folder: what manifest.json holds, and how it is written and read."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.data.files import whole_file
from optimus_compiler.runtime.records import SHA256, BrokenRecordError, Record, SealedRecord

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
DOCUMENT_ENDS = "documents.npy"
BAD_DOCUMENTS = "bad_documents.jsonl"

Tails = Literal["drop", "keep"]  # what becomes of tokens that do not fill an instance; keep: padded with EOS
Documents = Literal["join", "separate"]  # what is cut into instances: a file's documents as one stream, or each alone
Split = Literal["training", "validation"]  # validation: the documents that are held out; training: all others


class Counts(Record):
    """How much of a source, or of all of them, there is. Tokens count EOS; everything but `instances` is unweighted."""

    documents: int = Field(ge=0)
    empty_documents: int = Field(ge=0)  # documents without a token: read, counted here only, not written
    bad_documents: int = Field(default=0, ge=0)  # damaged ones that an error budget let pass: not written
    tokens: int = Field(ge=0)
    instances: int = Field(default=0, ge=0)  # as stored: after weighting
    dropped_tokens: int = Field(default=0, ge=0)  # in tails that do not fill an instance
    padding_tokens: int = Field(default=0, ge=0)  # EOS added to fill the instances of kept tails


def total(counts: Iterable[Counts]) -> Counts:
    """The sum of `counts`, field by field."""
    counts = list(counts)
    return Counts(**{name: sum(getattr(each, name) for each in counts) for name in Counts.model_fields})


class Source(Record):
    """One input file, the sha256 of its bytes, how often its instances are stored, and what it contributed."""

    file: str
    sha256: str = SHA256
    weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    counts: Counts


class HashedFile(Record):
    """The name of a file and the sha256 of its bytes."""

    file: str
    sha256: str = SHA256


class Shard(HashedFile):
    """One .npy file of the folder: [instances, context_length] of the manifest's dtype."""

    instances: int = Field(gt=0)


class Recipe(Record):
    """What beside the input files decides the bytes of a prepared folder."""

    tokenizer: HashedFile  # the name is the original's; the folder holds a copy as tokenizer.json
    eos: str
    text_field: str = "text"
    context_length: int = Field(gt=0)
    tails: Tails = "drop"
    documents: Documents = "join"
    seed: int = Field(ge=0)
    shard_tokens: int = Field(default=1 << 26, gt=0)  # most tokens in a shard
    split: Split = "training"
    validation_fraction: float = Field(default=0.0, ge=0, lt=1)  # of the documents: so many are held out (`split_of`)

    @model_serializer(mode="wrap")
    def _omit_absent_split(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Where nothing is held out the text, and so its seal, is that of a time without splits.
        fields: dict[str, Any] = dump(self)
        if not self.validation_fraction:
            del fields["split"], fields["validation_fraction"]
        return fields


class Manifest(Recipe, SealedRecord):
    """Everything a reader must know of a prepared folder. Sources are in reading order, shards in stored order."""

    format: Literal["optimus-data"] = "optimus-data"
    version: Literal[2] = 2
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(gt=0)  # largest id of the tokenizer + 1
    eos_id: int = Field(ge=0)
    counts: Counts
    sources: tuple[Source, ...]
    shards: tuple[Shard, ...]
    document_ends: HashedFile | None = None  # int64 [documents] of the sources' joined tokens; None: not known
    bad_documents: HashedFile | None = None  # one JSON object a line: file, line, cause; None: there are none

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if sum(shard.instances for shard in self.shards) != self.counts.instances:
            raise ValueError("the shards' instances do not add up to counts.instances")
        if self.sources and total(source.counts for source in self.sources) != self.counts:
            raise ValueError("the sources' counts do not add up to counts")
        if not self.eos_id < self.vocab_size <= 1 << 8 * np.dtype(self.dtype).itemsize:
            raise ValueError("eos_id, vocab_size and dtype contradict each other")
        return self

    def write(self, folder: Path) -> None:
        """Writes manifest.json into `folder`."""
        with whole_file(folder / MANIFEST) as file:
            file.write(self.sealed())

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """Reads the manifest of `folder`; raises DataError when there is none, or it is not valid or was altered."""
        path = folder / MANIFEST
        if not path.is_file():
            raise DataError(f"{folder} is not a prepared data folder (no {MANIFEST}): make one with `optimus prepare`")
        try:
            return Manifest.read_sealed(path)
        except BrokenRecordError as error:
            raise DataError(f"{error}: restore it or prepare the data again") from error
