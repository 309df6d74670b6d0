"""Writes one checkpoint, all ranks together: files, checksums, manifest, then the rename that makes it one."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from optimus_compiler.config import KeepPersistent
from optimus_compiler.runtime.checkpoint.contents import Parts
from optimus_compiler.runtime.checkpoint.folder import CheckpointFolder
from optimus_compiler.runtime.checkpoint.manifest import CheckpointError, CheckpointManifest, Kind, StoredFile
from optimus_compiler.runtime.checkpoint.storage import CheckedWriter
from optimus_compiler.runtime.collectives import from_first, to_first
from optimus_compiler.runtime.files import sha256_of

METADATA = ".metadata"  # DCP's own: which box of which tensor lies where

Describe = Callable[[int, dict[str, StoredFile]], CheckpointManifest]  # (number, files) -> manifest


@dataclass(frozen=True)
class _Outcome:
    """What rank 0 did: the folder it made or named, or why it could not."""

    path: Path | None = None
    number: int = 0
    fault: str = ""


def write_checkpoint(
    folder: CheckpointFolder,
    kind: Kind,
    step: int,
    parts: Parts,
    describe: Describe,
    keep: KeepPersistent,
    group: dist.ProcessGroup | None,
) -> Path:
    """Writes what every rank gives as `parts`; the folder of the finished checkpoint, on every rank.

    group: all ranks, on the host, for this alone. Raises CheckpointError on every rank when any of them fails; nothing
    half-written is left then, and what was there before still is, but for the older of two full checkpoints.
    """
    is_first = group is None or dist.get_rank(group) == 0
    begun = from_first(_try(lambda: _Outcome(*folder.begin(kind, step))) if is_first else _Outcome(), group)
    partial = _path_of(begun, folder.path)
    writer = CheckedWriter(partial)
    try:
        dcp.save(parts, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointError(_sentence(partial, f"rank {rank}: {_cause(cause)}")) from None
    written = to_first(writer.files, group)

    def finish() -> _Outcome:
        files = {name: stored for each in written for name, stored in each.items()}
        metadata = partial / METADATA
        files[METADATA] = StoredFile(bytes=metadata.stat().st_size, sha256=sha256_of(metadata))
        describe(begun.number, files).write(partial)
        final = folder.commit(partial)
        if kind == "model":
            folder.retain(keep)
        return _Outcome(final)

    ended = from_first(_try(finish) if is_first else _Outcome(), group)
    if ended.fault and is_first:
        shutil.rmtree(partial, ignore_errors=True)
    return _path_of(ended, partial)


def _try(action: Callable[[], _Outcome]) -> _Outcome:
    try:
        return action()
    except OSError as error:
        return _Outcome(fault=_cause(error))


def _path_of(outcome: _Outcome, where: Path) -> Path:
    if outcome.path is None:
        raise CheckpointError(_sentence(where, outcome.fault))
    return outcome.path


def _cause(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    return f"{type(error).__name__}: {error}"


def _sentence(where: Path, cause: str) -> str:
    return (
        f"{where} could not be written ({cause}): free some space or mend the file system and run the same command "
        "again, it continues from the newest complete checkpoint"
    )
