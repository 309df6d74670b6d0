"""Draws docs/passes.png: what each pass did to OLMoE-7B for a mesh of pp=2 x dp=2 x ep=2 x tp=2, nothing allocated.

python -m bench.pass_picture
"""

from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from optimus_compiler.config import Config
from optimus_compiler.runtime.run import captured_program

OUTPUT = Path(__file__).parent.parent / "docs" / "passes.png"
RUN = {
    "model": {"name": "mula-7b-a1b"},
    "mesh": {"pp": 2, "dp": 2, "ep": 2, "tp": 2},
    "train": {"steps": 1, "sequence_length": 2048, "global_batch_size": 16},
    "activation_checkpointing": {"blocks": ["norm", "moe"]},
}
SAYS = {
    "Canonicalise": "drops asserts, aliases and casts\nthat say nothing",
    "CausalMask": "an explicit mask that is causal\nbecomes is_causal",
    "FuseSparseMoE": "each expert block becomes\nindex, grouped MLP, reduce",
    "FuseLoss": "head and cross entropy in one,\nnever whole logits",
    "ExpertParallel": "experts divided over ep;\nall-gather, reduce-scatter",
    "TensorParallel": "heads, widths and vocabulary\ndivided over tp",
    "WidenProducts": "bf16 products in fp32, on CPUs\nthat have none",
    "SplitPipeline": "stages of equal cost over pp",
    "WatchFinite": "who made the first value\nthat is not finite?",
    "CheckpointActivations": "what backward computes again\ninstead of keeping",
    "ShardOptimizer": "EPSO: state divided over every\nrank that would hold a copy",
}
GROUPS = {
    "tidy": ("#dfe7f1", ("Canonicalise", "CausalMask", "WidenProducts")),
    "fuse": ("#fbe0c4", ("FuseSparseMoE", "FuseLoss")),
    "divide": ("#d5ecd4", ("ExpertParallel", "TensorParallel", "SplitPipeline", "ShardOptimizer")),
    "endure": ("#efd9ea", ("WatchFinite", "CheckpointActivations")),
}
WIDTH, HEIGHT, GAP = 2.15, 0.95, 0.3


def draw() -> Figure:
    """Runs the passes and draws a box for each in its place, with the number of graph nodes after it."""
    program, pipeline = captured_program(Config.model_validate(RUN))
    captured = sum(len(segment.graph.graph.nodes) for segment in program.segments)
    pipeline.run(program)
    figure = Figure(figsize=(14.6, 5.4), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(-0.2, 6 * (WIDTH + GAP))
    axes.set_ylim(0.15, 4.85)

    top = 3.75
    _box(axes, 0, top, "a plain OLMoE", "nn.Module, as Hugging\nFace defines it", "#ffffff", 1.6)
    _box(
        axes,
        2.3,
        top,
        "torch.export, cut",
        f"one graph of {captured:,} nodes:\nembed | layer x 16 | head",
        "#ffffff",
        2.2,
    )
    _box(axes, 7.4, top, "lower", "AOTAutograd + Inductor, once\nfor each distinct piece", "#ffffff", 2.2)
    _box(axes, 10.4, top, "run", "buckets, pipeline, EPSO step,\ncheckpoints, `optimus launch`", "#ffffff", 2.3)
    _arrow(axes, (1.65, top + HEIGHT / 2), (2.25, top + HEIGHT / 2))
    _arrow(axes, (9.65, top + HEIGHT / 2), (10.35, top + HEIGHT / 2))

    colours = {name: colour for colour, names in GROUPS.values() for name in names}
    places = [(column * (WIDTH + GAP), 2.05 - row * 1.6) for row in range(2) for column in range(6)]
    for (x, y), report in zip(places, program.history, strict=False):
        found = f"{report.matches:,} found, " if report.matches else ""
        nodes = f"{found}{report.nodes_after:,} nodes"
        _box(axes, x, y, report.name, f"{SAYS[report.name]}\n{nodes}", colours[report.name], WIDTH)
    for (x, y), (next_x, next_y) in pairwise(places[: len(program.history)]):
        if y == next_y:
            _arrow(axes, (x + WIDTH + 0.03, y + HEIGHT / 2), (next_x - 0.03, y + HEIGHT / 2))
    middle = 2.05 + HEIGHT + 0.3
    axes.plot([3.4, 3.4, 1.0], [top - 0.05, middle, middle], color="black", linewidth=1)
    _arrow(axes, (1.0, middle), (1.0, 2.05 + HEIGHT + 0.03))
    row_end, row_start = places[5], places[6]
    between = row_end[1] - 0.3
    axes.plot([row_end[0] + 1, row_end[0] + 1, 1.0], [row_end[1] - 0.03, between, between], color="black", linewidth=1)
    _arrow(axes, (1.0, between), (1.0, row_start[1] + HEIGHT + 0.03))
    last = places[len(program.history) - 1]
    right = 6 * (WIDTH + GAP) - 0.12
    across = 2.05 + HEIGHT + 0.15
    edge = last[0] + WIDTH
    axes.plot([edge + 0.03, right, right, 8.5, 8.5], [last[1] + 0.5, last[1] + 0.5, across, across, top - 0.1],
              color="black", linewidth=1)  # fmt: skip
    _arrow(axes, (8.5, top - 0.15), (8.5, top - 0.03))
    for number, (name, (colour, _)) in enumerate(GROUPS.items()):
        axes.text(4.95 + number * 0.56, top + 0.2, name, fontsize=9, bbox={"facecolor": colour, "edgecolor": "none"})
    axes.text(4.9, top + 0.5, "passes, program to program,\nverified after each:", fontsize=10, va="bottom")
    return figure


def _box(axes: Axes, x: float, y: float, title: str, text: str, colour: str, width: float) -> None:
    style = FancyBboxPatch((x, y), width, HEIGHT, boxstyle="round,pad=0.02,rounding_size=0.08", facecolor=colour)
    axes.add_patch(style)
    axes.text(x + width / 2, y + HEIGHT - 0.1, title, ha="center", va="top", fontsize=11, fontweight="bold")
    axes.text(x + width / 2, y + HEIGHT - 0.38, text, ha="center", va="top", fontsize=8.5, linespacing=1.35)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "linewidth": 1.2})


if __name__ == "__main__":
    FigureCanvasAgg(draw()).print_png(str(OUTPUT))
    print(OUTPUT)
