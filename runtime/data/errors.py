"""The errors of the data stages: something in a user's files or arguments that no retry would mend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optimus_compiler.runtime.data.tokenised import BadDocument


def counted(count: int, noun: str) -> str:
    """A count as a sentence has it: "1 bad document", "2,000 bad documents"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


class DataError(ValueError):
    """One sentence that names the file (and line), says what is wrong with it, and what to do."""


class DamagedInputError(DataError):
    """There are more bad documents than `allowed`: `bad_documents` are those found, file by file and line by line.

    `stopped` says that the inputs were not read to their end, so that there may be more.
    """

    def __init__(self, bad_documents: Sequence[BadDocument], allowed: int, stopped: bool) -> None:
        super().__init__(bad_documents, allowed, stopped)  # these, so that a worker process can send the error
        self.bad_documents = tuple(bad_documents)
        self.allowed = allowed
        self.stopped = stopped

    def __str__(self) -> str:
        count, first = len(self.bad_documents), self.bad_documents[0]
        where = f"{first.file}, line {first.line}" if first.line else first.file
        found = ("at least " if self.stopped else "") + counted(count, "bad document")
        repair = "check the text field" if self.stopped else f"run again with --max-bad-documents {count}"
        return (
            f"{found} where {self.allowed:,} are allowed; the first is {where}: {first.cause}; "
            f"repair the inputs or {repair}"
        )
