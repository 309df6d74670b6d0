"""RUN/checkpoints: the checkpoints of a run, in which order they are tried, and what gives way to a new one.

step-N            full, at most two: a save takes the place of the older
model-N           weights alone, kept as the retention says
.NAME.partial     being written, or torn by a crash
abandoned-NAME    set aside when the run was told to go on from another; never loaded by itself
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from optimus_compiler.config import KeepPersistent
from optimus_compiler.runtime.checkpoint.manifest import CheckpointError, CheckpointManifest, Kind
from optimus_compiler.runtime.files import sync_folder

PREFIX: dict[Kind, str] = {"full": "step-", "model": "model-"}
PARTIAL, DELETED = ".partial", ".deleted"
FULL_SLOTS = 2


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is in order; its files may not be."""

    path: Path
    manifest: CheckpointManifest

    @property
    def kind(self) -> Kind:
        """Full, or weights alone."""
        return self.manifest.kind

    @property
    def number(self) -> int:
        """Its place in the order of saves."""
        return self.manifest.number


@dataclass(frozen=True)
class Unreadable:
    """A folder with the name of a checkpoint; `fault` says what is wrong with its manifest."""

    path: Path
    kind: Kind
    fault: str
    number: int = 0


class CheckpointFolder:
    """The checkpoints of a run. What changes the folder is called by one rank."""

    def __init__(self, run: Path) -> None:
        self.path = run / "checkpoints"
        self.damaged: set[Path] = set()  # found so when the run started: the first to give way

    def found(self) -> list[Checkpoint | Unreadable]:
        """All checkpoints in the order in which a run tries them: full ones before weights alone, newest first."""
        found = [_read(path, kind) for kind in PREFIX for path in self._named(kind)]
        return sorted(found, key=lambda each: (each.kind == "full", each.number), reverse=True)

    def torn(self) -> list[Path]:
        """What a crash left half-written."""
        return sorted(self.path.glob(f".*{PARTIAL}"))

    def begin(self, kind: Kind, step: int) -> tuple[Path, int]:
        """Makes room for a checkpoint; the folder to write it in, and its number in the order of saves."""
        self.path.mkdir(parents=True, exist_ok=True)
        for leftover in (*self.torn(), *self.path.glob(f".*{DELETED}")):
            shutil.rmtree(leftover)
        found = self.found()
        if kind == "full":
            self._free_a_slot([each for each in found if each.kind == "full"], step)
        partial = self.path / f".{PREFIX[kind]}{step}{PARTIAL}"
        partial.mkdir()
        return partial, 1 + max((each.number for each in found), default=0)

    def commit(self, partial: Path) -> Path:
        """Gives a complete checkpoint its name: from here on it is one."""
        final = self.path / partial.name.removeprefix(".").removesuffix(PARTIAL)
        sync_folder(partial)
        replaced = self.path / f".{final.name}{DELETED}"
        if final.exists():  # of a step that was done again
            final.rename(replaced)
        partial.rename(final)
        sync_folder(self.path)
        shutil.rmtree(replaced, ignore_errors=True)
        self.damaged.discard(final)
        return final

    def retain(self, keep: KeepPersistent) -> None:
        """Deletes the checkpoints of weights alone that are neither among the last nor at a step to keep."""
        models = [each for each in self.found() if each.kind == "model"]
        for each in models[keep.last :] if keep.last else ():
            stays = isinstance(each, Checkpoint) and keep.every and each.manifest.progress.step % keep.every == 0
            if not stays:
                self._delete(each.path)

    def abandon_before(self, start: Checkpoint) -> list[Path]:
        """Sets aside, under other names, what would be tried before `start`, from which the run is to go on."""
        paths = [each.path for each in self.found()]
        renamed = []
        for path in paths[: paths.index(start.path)]:
            aside = path.with_name(f"abandoned-{path.name}")
            if aside.exists():
                shutil.rmtree(aside)
            renamed.append(path.rename(aside))
        return renamed

    def _free_a_slot(self, full: list[Checkpoint | Unreadable], step: int) -> None:
        """Leaves one full checkpoint beside the one to come: damaged ones go first, one of the same step, the older."""
        name = f"{PREFIX['full']}{step}"

        def worth(each: Checkpoint | Unreadable) -> tuple[bool, bool, int]:
            return isinstance(each, Checkpoint) and each.path not in self.damaged, each.path.name != name, each.number

        for each in sorted(full, key=worth)[: 1 - FULL_SLOTS]:
            self._delete(each.path)

    def _named(self, kind: Kind) -> Iterable[Path]:
        return (path for path in self.path.glob(f"{PREFIX[kind]}*") if path.name.removeprefix(PREFIX[kind]).isdigit())

    def _delete(self, path: Path) -> None:
        """By way of a dot-name: a crash half-way leaves nothing that looks like a checkpoint."""
        doomed = self.path / f".{path.name}{DELETED}"
        path.rename(doomed)
        shutil.rmtree(doomed)
        self.damaged.discard(path)


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a folder that the user names; raises CheckpointError where its manifest says none is."""
    return Checkpoint(path, CheckpointManifest.read(path))


def _read(path: Path, kind: Kind) -> Checkpoint | Unreadable:
    try:
        return open_checkpoint(path)
    except CheckpointError as error:
        return Unreadable(path, kind, str(error))
