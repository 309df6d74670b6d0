"""What a segment does in forward and in backward: seconds of computing, operations, and what it sends to others.

Read from the two graphs that AOTAutograd makes of it, on fake tensors. A product takes the longer of computing and
copying; everything elementwise takes its traffic, as far as fusion leaves it. Collectives are listed, not timed: how
long they take depends on where the ranks are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from optimus_compiler.activation_memory import traced
from optimus_compiler.cost import experts_flops, head_flops, rows_a_rank
from optimus_compiler.lower import COLLECTIVES
from optimus_compiler.mesh import DIMENSIONS
from optimus_compiler.program import Program, Segment
from optimus_compiler.runtime.plan.hardware import Hardware

aten, ops = torch.ops.aten, torch.ops.optimus
# how often the products of forward
EXPERTS = {ops.grouped_mlp: 1, ops.grouped_mlp_backward: 2, ops.grouped_mlp_backward_into: 2}
HEADS = {ops.linear_logsumexp: 1, ops.linear_logsumexp_backward: 3}  # backward computes the logits again


@dataclass(frozen=True)
class Transfer:
    """One collective: of which kind, over which mesh dimensions ("ep", "dp+ep"), and the bytes of its whole tensor."""

    kind: str
    over: str
    bytes: int


@dataclass(frozen=True)
class Work:
    """One direction of a segment, for one micro-batch on one rank."""

    seconds: float
    expert_seconds: float  # of them, what grows with the rows that the rank's experts get
    flops: float
    transfers: tuple[Transfer, ...]

    def __add__(self, other: Work) -> Work:
        return Work(
            self.seconds + other.seconds,
            self.expert_seconds + other.expert_seconds,
            self.flops + other.flops,
            self.transfers + other.transfers,
        )


NOTHING = Work(0.0, 0.0, 0.0, ())


def segment_work(program: Program, segment: Segment, marks: tuple[bool, ...], hardware: Hardware) -> tuple[Work, Work]:
    """Forward and backward of a segment; marks: which of its placeholders need gradients."""
    rows = rows_a_rank(program, segment)
    forward, backward = traced(program, segment, marks)
    return _work(forward, rows, hardware), NOTHING if backward is None else _work(backward, rows, hardware)


def _work(graph: fx.GraphModule, rows: int, hardware: Hardware) -> Work:
    seconds = expert_seconds = flops = 0.0
    transfers = []
    for node in graph.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if str(node.target.namespace) in COLLECTIVES and (over := _group(node)):
            transfers.append(Transfer(_kind(node), over, _whole_bytes(node)))
            continue
        if _is_view(node.target):
            continue
        product = _flops(node, rows)
        spent = _seconds(node, product, hardware)
        seconds += spent
        flops += product
        if node.target.overloadpacket in EXPERTS:
            expert_seconds += spent
    return Work(seconds, expert_seconds, flops, tuple(transfers))


def _seconds(node: fx.Node, flops: float, hardware: Hardware) -> float:
    """Of one operation: a product by the slower of two limits, anything else by its traffic."""
    results, operands = _tensors([node]), _tensors(node.all_input_nodes)
    traffic = sum(t.numel() * t.element_size() for t in [*results, *operands])
    if not flops:
        return traffic * hardware.fusion.si / hardware.memory_bandwidth.si
    widest = max((t.element_size() for t in operands if t.is_floating_point()), default=4)
    rate = (hardware.matmul_fp32 if widest == 4 and results and results[0].element_size() == 4 else hardware.matmul).si
    if node.target.overloadpacket in EXPERTS:  # type: ignore[union-attr]
        rate *= hardware.grouped_matmul.si
    return max(flops / rate, traffic / hardware.memory_bandwidth.si) + hardware.launch.si


def _flops(node: fx.Node, rows: int) -> float:
    """Of a product or of attention; 0 for everything else. Experts count the rows of an even share."""
    packet: Any = node.target.overloadpacket  # type: ignore[union-attr]
    arguments: list[Any] = [_value(argument) for argument in _arguments(node)]
    if packet in EXPERTS:
        gate_up_E2IH = arguments[2 if packet is ops.grouped_mlp else 3]
        return float(EXPERTS[packet] * experts_flops(rows, gate_up_E2IH.shape))
    if packet in HEADS:
        x_TH, w_VH = arguments[0 if packet is ops.linear_logsumexp else 2 :][:2]
        return float(HEADS[packet] * head_flops(x_TH.shape, w_VH.shape))
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:  # the registry knows only what GPUs run
        return float(sdpa_flop_count(*(q_k_or_v.shape for q_k_or_v in arguments[:3])))
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return float(sdpa_backward_flop_count(*(each.shape for each in arguments[:4])))
    if packet in flop_registry:
        keywords = {name: _value(value) for name, value in node.kwargs.items()}
        return float(flop_registry[packet](*arguments, **keywords, out_val=node.meta["val"]))
    return 0.0


def _arguments(node: fx.Node) -> Sequence[Any]:
    """In the order of the schema; operations written in place may be called by keywords."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | {k: v for k, v in node.kwargs.items() if k in names}
    is_ours = str(node.target.namespace) == "optimus"  # type: ignore[union-attr]
    return [given[name] for name in names if name in given] if is_ours else node.args


def _value(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        return argument.meta.get("val")
    if isinstance(argument, (list, tuple)):
        return [_value(each) for each in argument]
    return argument


def _is_view(target: torch._ops.OpOverload) -> bool:
    returns = target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _group(node: fx.Node) -> str:
    """The mesh dimensions that a collective runs over; nothing for other operations."""
    named = [a for a in node.args if isinstance(a, str) and set(a.split("+")) <= set(DIMENSIONS)]
    return named[0] if named else ""


def _kind(node: fx.Node) -> str:
    name = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    known = ("all_gather", "reduce_scatter", "all_reduce")
    return next((kind for kind in known if name.startswith(kind)), "all_to_all")


def _whole_bytes(node: fx.Node) -> int:
    """Of the larger side: what an all-gather gives, a reduce-scatter takes."""
    sides = [_tensors([node]), _tensors(node.all_input_nodes[:1])]
    return max(sum(t.numel() * t.element_size() for t in side) for side in sides)


def _tensors(nodes: Sequence[fx.Node]) -> list[Tensor]:
    values = [node.meta.get("val") for node in nodes]
    flat = [part for value in values for part in (value if isinstance(value, (tuple, list)) else (value,))]
    return [value for value in flat if isinstance(value, Tensor)]
