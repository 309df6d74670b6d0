"""Records in JSON files: immutable, strict, and sealed by a checksum of their own text."""

import hashlib
import re
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

SHA256 = Field(pattern="^[0-9a-f]{64}$")
_SEAL = re.compile(rb',\n  "sha256": "[^"]*"(?=\s*}\s*\Z)')  # the last field of the file


class BrokenRecordError(ValueError):
    """Text that is not a record, or not the one that was written; the message names the file."""


class Record(BaseModel):
    """An immutable record that refuses unknown keys and does not convert types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SealedRecord(Record):
    """A record whose file also holds the sha256 of itself. The text depends on the values alone: no time, no host."""

    def sealed(self) -> bytes:
        """The JSON of all fields, and in it, last, the sha256 of what it is without that."""
        fields = self.model_dump_json(indent=2).encode() + b"\n"
        return fields.removesuffix(b"\n}\n") + f',\n  "sha256": "{hashlib.sha256(fields).hexdigest()}"\n}}\n'.encode()

    @classmethod
    def read_sealed(cls, path: Path) -> Self:
        """The record that `path` was written with; raises BrokenRecordError where it holds any other bytes."""
        data = path.read_bytes()
        try:
            record = cls.model_validate_json(_SEAL.sub(b"", data))
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(map(str, fault["loc"])) or "the file"
            raise BrokenRecordError(f"{path}: {where}: {fault['msg']}") from error
        if data != record.sealed():
            raise BrokenRecordError(f"{path} is not what was written (another sha256)")
        return record
