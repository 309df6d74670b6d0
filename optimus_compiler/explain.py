"""explain: what the passes did to a program, as text."""

import math

from optimus_compiler.activation_memory import activation_bytes
from optimus_compiler.cost import forward_flops, parameter_count
from optimus_compiler.lower import COLLECTIVES
from optimus_compiler.mesh import DIMENSIONS
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
    lines.append("")
    flops_of = forward_flops(program)
    lines += _table(
        [
            "stage",
            "pp rank",
            "layers",
            "parameters",
            "GFLOPs a micro-batch",
            "activations",
            "collectives a micro-batch",
        ],
        [_stage_row(program, stage, flops_of) for stage in range(len(program.stage_ranks))],
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


def _stage_row(program: Program, stage: int, flops_of: dict[int, int]) -> list[object]:
    """What one rank of a stage has to do; forward and backward of a micro-batch, activations at their most."""
    segments = [segment for segment in program.segments if segment.kind != "const" and segment.stage == stage]
    flops = sum(flops_of[id(segment.graph)] for segment in segments)
    activations = activation_bytes(program, stage)
    return [
        stage,
        program.stage_ranks[stage],
        _layers(program, stage),
        f"{sum(parameter_count(program, segment) for segment in segments):,}",
        f"{3 * flops / 1e9:,.3f}",
        f"{activations / 2**20:,.1f} MiB ({program.in_flight[stage]} in flight)",
        _collectives(segments) or "none",
    ]


def _layers(program: Program, stage: int) -> str:
    """embed, 0-7"""
    segments = [segment for segment in program.segments if segment.kind != "const"]
    layers = [segment for segment in segments if segment.kind == "layer"]
    own = [index for index, segment in enumerate(layers) if segment.stage == stage]
    words = [f"{own[0]}-{own[-1]}" if len(own) > 1 else str(own[0])] if own else []
    ends = {segment.kind for segment in segments if segment.stage == stage and segment.parameters} - {"layer"}
    return ", ".join([*(["embed"] if "embed" in ends else []), *words, *(["head"] if "head" in ends else [])])


def _collectives(segments: list[Segment]) -> str:
    """all_gather ep: 6 (12.0 MiB), ...: those of forward, with the bytes that they give; backward has their mirrors."""
    counts: dict[str, list[int]] = {}
    for segment in segments:
        for node in segment.graph.graph.nodes:
            if str(getattr(node.target, "namespace", "")) in COLLECTIVES:
                groups = [a for a in node.args if isinstance(a, str) and set(a.split("+")) <= set(DIMENSIONS)]
                for group in groups:
                    name = f"{node.target._schema.name.split('::')[1]} {group}"
                    values = node.meta["val"] if isinstance(node.meta["val"], tuple) else (node.meta["val"],)
                    count = counts.setdefault(name, [0, 0])
                    count[0] += 1
                    count[1] += sum(value.numel() * value.element_size() for value in values)
    return ", ".join(f"{name}: {count} ({size / 2**20:,.1f} MiB)" for name, (count, size) in counts.items())


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
