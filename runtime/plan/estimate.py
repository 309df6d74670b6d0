"""One layout of one run on one machine: memory of every rank, and the time of a step, split into what it is spent on.

Computing comes from the graphs (work.py), collectives from their bytes and the slowest link they cross, the pipeline
from its schedule (schedule.py). Collectives inside a segment are waited for; the reduction of gradients overlaps with
the last micro-batch's backward; the optimizer and the gathering of weights follow.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from optimus_compiler.config import Config
from optimus_compiler.layout import micro_batches
from optimus_compiler.lower import gradient_marks
from optimus_compiler.mesh import DIMENSIONS, Mesh
from optimus_compiler.program import Program, Segment
from optimus_compiler.runtime.metrics import flops_per_token
from optimus_compiler.runtime.plan.hardware import Hardware
from optimus_compiler.runtime.plan.memory import RankMemory, gradient_bytes, rank_memory
from optimus_compiler.runtime.plan.schedule import Action, run_schedule
from optimus_compiler.runtime.plan.work import NOTHING, Transfer, Work, segment_work
from optimus_compiler.runtime.reduction import owners
from optimus_compiler.runtime.run import load_model_config

UPDATE_BYTES = 36  # AdamW an owned element: gradient, master, moments, weight, and the clipped copy


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage, for one micro-batch."""

    forward: Work
    backward: Work
    forward_waits: float  # seconds in collectives
    backward_waits: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the rank that is busiest."""

    compute: float
    communication: float  # exposed: waited for
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        """The whole step."""
        return self.compute + self.communication + self.bubble + self.optimizer


@dataclass(frozen=True)
class Plan:
    """What a layout takes."""

    config: Config
    mesh: Mesh
    hardware: Hardware
    micro_batches: int
    stages: tuple[StagePlan, ...]
    stage_ranks: tuple[int, ...]
    memory: tuple[RankMemory, ...]  # by coordinate of pp
    transfers: tuple[dict[tuple[str, str], tuple[int, int]], ...]  # by coordinate: (kind, over) -> count, bytes a step
    schedule: tuple[Action, ...]
    time: StepTime
    tokens: int  # a step, of all ranks
    model_flops: float  # a token, as MFU counts them

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.tokens / self.time.total

    @property
    def mfu(self) -> float:
        """Share of the devices' peak."""
        return self.tokens_per_second * self.model_flops / (self.mesh.size * self.hardware.peak.si)

    @property
    def joules_per_token(self) -> float:
        """Of all devices, hosts and network."""
        return self.hardware.power.si * self.mesh.size / self.tokens_per_second

    @property
    def peak_memory(self) -> int:
        """Of the rank that needs most."""
        return max(memory.peak for memory in self.memory)


def estimate(program: Program, config: Config, hardware: Hardware, stages: tuple[StagePlan, ...] | None = None) -> Plan:
    """The plan of a program after the passes for its mesh; stages: of an earlier plan that differs in dp alone."""
    mesh = program.mesh
    count = micro_batches(config)
    stages = stages or tuple(_stages(program, hardware))
    memory = tuple(rank_memory(program, config, rank) for rank in range(mesh.pp))
    moved = tuple(_moved(program, config, stages, rank, count) for rank in range(mesh.pp))
    virtual = len(stages) // mesh.pp
    schedule = run_schedule(
        config.pipeline.schedule, mesh.pp, virtual, count,
        [stage.forward.seconds + stage.forward_waits for stage in stages],
        [stage.backward.seconds + stage.backward_waits for stage in stages],
        _between_stages(program, config, hardware),
    )  # fmt: skip
    model = load_model_config(config.model)
    sequence = config.train.sequence_length or model.max_position_embeddings
    return Plan(
        config, mesh, hardware, count, stages, program.stage_ranks, memory, moved, tuple(schedule),
        _step_time(program, config, hardware, stages, schedule, count, memory),
        tokens=config.global_batch_size() * sequence, model_flops=flops_per_token(model, sequence),
    )  # fmt: skip


def seconds_of(transfer: Transfer, mesh: Mesh, hardware: Hardware) -> float:
    """A collective over a group of ranks, level by level from the innermost link outwards.

    Of k ranks that share a link, each keeps a k-th of the tensor after exchanging there, and has only that to exchange
    with those further away: what leaves a node leaves through all its devices at once.
    """
    places = _places(transfer.over, mesh)
    seconds, held, inside = 0.0, float(transfer.bytes), 1
    for link in hardware.links:
        reached = sum(place < link.within for place in places)
        parts = reached // inside
        if parts > 1:
            seconds += (parts - 1) / parts * held / link.bandwidth.si + math.ceil(math.log2(parts)) * link.latency.si
            held, inside = held / parts, reached
    return seconds * (2 if transfer.kind == "all_reduce" else 1)


@cache
def _places(over: str, mesh: Mesh) -> tuple[int, ...]:
    """Where the ranks of the group of rank 0 are, counted along all ranks."""
    places = [0]
    for index, name in enumerate(DIMENSIONS):
        if name in over.split("+"):
            stride = mesh.size_of(*DIMENSIONS[index + 1 :])
            places = [place + stride * i for place in places for i in range(mesh.size_of(name))]
    return tuple(sorted(places))


