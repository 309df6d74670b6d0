"""The dot-folder beside the output in which a run works: locked, kept when the run fails, continued by the next."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.data.plan import Plan
from optimus_compiler.runtime.data.tokenised import record_file

LOCK = "lock"
TOKENS = "tokens"  # the tokenised files
SHARDS = "shards"  # a record for each finished shard
RESULT = "result"  # what becomes the output, by one rename


def is_vacant(output: Path) -> bool:
    """Whether a finished folder may take this place: nothing is there, or an empty folder."""
    return not output.exists() or (output.is_dir() and not any(output.iterdir()))


@contextmanager
def working_folder(output: Path) -> Iterator[Path]:
    """The folder `.NAME.partial` beside `output`, for this process alone; removed at the end if nothing is in it.

    Raises DataError when another process has it, and when `output` cannot be replaced by a rename.
    """
    if output.is_mount():
        raise DataError(f"{output} is a mount point, which no finished folder can replace: name a folder inside it")
    folder = output.parent / f".{output.name}.partial"
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.fstat(lock).st_nlink > 0  # else the run that had it has ended since, and deleted it
        except BlockingIOError:
            held = False
        if not held:
            raise DataError(f"another run is preparing {output}: wait until it has ended, then run this again")
        try:
            yield folder
        finally:
            if folder.is_dir() and os.listdir(folder) == [LOCK]:
                shutil.rmtree(folder)
    finally:
        os.close(lock)


def begin(folder: Path, plan: Plan) -> bool:
    """Writes the plan into `folder`, or continues what was begun there under the same plan; says whether it does.

    An input that has changed since (a repaired file) is tokenised again and all shards are written again.
    Raises DataError when the folder holds anything else.
    """
    held = Plan.read(folder)
    if held is None:
        if [name for name in os.listdir(folder) if not name.startswith(".")] != [LOCK]:  # but for a torn plan
            raise DataError(f"{folder} exists and no run of optimus prepare made it: delete it or name another output")
        plan.write(folder)
        return False
    if difference := plan.difference(held):
        raise DataError(
            f"{folder} holds an unfinished run with {difference}: run it again with the same arguments to continue it, "
            f"or delete the folder to start anew"
        )
    if held != plan:
        for number, (before, now) in enumerate(zip(held.inputs, plan.inputs, strict=True)):
            if before != now:
                record_file(folder / TOKENS, number).unlink(missing_ok=True)
        for name in (SHARDS, RESULT):
            shutil.rmtree(folder / name, ignore_errors=True)
        plan.write(folder)
    return True
