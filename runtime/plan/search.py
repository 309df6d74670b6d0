"""`--layout auto`: every layout of a number of devices that can be, ranked by the tokens a second of its plan.

1. For each micro-batch, ep and tp the model is captured shallow, and the cost of its layer, embedding and head taken
   for every choice of what to recompute.
2. From these a rough step time and peak follow for each pp and schedule; what does not fit is dropped.
3. The best few are planned exactly, with all passes, and ranked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from optimus_compiler.activation_memory import SegmentMemory, segment_memory
from optimus_compiler.config import Config, ConfigError
from optimus_compiler.layout import check_layout, micro_batches
from optimus_compiler.lower import gradient_marks
from optimus_compiler.models import ModelConfig
from optimus_compiler.passes import PassError
from optimus_compiler.passes.pipeline_schedule import in_flight
from optimus_compiler.program import Program
from optimus_compiler.runtime.plan.deepen import front_program, planned_program
from optimus_compiler.runtime.plan.estimate import Plan, estimate, seconds_of
from optimus_compiler.runtime.plan.hardware import Hardware
from optimus_compiler.runtime.plan.memory import RankMemory, rank_memory
from optimus_compiler.runtime.plan.work import Transfer, segment_work
from optimus_compiler.runtime.run import abstract_mesh, load_model_config

RECOMPUTED = ((), ("moe",), ("norm", "attention", "moe"))
EXACT = 6  # layouts that are planned with all passes
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class _Piece:
    """The embedding, one layer or the head: seconds with collectives, and memory."""

    forward: float
    backward: float
    memory: SegmentMemory


@dataclass(frozen=True)
class _Rough:
    """A layout with what is roughly known of it."""

    config: Config
    seconds: float
    bytes: int


def search(config: Config, hardware: Hardware, processes: int, show: Progress) -> list[Plan]:
    """The best plans, the fastest first. show(what, done, total) is told of the progress.

    The batch of a device stays that of `config`. Tensor parallelism is tried where nothing fits without, expert
    parallelism within a node. Raises ConfigError, naming the limit, where nothing fits.
    """
    model = load_model_config(config.model)
    batch = config.global_batch_size() * processes // abstract_mesh(config).size
    fronts: dict[tuple[int, int, int], Program] = {}
    rough: list[_Rough] = []
    for tp in _divisors(math.gcd(model.num_attention_heads, processes), 4):
        blocks = list(_blocks(config, model, hardware, processes, batch, tp))
        for done, block in enumerate(blocks):
            show(f"layers with tp={tp}", done, len(blocks))
            fronts[_key(block)] = front_program(block)
            rough += _roughly(block, fronts[_key(block)], model, hardware, processes, batch)
        if any(each.bytes <= hardware.memory.si for each in rough):
            break
    fitting = _fastest_of_each_mesh(each for each in rough if each.bytes <= hardware.memory.si)
    if not fitting:
        _refuse(rough, hardware, processes)
    plans = []
    for done, each in enumerate(fitting[:EXACT]):
        show("the best of them, exactly", done, min(EXACT, len(fitting)))
        program = planned_program(each.config, fronts[_key(each.config)])
        plans.append(estimate(program, each.config, hardware))
    fits = [plan for plan in plans if plan.peak_memory <= hardware.memory.si]
    return sorted(fits, key=lambda plan: -plan.tokens_per_second)


def _fastest_of_each_mesh(rough: Iterable[_Rough]) -> list[_Rough]:
    """One schedule and one recomputation for each mesh and micro-batch; the fastest first."""
    best: dict[object, _Rough] = {}
    for each in sorted(rough, key=lambda each: (each.seconds, each.bytes)):
        mesh = each.config.mesh
        best.setdefault((mesh.pp, mesh.dp, *_key(each.config)), each)
    return list(best.values())


def _key(config: Config) -> tuple[int, int, int]:
    return config.train.micro_batch_size, config.mesh.ep, config.mesh.tp


def _with(config: Config, batch: int, blocks: tuple[str, ...] | None = None, **sizes: Any) -> Config:
    """A copy with another batch, other blocks recomputed, other sizes: pp, dp, ep, tp, micro_batch_size, schedule,
    virtual_stages, zero."""
    mesh = {name: size for name, size in sizes.items() if name in ("pp", "dp", "ep", "tp")}
    pipeline = {name: size for name, size in sizes.items() if name in ("schedule", "virtual_stages")}
    micro_batch = sizes.get("micro_batch_size", config.train.micro_batch_size)
    train = {"micro_batch_size": micro_batch, "global_batch_size": batch}
    own = config.activation_checkpointing
    recompute = {"budget": None, "blocks": own.blocks if blocks is None else list(blocks)}
    return config.model_copy(
        update={
            "mesh": config.mesh.model_copy(update=mesh),
            "train": config.train.model_copy(update=train),
            "pipeline": config.pipeline.model_copy(update={"stage_boundaries": None, **pipeline}),
            "activation_checkpointing": own.model_copy(update=recompute),
            "optimizer": config.optimizer.model_copy(update={"sharding": "epso", "zero": sizes.get("zero", 1)}),
        }
    )


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def _blocks(
    config: Config, model: ModelConfig, hardware: Hardware, processes: int, batch: int, tp: int
) -> Iterator[Config]:
    """What a rank's layer can look like: micro-batch and ep; on one stage and one dp rank."""
    experts = getattr(model, "num_experts", 1)
    for ep in _divisors(math.gcd(experts, processes // tp), hardware.devices_per_node // tp):
        for micro_batch in (1, 2, 4):
            if batch % (micro_batch * ep) == 0:
                yield _with(config, micro_batch * ep, pp=1, dp=1, ep=ep, tp=tp, micro_batch_size=micro_batch)


def _roughly(
    block: Config, front: Program, model: ModelConfig, hardware: Hardware, processes: int, batch: int
) -> Iterator[_Rough]:
    """All depths, schedules and recomputations of a block, with rough step times and peaks."""
    for blocks in RECOMPUTED:
        single = _with(block, block.global_batch_size(), blocks=blocks)
        program = planned_program(single, front)
        pieces = _pieces(program, hardware)
        state = rank_memory(program, single, 0)
        for pp, dp, schedule, virtual, zero in _depths(block, model, processes):
            sizes: dict[str, Any] = {"pp": pp, "dp": dp, "schedule": schedule, "virtual_stages": virtual, "zero": zero}
            own = _with(single, batch, **sizes)
            if _is_possible(own, model):
                yield _Rough(own, *_rough(own, pieces, state, model, hardware))


def _depths(block: Config, model: ModelConfig, processes: int) -> Iterator[tuple[int, int, str, int, int]]:
    """pp, dp, schedule, virtual stages and zero."""
    for pp in range(1, min(model.num_hidden_layers, 16) + 1):
        rest = pp * block.mesh.ep * block.mesh.tp
        if processes % rest == 0:
            for schedule, virtual in (("1f1b", 1), ("interleaved-1f1b", 2))[: 1 if pp == 1 else 2]:
                for zero in (1, 2)[: 1 if processes == rest else 2]:
                    yield pp, processes // rest, schedule, virtual, zero


def _rough(
    config: Config, pieces: dict[str, _Piece], state: RankMemory, model: ModelConfig, hardware: Hardware
) -> tuple[float, int]:
    """Seconds of a step, and bytes of the fullest rank; state: of the whole model on one rank."""
    mesh, virtual, count = config.mesh, config.pipeline.virtual_stages, micro_batches(config)
    layer, head = pieces["layer"], pieces["head"]
    layers = math.ceil(model.num_hidden_layers / (mesh.pp * virtual))
    slot = layers * virtual * (layer.forward + layer.backward) + head.forward + head.backward
    zero = config.optimizer.zero
    whole = abstract_mesh(config)
    reduced = seconds_of(Transfer("reduce_scatter", "dp", state.gradients // mesh.pp), whole, hardware)
    gathered = seconds_of(Transfer("all_gather", "dp", state.weights // mesh.pp), whole, hardware)
    seconds = (count + (mesh.pp - 1) / virtual) * slot + reduced * (count if zero == 2 else 1) + gathered

    held = in_flight(config.pipeline.schedule, mesh.pp, virtual, count)
    kept = max(held[: mesh.pp]) * layers * layer.memory.saved * virtual
    working = max(p.memory.saved + max(p.memory.forward, p.memory.backward) for p in pieces.values())
    gradients = state.gradients / (mesh.dp if zero == 2 else 1)
    parts = (state.weights + gradients + state.optimizer / mesh.dp) / mesh.pp
    return seconds, int(parts + kept + working)


def _is_possible(config: Config, model: ModelConfig) -> bool:
    mesh = config.mesh
    if config.global_batch_size() % (config.train.micro_batch_size * mesh.dp * mesh.ep):
        return False
    try:
        check_layout(config, model)
    except (ConfigError, PassError):
        return False
    return True


def _pieces(program: Program, hardware: Hardware) -> dict[str, _Piece]:
    """By kind of segment; layers are alike."""
    marks = gradient_marks(program)
    pieces: dict[str, _Piece] = {}
    for segment in program.segments:
        if segment.kind == "const" or segment.kind in pieces:
            continue
        own = marks[id(segment.graph)]
        forward, backward = (
            work.seconds + sum(seconds_of(transfer, program.mesh, hardware) for transfer in work.transfers)
            for work in segment_work(program, segment, own, hardware)
        )
        pieces[segment.kind] = _Piece(forward, backward, segment_memory(program, segment, own))
    return pieces


def _refuse(rough: list[_Rough], hardware: Hardware, processes: int) -> None:
    limit = f"{hardware.memory.value:g} {hardware.memory.unit}"
    if not rough:
        raise ConfigError(
            f"no layout of {processes} devices divides the model and its batch: choose another number of devices, or "
            "set train.global_batch_size"
        )
    least = min(rough, key=lambda each: each.bytes)
    mesh, recomputed = least.config.mesh, "+".join(least.config.activation_checkpointing.blocks) or "nothing"
    raise ConfigError(
        f"no layout of {processes} devices fits: the leanest, pp={mesh.pp} dp={mesh.dp} ep={mesh.ep} tp={mesh.tp} with "
        f"{recomputed} recomputed, needs {least.bytes / 2**30:.1f} GiB of {limit} a device: use more devices"
    )
