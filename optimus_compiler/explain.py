"""explain: what the passes did to a program, as text."""

import math

from optimus_compiler.passes.base import PassPipeline
from optimus_compiler.program import Program, Segment


def explain(program: Program, pipeline: PassPipeline, graphs: bool = False) -> str:
    """The pipeline, what each pass matched and changed, the distinct segments; with `graphs`, their readable code."""
    lines = [f"mesh      {program.mesh}", f"pipeline  {pipeline}", ""]
    lines += _table(
        ["pass", "matches", "added", "removed", "nodes before", "nodes after", "seconds", "notes"],
        [[r.name, r.matches, r.added, r.removed, r.nodes_before, r.nodes_after, f"{r.seconds:.2f}", "; ".join(r.notes)]
         for r in program.history],
    )  # fmt: skip
    lines.append("")
    lines += _table(
        ["segment", "times", "key", "nodes", "parameters", "elements each", "reads", "gives"],
        [_row(program, group) for group in program.groups()],
    )
    lines += ["", *program.verify()]
    if graphs:
        for group in program.groups():
            lines += ["", f"# {group[0].kind} {group[0].key}, {len(group)} times", readable(group[0])]
    return "\n".join(lines).rstrip()


def readable(segment: Segment) -> str:
    """A segment's graph as Python, its placeholders commented with what they are in the first segment that uses it."""
    code = segment.graph.print_readable(print_output=False)
    names = (*segment.parameters, *segment.inputs)
    legend = [f"# {node.name}: {name}" for node, name in zip(segment.placeholders(), names, strict=True)]
    return "\n".join([*legend, code])


def _row(program: Program, group: list[Segment]) -> list[object]:
    segment = group[0]
    specs = [program.parameters[name] for name in segment.parameters]
    elements = sum(math.prod(spec.local_shape(program.mesh)) for spec in specs)
    nodes = sum(node.op == "call_function" for node in segment.graph.graph.nodes)
    return [
        segment.kind,
        len(group),
        segment.key,
        nodes,
        len(specs),
        f"{elements:,}",
        len(segment.inputs),
        len(segment.outputs),
    ]


def _table(header: list[str], rows: list[list[object]]) -> list[str]:
    """Left-aligned text, right-aligned numbers, two spaces between columns."""
    cells = [header, *[[str(value) for value in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    numeric = [
        bool(rows) and all(str(row[i]).replace(",", "").replace(".", "").isdigit() for row in rows)
        for i in range(len(header))
    ]
    return [
        "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True)).rstrip()
        for row in cells
    ]
