"""incidents.jsonl: what went wrong in a run, whose fault it was, on what evidence, and what was done about it."""

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

INCIDENTS = "incidents.jsonl"

Kind = Literal["hard", "hang", "soft", "divergence", "slow", "unknown"]


@dataclass(frozen=True)
class Incident:
    """One line of incidents.jsonl. node, rank: who is to blame, where somebody is; step: the last one finished."""

    kind: Kind
    node: str | None
    rank: int | None
    step: int
    evidence: list[str]
    action: str
    attempt: int = 0
    time: float = field(default_factory=time.time)  # seconds since 1970


def record(run: Path, incident: Incident) -> None:
    """Appends an incident, to the disk."""
    with open(run / INCIDENTS, "ab", buffering=0) as file:
        file.write(json.dumps(asdict(incident)).encode() + b"\n")
        os.fsync(file.fileno())


def read_incidents(run: Path) -> list[dict[str, Any]]:
    """The incidents of a run, in order; a line that a crash cut short is left out."""
    path = run / INCIDENTS
    if not path.is_file():
        return []
    *lines, _cut_short = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]
