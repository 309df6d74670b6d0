"""An expert block found in a graph, and the numerical check that it is a routed, gated MLP."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from optimus_compiler.passes.rewrite import tensor_of
from optimus_compiler.runtime.kernels import moe

CHECK_FLOPS = 10**8  # a region above this is checked at reduced sizes
SMALLEST = 8  # no size is reduced below this many elements (16 bytes of bf16)
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class ExpertRegion:
    """The operations of one expert block: three activations and the experts' weights in, one activation out."""

    path: str
    nodes: list[fx.Node]
    parameters: list[fx.Node]
    indices: fx.Node  # [T, K], integer
    floating: tuple[fx.Node, ...]  # hidden states and routing weights, in no known order
    output: fx.Node
    is_loop: bool
    micro_batch_size: int
    sequence_length: int


@dataclass(frozen=True)
class Roles:
    """Which input of a region is what."""

    x: fx.Node
    weights: fx.Node  # [T, K]
    gate_up: list[fx.Node]  # one [E, 2I, H], or gate and up [I, H] of each expert in turn
    down: list[fx.Node]  # one [E, H, I], or one [H, I] an expert

    @property
    def top_k(self) -> int:
        """Experts a token chooses."""
        return tensor_of(self.weights).shape[-1]

    def sizes(self) -> tuple[int, int, int]:
        """Experts E, width I, hidden size H."""
        shape = tensor_of(self.down[0]).shape
        return (shape[0] if len(shape) == 3 else len(self.down)), shape[-1], shape[-2]


def computes_gated_mlp(region: ExpertRegion, roles: Roles) -> bool:
    """Runs the region on random inputs beside the reference; True where they agree to rounding.

    A big region is run with batch, hidden and width sizes divided by a common factor, which every size written into
    its operations is divided by as well: what is checked is which numbers are combined, not their count.
    """
    experts, width, hidden = roles.sizes()
    length, tokens = region.sequence_length, region.sequence_length * region.micro_batch_size
    factor = _reduction(region, roles)
    graded = {length, tokens, tokens * roles.top_k, width, 2 * width, hidden}
    graded |= {size * experts for size in (tokens, width, 2 * width, hidden)}
    shrink = {size: size // factor for size in graded} if factor > 1 else {}

    generator = torch.Generator().manual_seed(0)
    order = [*region.parameters, region.indices, *region.floating]
    values = {node: _random(node, shrink, generator) for node in order}
    for node in region.parameters:
        values[node] *= (hidden // factor) ** -0.5
    few = tokens // factor
    scores = torch.rand(few, experts, generator=generator)
    values[region.indices] = scores.topk(roles.top_k, dim=-1).indices
    with torch.no_grad():
        found = _Shrunk(_as_module(region, order), shrink).run(*(values[node].clone() for node in order))
        stacked = torch.stack([values[node] for node in roles.gate_up])
        gate_up = stacked.reshape(experts, 2, width // factor, hidden // factor)
        down = torch.stack([values[node] for node in roles.down]).reshape(experts, hidden // factor, width // factor)
        x = values[roles.x].reshape(few, -1).to(gate_up.dtype)
        expected = moe(x, values[roles.weights], values[region.indices], gate_up, down)
    error = (found.reshape(few, -1).double() - expected.double()).norm() / expected.double().norm()
    return bool(error < TOLERANCE[gate_up.dtype])


def _reduction(region: ExpertRegion, roles: Roles) -> int:
    """The power of two by which sequence, hidden and width sizes are divided; 1 for a small region."""
    experts, width, hidden = roles.sizes()
    rows = region.micro_batch_size * region.sequence_length * roles.top_k
    factor, common = 1, math.gcd(region.sequence_length, width, hidden)
    if 6 * rows * width * hidden <= CHECK_FLOPS:
        return 1
    while common % (2 * factor) == 0 and common // (2 * factor) >= SMALLEST:
        factor *= 2
    fixed = {experts, roles.top_k, region.micro_batch_size}
    scaled = {region.sequence_length, width, 2 * width, hidden, region.micro_batch_size * region.sequence_length}
    return 1 if fixed & scaled else factor


def _random(node: fx.Node, shrink: dict[int, int], generator: torch.Generator) -> Tensor:
    value = tensor_of(node)
    shape = [shrink.get(int(size), int(size)) for size in value.shape]
    if not value.dtype.is_floating_point:
        return torch.zeros(shape, dtype=value.dtype)
    return torch.randn(shape, generator=generator).to(value.dtype)


def _as_module(region: ExpertRegion, order: list[fx.Node]) -> fx.GraphModule:
    graph, copy = fx.Graph(), {}
    for node in order:
        copy[node] = graph.placeholder(node.name)
    for node in region.nodes:
        copy[node] = graph.node_copy(node, copy.__getitem__)
    graph.output(copy[region.output])
    return fx.GraphModule(nn.Module(), graph)


class _Shrunk(fx.Interpreter):
    """Runs a graph on cpu with every size of `shrink` replaced, wherever it is written as a number."""

    def __init__(self, module: fx.GraphModule, shrink: dict[int, int]):
        super().__init__(module)
        self.shrink = shrink

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return map_aggregate(args, self._small), map_aggregate(kwargs, self._small)

    def _small(self, value: Any) -> Any:
        if type(value) is int:
            return self.shrink.get(value, value)
        return torch.device("cpu") if isinstance(value, torch.device) else value
