"""What a run directory tells of a run's past: steps, evaluations, incidents, checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from optimus_compiler.runtime.checkpoint.folder import Checkpoint, CheckpointFolder
from optimus_compiler.runtime.metrics import METRICS, Evaluation, StepMetrics, read_evaluations, read_metrics
from optimus_compiler.runtime.resilience.incidents import INCIDENTS, read_incidents


@dataclass(frozen=True)
class History:
    """A run so far. Incidents and checkpoints are those after so many steps."""

    steps: list[StepMetrics]
    evaluations: list[Evaluation]
    incidents: list[tuple[int, str]]  # (step, kind)
    full: list[int]  # full checkpoints that are there
    weights_alone: list[int]  # and those of weights alone
    deleted: list[int]  # checkpoints that gave way to later ones, of either kind


def read_history(run: Path) -> History:
    """Reads a run directory, which another process may be writing; raises ValueError for a broken or missing file."""
    steps = read_metrics(run)
    found = [each for each in CheckpointFolder(run).found() if isinstance(each, Checkpoint)]
    full, weights_alone = (
        sorted(each.manifest.progress.step for each in found if each.kind == kind) for kind in ("full", "model")
    )
    return History(
        steps=steps,
        evaluations=read_evaluations(run),
        incidents=_incidents(run),
        full=full,
        weights_alone=weights_alone,
        deleted=sorted(_saved(run).difference(full, weights_alone)),
    )


def _incidents(run: Path) -> list[tuple[int, str]]:
    try:
        return [(each["step"], each["kind"]) for each in read_incidents(run)]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{run / INCIDENTS} has a line that is no incident ({error}): delete that line") from None


def _saved(run: Path) -> set[int]:
    """After which steps a checkpoint was saved, by the time that the next step has waited for it.

    Lines of steps that were done again count too: the step after a restart has not waited for the checkpoint before it.
    """
    *lines, _cut_short = (run / METRICS).read_text(encoding="utf-8").split("\n")
    records = map(json.loads, lines)
    return {record["step"] - 1 for record in records if record.get("checkpoint_stall")}
