"""Writes the tables that `make bench` and the studies kept in bench/results/ into README.md and docs/, as Markdown.

python -m bench.report

Each lies between a pair of comments that name the result: <!-- bench:NAME --> and <!-- /bench -->.
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"<!-- bench:(?P<name>\S+) -->\n.*?<!-- /bench -->", re.DOTALL)


def markdown(result: dict[str, Any]) -> str:
    """A table with its title above and the machine below."""
    header = "| " + " | ".join(result["columns"]) + " |"
    rule = "|" + "|".join(["---", *["---:"] * (len(result["columns"]) - 1)]) + "|"
    rows = ["| " + " | ".join(row) + " |" for row in result["rows"]]
    return "\n".join([f"**{result['title']}**", "", header, rule, *rows, "", f"*{result['machine']}*"])


def filled(text: str, results: Path) -> str:
    """The text with every marked place filled anew; a place whose result is missing raises FileNotFoundError."""

    def table(match: re.Match[str]) -> str:
        result = json.loads((results / f"{match['name']}.json").read_text())
        return f"<!-- bench:{match['name']} -->\n{markdown(result)}\n<!-- /bench -->"

    return BLOCK.sub(table, text)


def pages() -> list[Path]:
    """Where tables are shown."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


if __name__ == "__main__":
    for page in pages():
        page.write_text(filled(page.read_text(), ROOT / "bench" / "results"))
