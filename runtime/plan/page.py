"""`optimus explain --html`: one page that needs no network, with what the passes did to a model and what the plan says.

The graph of every distinct segment stands there after each pass that changed it, folded; lines that the pass wrote are
marked. Placements, the pipeline's timeline and the memory of each stage are drawn as SVG.
"""

from __future__ import annotations

import difflib
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from optimus_compiler.explain import readable
from optimus_compiler.passes.base import PassPipeline, PassReport
from optimus_compiler.program import ParameterSpec, Program
from optimus_compiler.runtime.plan.estimate import Plan

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: .6em 0; } td, th { padding: .2em .7em; border-bottom: 1px solid #ddd; }
th { text-align: left; background: #f4f4f4; } td.n { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: #f8f8f8; padding: .6em; overflow-x: auto; font-size: 12px; } .new { background: #d8f5d8; }
summary { cursor: pointer; padding: .15em 0; } details details { margin-left: 1.2em; } svg text { font-size: 11px; }
"""
FORWARD, BACKWARD = "#5b8def", "#f2a65a"
PARTS = (("weights", "#5b8def"), ("gradients", "#f2a65a"), ("optimizer", "#7bc47f"), ("activations", "#c78fd6"))


@dataclass(frozen=True)
class Snapshot:
    """One pass: its report, and the text of every distinct segment before and after it, by a name for it."""

    report: PassReport
    before: dict[str, str]
    after: dict[str, str]


def run_with_snapshots(program: Program, pipeline: PassPipeline) -> list[Snapshot]:
    """Runs the passes one by one."""
    snapshots = []
    before = _texts(program)
    for step in pipeline.passes:
        report = PassPipeline((step,)).run(program)[-1]  # the history so far, this pass last
        after = _texts(program)
        snapshots.append(Snapshot(report, before, after))
        before = after
    return snapshots


def _texts(program: Program) -> dict[str, str]:
    names: dict[str, int] = {}
    texts = {}
    for group in program.groups():
        kind = group[0].kind
        names[kind] = names.get(kind, 0) + 1
        times = f", {len(group)} times" if len(group) > 1 else ""
        texts[f"{kind} {names[kind]}{times}"] = readable(group[0])
    return texts


def page(plan: Plan, program: Program, snapshots: Sequence[Snapshot]) -> str:
    """The page as HTML."""
    name = html.escape(plan.config.model.name)
    mesh = f"pp={plan.mesh.pp} x dp={plan.mesh.dp} x ep={plan.mesh.ep} x tp={plan.mesh.tp}"
    body = [
        f"<h1>{name} on {mesh}</h1>",
        "<h2>Passes</h2>",
        _pass_table(snapshots),
        "<h2>Graphs</h2>",
        "<p>After each pass that changed them; what it wrote is green.</p>",
        *map(_graphs, snapshots),
        "<h2>Placements</h2>",
        _placements(program),
        "<h2>Pipeline</h2>",
        f"<p>One step, {plan.time.total:.3f} s planned on {html.escape(plan.hardware.name)}; forward blue, backward "
        "orange.</p>",
        _timeline(plan),
        "<h2>Memory</h2>",
        f"<p>Of a rank of each pp coordinate; the line is the device's {plan.hardware.memory.value:g} "
        f"{plan.hardware.memory.unit}.</p>",
        _memory(plan),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}: optimus explain</title>'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = []
    for row in rows:
        cells = (f'<td class="{"n" if isinstance(c, (int, float)) else ""}">{_cell(c)}</td>' for c in row)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else html.escape(str(value))


def _pass_table(snapshots: Sequence[Snapshot]) -> str:
    rows = []
    for snapshot in snapshots:
        r = snapshot.report
        rows.append([r.name, r.matches, r.nodes_before, r.nodes_after, f"{r.seconds:.2f}", "; ".join(r.notes)])
    return _table(["pass", "matches", "nodes before", "nodes after", "seconds", "notes"], rows)


def _graphs(snapshot: Snapshot) -> str:
    """A fold for the pass, in it one for each segment that it changed."""
    folds = []
    for name, text in snapshot.after.items():
        before = snapshot.before.get(name, _nearest(name, snapshot.before))
        if text != before:
            folds.append(f"<details><summary>{html.escape(name)}</summary>{_marked(before, text)}</details>")
    if not folds:
        return ""
    return f"<details><summary><b>{snapshot.report.name}</b></summary>{''.join(folds)}</details>"


def _nearest(name: str, texts: dict[str, str]) -> str:
    """The same segment where its number of uses was another."""
    kind = name.split(",")[0]
    return next((text for other, text in texts.items() if other.split(",")[0] == kind), "")


def _marked(before: str, after: str) -> str:
    """The text before, folded, and the text after with its new lines marked."""
    lines = []
    for line in difflib.ndiff(before.splitlines(), after.splitlines()):
        if line.startswith("+ "):
            lines.append(f'<span class="new">{html.escape(line[2:])}</span>')
        elif line.startswith("  "):
            lines.append(html.escape(line[2:]))
    folded = f"<details><summary>before</summary><pre>{html.escape(before)}</pre></details>"
    return f"{folded}<pre>{chr(10).join(lines)}</pre>"


def _placements(program: Program) -> str:
    """Parameters of the embedding, the first layer and the head: what each mesh dimension does to them."""
    first = {name: spec for name, spec in program.parameters.items() if "layers." not in name or "layers.0." in name}
    rows = []
    for name, spec in first.items():
        local = spec.local_shape(program.mesh)
        dimensions = [_placement(spec, dimension, program) for dimension in ("pp", "dp", "ep", "tp")]
        rows.append([name, " x ".join(map(str, spec.shape)), " x ".join(map(str, local)), *dimensions])
    return _table(["parameter", "shape", "on a rank", "pp", "dp", "ep", "tp"], rows)


def _placement(spec: ParameterSpec, dimension: str, program: Program) -> str:
    if dimension == "pp":
        return "stage " + ", ".join(map(str, spec.stages))
    if program.mesh.size_of(dimension) == 1:
        return "-"
    if dimension in spec.placement:
        return f"divided on dimension {spec.placement[dimension]}"
    return "copied, state divided" if dimension in spec.state else "copied"


def _timeline(plan: Plan) -> str:
    """A row a rank, a bar an action."""
    end = max(action.end for action in plan.schedule)
    width, height = 1000, 22
    bars = []
    for action in plan.schedule:
        x, y = 60 + width * action.start / end, action.rank * height
        length = max(width * (action.end - action.start) / end - 0.5, 0.5)
        what = f"stage {action.stage}, micro-batch {action.micro_batch}, {'forward' if action.forward else 'backward'}"
        colour = FORWARD if action.forward else BACKWARD
        bars.append(
            f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="{height - 4}" fill="{colour}">'
            f"<title>{what}: {action.start:.4f} to {action.end:.4f} s</title></rect>"
        )
    labels = [f'<text x="0" y="{rank * height + 14}">pp rank {rank}</text>' for rank in range(plan.mesh.pp)]
    size = f'viewBox="0 0 {width + 70} {plan.mesh.pp * height}" width="100%"'
    return f'<svg id="timeline" {size}>{"".join(labels + bars)}</svg>'


def _memory(plan: Plan) -> str:
    """A bar a rank, its parts stacked."""
    limit = plan.hardware.memory.si
    scale = 900 / max(limit, plan.peak_memory)
    height, shapes = 24, []
    for rank, memory in enumerate(plan.memory):
        x = 70.0
        shapes.append(f'<text x="0" y="{rank * height + 15}">pp rank {rank}</text>')
        for part, colour in PARTS:
            size = getattr(memory, part)
            shapes.append(
                f'<rect x="{x:.1f}" y="{rank * height}" width="{size * scale:.1f}" height="{height - 6}" '
                f'fill="{colour}"><title>{part}: {size / 2**30:.2f} GiB</title></rect>'
            )
            x += size * scale
        shapes.append(f'<text x="{x + 6:.0f}" y="{rank * height + 15}">{memory.peak / 2**30:.2f} GiB</text>')
    edge = 70 + limit * scale
    bottom = plan.mesh.pp * height
    shapes.append(f'<line x1="{edge:.1f}" x2="{edge:.1f}" y1="0" y2="{bottom}" stroke="#c00" stroke-width="2"/>')
    legend = " ".join(f'<span style="color:{colour}">&#9632;</span> {part}' for part, colour in PARTS)
    return f'<svg id="memory" viewBox="0 0 1060 {bottom}" width="100%">{"".join(shapes)}</svg><p>{legend}</p>'
