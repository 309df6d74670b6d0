"""The plan of a run: all that its result depends on. Only a run with the same plan may continue another's work."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from pydantic import ValidationError

from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.data.files import whole_file
from optimus_compiler.runtime.data.manifest import Manifest, Recipe, Source
from optimus_compiler.runtime.records import Record

PLAN = "plan.json"
MOST_WEIGHT = 1e6  # so that no count of instances can leave int64


class Input(Record):
    """One input file as it was when the run began."""

    file: str  # absolute
    bytes: int
    modified_ns: int
    weight: float

    @staticmethod
    def of(path: Path, weight: float) -> "Input":
        """What the file system says of `path` now."""
        status = path.stat()
        return Input(file=str(path), bytes=status.st_size, modified_ns=status.st_mtime_ns, weight=weight)


class Plan(Recipe):
    """The recipe, and the input files in reading order."""

    inputs: tuple[Input, ...]

    def write(self, folder: Path) -> None:
        """Writes plan.json into `folder`."""
        with whole_file(folder / PLAN) as file:
            file.write(self.model_dump_json(indent=2).encode() + b"\n")

    @staticmethod
    def read(folder: Path) -> "Plan | None":
        """The plan that `folder` holds, None without one; raises DataError when plan.json is not a plan."""
        path = folder / PLAN
        if not path.is_file():
            return None
        try:
            return Plan.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise DataError(
                f"{path} is not the plan of this version of optimus: delete {folder} to start anew"
            ) from error

    def difference(self, other: "Plan | Manifest") -> str:
        """The first thing in which `other` was made in another way ("seed 0, now 1"), or "" when there is none.

        Files count as the same when path and weight are: their contents are not compared.
        """
        for name in Recipe.model_fields:
            theirs, mine = getattr(other, name), getattr(self, name)
            if theirs != mine:
                return f"{name} {_show(theirs)}, now {_show(mine)}"
        return _other_files(other.sources if isinstance(other, Manifest) else other.inputs, self.inputs)


def _show(value: object) -> str:
    return " ".join(map(str, value.model_dump().values())) if isinstance(value, Record) else str(value)


def _other_files(theirs: Sequence[Input | Source], mine: Sequence[Input]) -> str:
    old, new = ({each.file: each.weight for each in files} for files in (theirs, mine))
    for file in sorted(old.keys() | new.keys()):
        if file not in new:
            return f"{file} among its inputs, which is not now"
        if file not in old:
            return f"{len(old)} inputs, and now {file} too"
        if old[file] != new[file]:
            return f"weight {old[file]} for {file}, now {new[file]}"
    return ""


def weigh(files: Sequence[Path], weights: Mapping[str, float]) -> list[float]:
    """The weight of each file: that of the last pattern (fnmatch on the absolute path) that matches it, or 1.

    Raises DataError for a weight that is not in [0, MOST_WEIGHT], and for a pattern that matches no file.
    """
    for pattern, weight in weights.items():
        if not 0 <= weight <= MOST_WEIGHT:
            raise DataError(
                f"weight {weight} of {pattern!r} is not possible: give a number from 0 to {MOST_WEIGHT:,.0f}"
            )
        if not any(fnmatch(str(file), pattern) for file in files):
            raise DataError(
                f"weight pattern {pattern!r} matches no input file: it is compared with absolute paths such as "
                f"{files[0]}, so begin it with '*'"
            )
    last_first = list(weights.items())[::-1]
    return [
        float(next((weight for pattern, weight in last_first if fnmatch(str(file), pattern)), 1.0)) for file in files
    ]
