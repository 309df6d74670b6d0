"""SplitPipeline: the segments grouped into the stages of a pipeline, balanced by cost."""

from dataclasses import dataclass, replace
from itertools import pairwise

import networkx as nx
from torch import fx

from optimus_compiler.cost import forward_flops, parameter_count
from optimus_compiler.graphs import copy_graph
from optimus_compiler.passes.base import Pass, PassError, PassReport
from optimus_compiler.passes.pipeline_schedule import check_schedule, in_flight, stage_ranks
from optimus_compiler.program import Program, Segment, keep_outputs


@dataclass(frozen=True)
class SplitPipeline(Pass):
    """Stages of consecutive segments, `virtual_stages` on every rank of pp: stage s runs on rank s mod pp.

    1. The cost of a segment is the mean of its shares of all parameters and of all floating-point operations.
    2. Cut embed, layers, head where the costliest stage is cheapest, and the costs of the others are most even; or
       where `boundaries` say: the layers with which stages 1, 2, ... begin (the number of layers: the head alone).
    3. What depends on inputs only (masks of documents and of padding) is computed by every stage that reads it.
    4. All other values that a later stage reads travel from stage to stage: the hidden states and the two [E] router
       statistics, so that the pooled auxiliary loss is that of the whole model, and so is its gradient.
    5. A parameter is on the stages that read it: a tied embedding on the first and on the last.

    Const segments belong to all stages: every rank evaluates them for itself.
    """

    schedule: str = "1f1b"
    micro_batches: int = 1
    virtual_stages: int = 1
    boundaries: tuple[int, ...] | None = None

    def run(self, program: Program) -> PassReport:
        ranks = program.mesh.pp
        check_schedule(self.schedule, ranks, self.virtual_stages, self.micro_batches)
        chain = [segment for segment in program.segments if segment.kind != "const"]
        starts = self._starts(program, chain, ranks * self.virtual_stages)
        for stage, (start, stop) in enumerate(pairwise((*starts, len(chain)))):
            for segment in chain[start:stop]:
                segment.stage = stage
        _repeat_what_inputs_determine(program)
        for name, spec in program.parameters.items():
            stages = sorted({segment.stage for segment in chain if name in segment.parameters})
            program.parameters[name] = replace(spec, stages=tuple(stages))
        program.schedule = self.schedule
        program.stage_ranks = stage_ranks(ranks, self.virtual_stages)
        program.in_flight = in_flight(self.schedule, ranks, self.virtual_stages, self.micro_batches)
        return self.report(len(starts), *(_describe(chain, stage) for stage in range(len(starts))))

    def _starts(self, program: Program, chain: list[Segment], stages: int) -> list[int]:
        """The index in the chain of every stage's first segment."""
        layers = [index for index, segment in enumerate(chain) if segment.kind == "layer"]
        if not layers:
            raise PassError("SplitPipeline looks for a module list named 'layers' and the model has none: use pp=1")
        if self.boundaries is not None:
            return _given_starts(self.boundaries, layers, stages)
        if stages > len(chain):
            raise PassError(
                f"{stages} stages (pp={program.mesh.pp} x {self.virtual_stages}) are more than the embedding, "
                f"{len(layers)} layers and the head: lower pp or virtual_stages"
            )
        return balanced_cuts(_costs(program, chain), stages)


def _given_starts(boundaries: tuple[int, ...], layers: list[int], stages: int) -> list[int]:
    count = len(layers)
    rising = all(a < b for a, b in pairwise(boundaries))
    if len(boundaries) != stages - 1 or not rising or not all(1 <= b <= count for b in boundaries):
        raise PassError(f"stage_boundaries={list(boundaries)} must be {stages - 1} rising layer numbers from 1 to "
                        f"{count}, the first layers of stages 1 to {stages - 1}")  # fmt: skip
    return [0, *([*layers, layers[-1] + 1][boundary] for boundary in boundaries)]


def _costs(program: Program, chain: list[Segment]) -> list[float]:
    """Step 1."""
    flops_of = forward_flops(program)
    flops = [flops_of[id(segment.graph)] for segment in chain]
    parameters = [parameter_count(program, segment) for segment in chain]
    return [f / max(1, sum(flops)) / 2 + p / max(1, sum(parameters)) / 2
            for f, p in zip(flops, parameters, strict=True)]  # fmt: skip


def balanced_cuts(costs: list[float], stages: int) -> list[int]:
    """Where to cut a chain into `stages` parts, none empty: the first index of each.

    A way to cut is a path through the graph whose node (k, i) says that the first k parts hold the first i elements.
    The lowest limit on the cost of a part that leaves a path is found by bisection; of the paths within it, the one
    whose costs have the least sum of squares is taken.
    """
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    parts = nx.DiGraph()
    for part in range(stages):
        for start in range(part, len(costs)):
            for stop in range(start + 1, len(costs) + 1):
                parts.add_edge((part, start), (part + 1, stop), cost=before[stop] - before[start])
    first, last = (0, 0), (stages, len(costs))

    def within(limit: float) -> nx.DiGraph:
        return nx.subgraph_view(parts, filter_edge=lambda a, b: parts.edges[a, b]["cost"] <= limit)

    limits = sorted({cost for _, _, cost in parts.edges(data="cost")})
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if nx.has_path(within(limits[middle]), first, last) else (middle + 1, high)
    path = nx.shortest_path(within(limits[low]), first, last, weight=lambda a, b, edge: edge["cost"] ** 2)
    return [start for _, start in path[:-1]]


def _repeat_what_inputs_determine(program: Program) -> None:
    """Step 3: a copy of the embed segment in each later stage, with the outputs that no parameter takes part in."""
    made: list[Segment] = []
    for segment in program.segments:
        if segment.kind != "embed":
            continue
        free = _independent_of_parameters(segment)
        for stage in sorted({s.stage for s in program.segments} - {segment.stage}):
            readers = [s for s in program.segments if s.stage == stage]
            read = {name for reader in readers for name in reader.inputs}
            keep = [i for i in free if segment.outputs[i] in read]
            if keep:
                rename = {segment.outputs[i]: f"{segment.outputs[i]}.{stage}" for i in keep}
                outputs = tuple(rename.get(name, name) for name in segment.outputs)
                copy = replace(segment, graph=copy_graph(segment.graph), outputs=outputs, stage=stage)
                keep_outputs([copy], keep)
                for reader in readers:
                    reader.inputs = tuple(rename.get(name, name) for name in reader.inputs)
                made.append(copy)
    for copy in made:
        first = next(i for i, s in enumerate(program.segments) if s.stage == copy.stage and s.kind != "const")
        program.segments.insert(first, copy)


def _independent_of_parameters(segment: Segment) -> list[int]:
    """Which results of a segment no parameter takes part in."""
    tainted: set[fx.Node] = set(segment.placeholders()[: len(segment.parameters)])
    for node in segment.graph.graph.nodes:
        if tainted.intersection(node.all_input_nodes):
            tainted.add(node)
    return [i for i, result in enumerate(segment.results()) if result not in tainted]


def _describe(chain: list[Segment], stage: int) -> str:
    kinds = [segment.kind for segment in chain if segment.stage == stage]
    layers = kinds.count("layer")
    parts = [kind if kind != "layer" else f"{layers} layers" for kind in dict.fromkeys(kinds)]
    return f"stage {stage}: {', '.join(parts)}"