def _stages(program: Program, hardware: Hardware) -> Iterable[StagePlan]:
    marks = gradient_marks(program)
    known: dict[tuple[str, tuple[bool, ...]], tuple[Work, Work]] = {}

    def works(segment: Segment) -> tuple[Work, Work]:
        key = (segment.key, marks[id(segment.graph)])
        if key not in known:
            known[key] = segment_work(program, segment, key[1], hardware)
        return known[key]

    for stage in range(len(program.stage_ranks)):
        forward = backward = NOTHING
        for segment in program.segments:
            if segment.kind != "const" and segment.stage == stage:
                forwards, backwards = works(segment)
                forward, backward = forward + forwards, backward + backwards
        waits = [sum(seconds_of(t, program.mesh, hardware) for t in work.transfers) for work in (forward, backward)]
        yield StagePlan(forward, backward, *waits)


def _gradient_transfers(program: Program, config: Config, rank: int) -> list[Transfer]:
    """The optimizer's collectives of the ranks at a coordinate of pp: gradients reduced, weights gathered."""
    stages = set(program.stages_on(rank))
    sums: Counter[tuple[str, str]] = Counter()
    for spec in program.parameters.values():
        if not spec.trainable or not stages & set(spec.stages):
            continue
        elements = math.prod(spec.local_shape(program.mesh))
        own, item = owners(spec.state, config.optimizer.sharding), spec.dtype.itemsize
        rest = tuple(name for name in spec.replicated() if name not in own)
        reduced = gradient_bytes(spec, config)
        if over := _divided(own, program.mesh):
            sums["reduce_scatter", over] += elements * reduced
            sums["all_gather", over] += elements * item
        if over := _divided(rest, program.mesh):
            sums["all_reduce", over] += elements * reduced // program.mesh.size_of(*own)
    return [Transfer(kind, over, size) for (kind, over), size in sums.items()]


def _divided(dimensions: tuple[str, ...], mesh: Mesh) -> str:
    """Those of more than one rank: dp+ep."""
    return "+".join(name for name in dimensions if mesh.size_of(name) > 1)


def _moved(
    program: Program, config: Config, stages: tuple[StagePlan, ...], rank: int, count: int
) -> dict[tuple[str, str], tuple[int, int]]:
    found: dict[tuple[str, str], tuple[int, int]] = {}

    def add(transfer: Transfer, times: int) -> None:
        if program.mesh.size_of(*transfer.over.split("+")) > 1:
            before = found.get((transfer.kind, transfer.over), (0, 0))
            found[transfer.kind, transfer.over] = (before[0] + times, before[1] + times * transfer.bytes)

    for stage, at in zip(stages, program.stage_ranks, strict=True):
        if at == rank:
            for transfer in (*stage.forward.transfers, *stage.backward.transfers):
                add(transfer, count)
    for transfer in _gradient_transfers(program, config, rank):
        add(transfer, 1 if transfer.kind == "all_gather" else _reductions(config, count))
    return found


def _reductions(config: Config, micro_batches: int) -> int:
    """How often gradients are reduced in a step: zero=2 keeps no whole ones from one micro-batch to the next."""
    return micro_batches if config.optimizer.zero == 2 else 1


def _between_stages(program: Program, config: Config, hardware: Hardware) -> float:
    """Seconds from one stage to the next: what the second stage reads of the first."""
    mesh = program.mesh
    if mesh.pp == 1:
        return 0.0
    values = [program.example(name) for name in program.carried_into(1)]
    link = hardware.link(mesh.size)
    return sum(v.numel() * v.element_size() for v in values) / link.bandwidth.si + link.latency.si


def _step_time(
    program: Program,
    config: Config,
    hardware: Hardware,
    stages: tuple[StagePlan, ...],
    schedule: list[Action],
    count: int,
    memory: tuple[RankMemory, ...],
) -> StepTime:
    busy = [0.0] * program.mesh.pp
    for action in schedule:
        busy[action.rank] += action.end - action.start
    rank = max(range(program.mesh.pp), key=lambda each: busy[each])
    own = [stage for stage, at in zip(stages, program.stage_ranks, strict=True) if at == rank]
    waits = count * sum(stage.forward_waits + stage.backward_waits for stage in own)
    compute = busy[rank] - waits
    bubble = max(action.end for action in schedule) - busy[rank]

    transfers = _gradient_transfers(program, config, rank)
    reducing = sum(seconds_of(t, program.mesh, hardware) for t in transfers if t.kind != "all_gather")
    gathering = sum(seconds_of(t, program.mesh, hardware) for t in transfers if t.kind == "all_gather")
    backward = sum(stage.backward.seconds + stage.backward_waits for stage in own)
    segments = sum(1 for segment in program.segments if program.stage_ranks[segment.stage] == rank)
    last = reducing / segments  # the last bucket's reduction has nothing left to hide behind
    exposed = _reductions(config, count) * max(reducing - backward, last)
    update = memory[rank].owned * UPDATE_BYTES / hardware.memory_bandwidth.si
    return StepTime(compute, waits + exposed, bubble, update + gathering)
