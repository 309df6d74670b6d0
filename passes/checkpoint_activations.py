"""CheckpointActivations: which activations backward computes again instead of keeping them (paper: SAC)."""

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import get_args

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

import optimus_compiler.runtime.kernels  # noqa: F401  registers the operations
from optimus_compiler.activation_memory import SegmentMemory, parse_bytes, peak, segment_memory
from optimus_compiler.graphs import copy_graph
from optimus_compiler.lower import gradient_marks
from optimus_compiler.passes.base import Pass, PassError, PassReport
from optimus_compiler.passes.checkpoint_blocks import Block, block_of, is_residual_addition
from optimus_compiler.passes.rewrite import chooses_experts
from optimus_compiler.program import Program, Segment

aten, ops, c10d = torch.ops.aten, torch.ops.optimus, torch.ops._c10d_functional
ROUTING = {aten.topk.default, aten.sort.default, aten.histc.default, aten.cumsum.default, ops.index_tokens.default,
           ops.plan_exchange.default}  # fmt: skip
ATTENTION = {aten.scaled_dot_product_attention.default}  # its backward computes again by itself
GATHERS = {c10d.all_gather_into_tensor.default, ops.send_tokens.default}
SUMS = {c10d.all_reduce.default, c10d.reduce_scatter_tensor.default, ops.return_tokens.default}


