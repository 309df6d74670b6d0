"""Tables of results: on the terminal, and kept as JSON from which report.py fills README.md."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

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


def keep(name: str, title: str, machine: str, columns: Sequence[str], rows: Rows, folder: Path = RESULTS) -> None:
    """Writes folder/name.json."""
    kept = {"title": title, "machine": machine, "columns": list(columns), "rows": [list(row) for row in rows]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
