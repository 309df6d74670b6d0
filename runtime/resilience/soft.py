"""Soft failures: a number that is not finite. Which rank made it, and is it a fault of its node or of the training?"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from optimus_compiler.compiled import CompiledModel
from optimus_compiler.program import WATCH
from optimus_compiler.runtime.files import whole_file
from optimus_compiler.runtime.resilience import beacon
from optimus_compiler.runtime.resilience.verdict import Verdict


@dataclass(frozen=True)
class Report:
    """What one rank found after a step whose loss or gradient norm is not finite.

    stage: its coordinate on pp. first: its first value that is not finite, in words; None where it has seen none.
    is_own: it computed that itself, of finite inputs. again: whether the step, repeated, came out the same.
    """

    rank: int
    step: int
    stage: int
    first: str | None
    is_own: bool
    again: bool


def first_fault(compiled: CompiledModel) -> tuple[str, bool] | None:
    """(what, whether this rank computed it itself) of the first value of the last step that was not finite here.

    None where all were. Weights come before everything: no update makes them non-finite, so those that are got spoilt
    here, whatever else arrived.
    """
    if not all(bucket.weights.isfinite().all() for bucket in compiled.buckets):
        return "a weight", True
    sums, gradients = compiled.local_totals(), compiled.probe_gradients()
    points = compiled.program.watch_points
    sequence: list[tuple[str, bool, torch.Tensor]] = []
    for number, each in points.items():
        values = sums[f"{WATCH}{number}"]
        sequence += [(point.what, point.is_local, value) for point, value in zip(each, values, strict=True)]
    sequence.append(("the loss", True, sums["loss"]))
    for number, each in reversed(points.items()):
        if (received := gradients.get(f"{WATCH}{number}")) is not None:
            # what was received on the way forward is sent on the way back
            backward = [(f"the gradient of {point.what}", not point.is_local) for point in reversed(each)]
            sequence += [(*named, value) for named, value in zip(backward, received.flip(0), strict=True)]
    finite = torch.stack([value.float().reshape(-1).sum() for _, _, value in sequence]).isfinite().tolist()
    faults = (
        (what, is_local) for (what, is_local, _), is_finite in zip(sequence, finite, strict=True) if not is_finite
    )
    return next(faults, None)


def write_report(run: Path, compiled: CompiledModel, step: int, *, again: bool) -> None:
    """Leaves this rank's report for the supervisor, where there is one."""
    if beacon.ATTEMPT not in os.environ:
        return
    mesh = compiled.program.mesh
    first, is_own = first_fault(compiled) or (None, False)
    report = Report(mesh.rank, step, mesh.coordinate("pp"), first, is_own, again)
    path = _path(run, int(os.environ[beacon.ATTEMPT]), mesh.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(json.dumps(asdict(report)).encode())


def read_report(run: Path, attempt: int, rank: int) -> Report | None:
    """What a rank left behind in an attempt."""
    try:
        return Report(**json.loads(_path(run, attempt, rank).read_text()))
    except OSError:
        return None


def verdict_of_reports(reports: Sequence[Report], node_of: Callable[[int], str]) -> Verdict:
    """The ranks whose first value that is not finite is their own.

    Divergence where those are all of several ranks of the first stage that has any, and the step repeats itself: one
    node's fault would have come to the others as something received.
    """
    own = [report for report in reports if report.is_own]
    evidence = [f"rank {r.rank} ({node_of(r.rank)}), step {r.step}: {r.first} is not finite, all before it was; "
                f"repeated, the step gave {'the same' if r.again else 'finite numbers'}" for r in own]  # fmt: skip
    first_stage = [report for report in reports if own and report.stage == min(each.stage for each in own)]
    if len(first_stage) > 1 and all(report.is_own and report.again for report in first_stage):
        return Verdict("divergence", tuple(r.rank for r in own), (), tuple(evidence[:3]))
    nodes = tuple(dict.fromkeys(node_of(report.rank) for report in own))
    evidence += [f"rank {r.rank} ({node_of(r.rank)}) received: {r.first}" for r in reports if r.first and not r.is_own]
    return Verdict("soft", tuple(r.rank for r in own), nodes, tuple(evidence[:4]) or ("no rank computed it itself",))


def _path(run: Path, attempt: int, rank: int) -> Path:
    return run / beacon.LOGS / f"attempt-{attempt}" / f"finite-rank-{rank}.json"