@dataclass(frozen=True)
class CheckpointActivations(Pass):
    """Keeps the inputs of norm, attention and moe blocks and computes what is inside them again in backward.

    1. A node of a layer belongs to the block that the layer's own submodule makes it: norm, attention, or moe (the MLP
       of a dense layer).
    2. Nodes of the chosen blocks are tagged "recompute" for the partitioner of AOTAutograd, all others are left to it.
    3. Tagged "save", whatever was chosen: routing (scores, choices and index tables: done again, a near tie may fall
       the other way), residual additions, attention itself, and sums over ranks.
    4. The all-gather that brings a block its tokens is run again in backward, in the same order on every rank;
       keep_gathered saves its result.
    5. memory_budget: per layer the cheapest blocks (fewest operations done again) with which the activations of every
       rank fit, by the estimate of activation_memory.py. `blocks` are chosen everywhere, the budget adds to them.

    Statistics of the router have no backward: nothing counts them twice.
    """

    blocks: tuple[str, ...] = ()
    memory_budget: str | None = None
    keep_gathered: bool = False

    def run(self, program: Program) -> PassReport:
        for name in self.blocks:
            if name not in get_args(Block):
                raise PassError(f"activation_checkpointing names {name!r}: choose from {', '.join(get_args(Block))}")
        present = {block_of(node) for segment in _layers(program) for node in segment.graph.graph.nodes}
        for name in self.blocks:
            if name not in present:
                raise PassError(f"CheckpointActivations found no {name} block: it looks at the modules that each "
                                "decoder layer is made of")  # fmt: skip
        always = frozenset(self.blocks)
        for group in program.groups():
            if group[0].kind == "layer":
                self._tag(group[0].graph, always)
        notes = [f"{' + '.join(self.blocks) or 'nothing'} in every layer"]
        if self.memory_budget is not None:
            notes += self._fit(program, parse_bytes(self.memory_budget), always)
        tagged = sum(_is_tagged(node) for segment in _layers(program) for node in segment.graph.graph.nodes)
        return self.report(tagged, *notes)

    def _tag(self, graph: fx.GraphModule, chosen: frozenset[str]) -> fx.GraphModule:
        """Steps 2 to 4 on one layer's graph, which is returned."""
        for node in graph.graph.nodes:
            if node.op == "call_function":
                node.meta.pop("recompute", None)
                policy = self._policy(node, chosen)
                if policy is not None:
                    node.meta["recompute"] = policy
                    node.meta["ac_graph_id"] = 0
        return graph

    def _policy(self, node: fx.Node, chosen: frozenset[str]) -> CheckpointPolicy | None:
        if not chosen:
            return None
        made_by = _producer(node)
        keep = ROUTING | ATTENTION | SUMS | (GATHERS if self.keep_gathered else set())
        if made_by.target in keep or is_residual_addition(node) or chooses_experts(node):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.MUST_RECOMPUTE if block_of(node) in chosen else None

    def _fit(self, program: Program, budget: int, always: frozenset[str]) -> list[str]:
        """Step 5, one stage after the other."""
        notes, marks = [], gradient_marks(program)
        for stage, rank in enumerate(program.stage_ranks):
            share = budget // program.stage_ranks.count(rank)  # of a rank's virtual stages each has an equal one
            segments = [s for s in program.segments if s.kind != "const" and s.stage == stage]
            chosen = {index: always for index, segment in enumerate(segments) if segment.kind == "layer"}
            memories = [segment_memory(program, segment, marks[id(segment.graph)]) for segment in segments]
            before = peak(program, stage, memories)
            for step in self._steps(program, segments, marks, always):
                if peak(program, stage, memories) <= share:
                    break
                chosen[step.segment], memories[step.segment] = step.blocks, step.memory
            after = peak(program, stage, memories)
            if after > share:
                raise PassError(
                    f"memory_budget={self.memory_budget!r}: stage {stage} holds {_mib(after)} of activations even with "
                    "every block checkpointed: raise the budget, lower micro_batch_size, or use more stages"
                )
            for index, blocks in chosen.items():
                if blocks != always:
                    segments[index].graph = self._tag(copy_graph(segments[index].graph), blocks)
            words = [" + ".join(sorted(blocks)) or "nothing" for blocks in chosen.values()]
            counts = ", ".join(f"{words.count(word)} x {word}" for word in dict.fromkeys(words))
            notes.append(f"stage {stage}: {_mib(before)} -> {_mib(after)}: {counts or 'no layers'}")
        program.deduplicate()
        return notes

    def _steps(
        self, program: Program, segments: list[Segment], marks: dict[int, tuple[bool, ...]], always: frozenset[str]
    ) -> list["_Step"]:
        """What to checkpoint next, the cheapest first: operations done again for each byte no longer kept."""
        ladders: dict[int, list[_Step]] = {}
        found = []
        for index, segment in enumerate(segments):
            if segment.kind == "layer":
                graph = id(segment.graph)
                if graph not in ladders:
                    ladders[graph] = self._ladder(program, segment, marks[graph], always)
                found += [(step.cost, height, index, step) for height, step in enumerate(ladders[graph])]
        return [replace(step, segment=index) for _, _, index, step in sorted(found, key=lambda each: each[:3])]

    def _ladder(
        self, program: Program, segment: Segment, marks: tuple[bool, ...], always: frozenset[str]
    ) -> list["_Step"]:
        """The choices of one layer worth taking, each with the cost of going there from the one before."""
        measured = {}
        for blocks in {frozenset(extra) | always for extra in _subsets(get_args(Block))}:
            trial = replace(segment, graph=self._tag(copy_graph(segment.graph), blocks))
            measured[blocks] = segment_memory(program, trial, marks)
        ladder: list[_Step] = []
        at = always
        while True:
            here = measured[at]
            onward = [
                _Step((there.backward_flops - here.backward_flops) / (here.saved - there.saved), 0, blocks, there)
                for blocks, there in measured.items()
                if there.saved < here.saved and blocks > at
            ]
            if not onward:
                return ladder
            ladder.append(min(onward, key=lambda step: (step.cost, sorted(step.blocks))))
            at = ladder[-1].blocks


@dataclass(frozen=True)
class _Step:
    """One layer (the index of its segment) with more blocks checkpointed."""

    cost: float  # operations for each byte
    segment: int
    blocks: frozenset[str]
    memory: SegmentMemory


def _layers(program: Program) -> list[Segment]:
    return [segment for segment in program.segments if segment.kind == "layer"]


def _producer(node: fx.Node) -> fx.Node:
    """The operation whose result a node is, past the unpacking of tuples and the wait for a collective."""
    while node.target in (operator.getitem, c10d.wait_tensor.default):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_tagged(node: fx.Node) -> bool:
    return node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE


def _subsets(names: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    return chain.from_iterable(combinations(names, size) for size in range(len(names) + 1))


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
