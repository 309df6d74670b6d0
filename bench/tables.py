"""Tables of results: on the terminal, and kept as JSON from which report.py fills README.md."""

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from optimus_compiler.runtime.files import whole_file

RESULTS = Path(__file__).parent / "results"
Rows = Sequence[Sequence[str]]


def show(title: str, machine: str, columns: Sequence[str], rows: Rows) -> None:
    """Prints a table."""
    table = Table(title=f"{title}\n{machine}", title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=150).print("\n", table)


def keep(
    name: str, title: str, machine: str, columns: Sequence[str], rows: Rows, folder: Path = RESULTS, **more: Any
) -> None:
    """Writes folder/name.json, whole or not at all; `more` stands in it beside the table."""
    kept = {"title": title, "machine": machine, "columns": list(columns), "rows": [list(row) for row in rows], **more}
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / f"{name}.json") as file:
        file.write((json.dumps(kept, indent=1) + "\n").encode())


def machine() -> str:
    """The CPU, how many of its cores and threads, the versions: what a figure is worth nothing without."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    widest = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags]
    model = models[0] if models else platform.processor()
    return (
        f"{model} ({widest[0] if widest else platform.machine()}), {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} thread(s) a process, torch {torch.__version__}"
    )
