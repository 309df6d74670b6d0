"""Finds the checkpoint that a run continues from: the newest whose every byte is what was written."""

from collections.abc import Callable
from pathlib import Path

from optimus_compiler.mesh import DIMENSIONS, Mesh
from optimus_compiler.runtime.checkpoint.folder import Checkpoint, CheckpointFolder, Unreadable, open_checkpoint
from optimus_compiler.runtime.checkpoint.manifest import CheckpointError
from optimus_compiler.runtime.collectives import from_all, from_first, together


def find_newest(folder: CheckpointFolder, mesh: Mesh, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint, full before weights alone; None where there is none. Every rank calls it.

    The ranks divide the reading. What is torn or damaged is told to `say` and left alone; the folder remembers it as
    the first to give way to the next save.
    """
    world = mesh.group(*DIMENSIONS)
    with together(mesh):
        found, torn = (folder.found(), folder.torn()) if mesh.rank == 0 else ([], [])
    found, torn = from_first((found, torn), world)
    for path in torn:
        say(f"{path} was being written when the run stopped: it is not used")
    for each in sorted(found, key=lambda each: isinstance(each, Checkpoint)):  # first those of unknown age
        if isinstance(each, Checkpoint) and each.manifest.bytes > 2**30:
            say(f"reading {each.path} through, {each.manifest.bytes / 2**30:,.1f} GiB, before it is used")
        fault = each.fault if isinstance(each, Unreadable) else fault_of(each, mesh)
        if isinstance(each, Checkpoint) and fault is None:
            return each
        folder.damaged.add(each.path)
        say(f"{each.path} is damaged and skipped: {fault}")
    return None


def open_newest(path: Path, mesh: Mesh, say: Callable[[str], None]) -> Checkpoint:
    """The checkpoint at `path`, or the newest whole one of the run there; raises CheckpointError where there is none.

    Every rank calls it. What a named checkpoint holds has not been read through.
    """
    folder = CheckpointFolder(path)
    if not folder.path.is_dir():
        with together(mesh):
            return open_checkpoint(path)
    newest = find_newest(folder, mesh, say)
    if newest is None:
        raise CheckpointError(f"{folder.path} holds no whole checkpoint: `optimus checkpoint verify {path}` says why")
    return newest


def open_whole(folder: CheckpointFolder, name: str, mesh: Mesh) -> Checkpoint:
    """The checkpoint of this name; raises CheckpointError where there is none, or a byte is not what was written.

    Every rank calls it.
    """
    with together(mesh):
        names = [each.path.name for each in folder.found()]
        if name not in names:
            has = f"there are {', '.join(names)}" if names else "there are none"
            raise CheckpointError(f"{folder.path} has no checkpoint {name!r}: {has}")
        named = open_checkpoint(folder.path / name)
    if (fault := fault_of(named, mesh)) is not None:
        raise CheckpointError(f"{named.path} is damaged: {fault}: choose another checkpoint")
    return named


def fault_of(checkpoint: Checkpoint, mesh: Mesh) -> str | None:
    """The first file that is not what was written; every rank reads its part of them, and all get the same answer."""
    fault = checkpoint.manifest.fault(checkpoint.path, mesh.rank, mesh.size)
    return next((each for each in from_all(fault, mesh.group(*DIMENSIONS)) if each is not None), None)
