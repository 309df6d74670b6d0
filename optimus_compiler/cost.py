"""What a segment costs: floating-point operations and parameters, read from its graph on fake tensors."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from optimus_compiler.program import Program, Segment
from optimus_compiler.verify import propagate

ops = torch.ops.optimus


def forward_flops(program: Program) -> dict[int, int]:
    """Floating-point operations of one micro-batch's forward on one rank, for each distinct graph (by id).

    Matrix products and attention; a multiplication with its addition counts 2. Backward costs twice as much.
    """
    found = {}
    for group in program.groups():
        with flop_counter(program, group[0]) as counter:
            propagate(program, group[0])
        found[id(group[0].graph)] = counter.get_total_flops()
    return found


def flop_counter(program: Program, segment: Segment) -> FlopCounterMode:
    """torch's counter, with our operations in a segment's forward: experts count the rows of an even share, tokens *
    choices, not those of their buffers."""
    rows = rows_a_rank(program, segment)

    def experts(x: Sequence[int], weights: Sequence[int], gate_up: Sequence[int], *_: Any, **__: Any) -> int:
        return experts_flops(rows, gate_up)

    def head(x: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
        return head_flops(x, weight)

    return FlopCounterMode(display=False, custom_mapping={ops.grouped_mlp: experts, ops.linear_logsumexp: head})


def experts_flops(rows: int, gate_up: Sequence[int]) -> int:
    """Of the three products of so many rows, forward; gate_up: the table's shape [E, 2, I, H]."""
    _, both, width, hidden = gate_up
    return 2 * rows * (both + 1) * width * hidden


def head_flops(x: Sequence[int], weight: Sequence[int]) -> int:
    """Of tokens [T, H] times a vocabulary [V, H], forward."""
    return 2 * x[0] * weight[0] * weight[1]


def parameter_count(program: Program, segment: Segment) -> int:
    """Elements of the parameters that one rank holds for a segment."""
    return sum(math.prod(program.parameters[name].local_shape(program.mesh)) for name in segment.parameters)


def rows_a_rank(program: Program, segment: Segment) -> int:
    """The rows that the experts of one rank compute when every rank has equally many: S * K."""
    for node in segment.graph.graph.nodes:
        if node.target is ops.plan_exchange.default:
            return node.args[0].meta["val"].numel()
        if node.target is ops.index_tokens.default:
            return node.args[0].meta["val"].numel() // program.mesh.ep
    return 0
