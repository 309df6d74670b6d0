"""`optimus status`: how a run is doing."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer


def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
) -> None:
    """Show how a run is doing.

    Progress and the time left, the checkpoints it would go on from, the nodes of `optimus launch`, and what went wrong.

    \b
    Example:
      optimus status run
    """
    from rich.console import Console
    from rich.table import Table

    from optimus_compiler.config import load_config
    from optimus_compiler.runtime.checkpoint.folder import Checkpoint, CheckpointFolder
    from optimus_compiler.runtime.metrics import read_metrics
    from optimus_compiler.runtime.resilience.incidents import read_incidents
    from optimus_compiler.runtime.resilience.supervisor import STATE

    metrics = read_metrics(run)
    steps, last = load_config(run / "config.toml").train.steps, metrics[-1]
    recent = metrics[-20:]
    seconds = sum(each.seconds + each.checkpoint_stall for each in recent) / len(recent)
    left = timedelta(seconds=round(seconds * (steps - last.step)))
    table = Table("", "", show_header=False)
    table.add_row("step", f"{last.step:,} of {steps:,}, {last.tokens:,} tokens")
    table.add_row("loss", f"{last.loss:.4f}, gradient norm {last.grad_norm:.3f}")
    table.add_row("speed", f"{last.tokens_per_second:,.0f} tokens/s, {seconds:.2f} s a step")
    table.add_row("time left", str(left) if last.step < steps else "done")
    found = [each for each in CheckpointFolder(run).found() if isinstance(each, Checkpoint)]
    names = ", ".join(each.path.name for each in found) or "none"
    table.add_row("checkpoints", names)
    if (run / STATE).is_file():
        for name, value in _nodes(json.loads((run / STATE).read_text())).items():
            table.add_row(name, value)
    console = Console()
    console.print(table)
    incidents = read_incidents(run)
    if incidents:
        told = Table("time", "kind", "node", "rank", "after step", "what was done", title="incidents")
        for each in incidents:
            when = datetime.fromtimestamp(each["time"]).strftime("%Y-%m-%d %H:%M:%S")
            who = [each["node"] or "", "" if each["rank"] is None else str(each["rank"])]
            told.add_row(when, each["kind"], *who, str(each["step"]), each["action"])
        console.print(told)


def _nodes(state: dict[str, Any]) -> dict[str, str]:
    bad = ", ".join(f"{node} ({why})" for node, why in state["bad"].items())
    return {
        "supervisor": f"{state['state']}, attempt {state['attempt'] + 1}",
        "nodes": ", ".join(state["nodes"]),
        "spares": ", ".join(state["spares"]) or "none",
        **({"not used": bad} if bad else {}),
    }
