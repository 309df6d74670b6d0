"""An expert block found in a graph, and the numerical check that it is a routed, gated MLP."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from optimus_compiler.passes.rewrite import tensor_of
from optimus_compiler.runtime.kernels import moe

CHECK_FLOPS = 10**8  # a region above this is checked at reduced sizes
SMALLEST = 8  # no size is reduced below this many elements (16 bytes of bf16)
SCALES = (1.0, 30.0)  # of the hidden states
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
    """Runs the region and its backward on random inputs beside the reference; True where they agree to rounding.

    Inputs are tried at two scales: what clips or switches at some size agrees with the reference below it. A big region
    is run at reduced sizes, which every size written into its operations is reduced to as well: what is checked is
    which numbers are combined how, not their count.
    """
    experts, width, hidden = roles.sizes()
    smaller = _reduced_sizes(region, roles)
    order = [*region.parameters, region.indices, *region.floating]
    module = _as_module(region, order)
    few, width, hidden = (smaller.get(size, size) for size in (_tokens(region), width, hidden))

    def reference(values: dict[fx.Node, Tensor]) -> Tensor:
        gate_up = torch.stack([values[node] for node in roles.gate_up]).reshape(experts, 2, width, hidden)
        down = torch.stack([values[node] for node in roles.down]).reshape(experts, hidden, width)
        x = values[roles.x].reshape(few, hidden).to(gate_up.dtype)
        return moe(x, values[roles.weights], values[region.indices], gate_up, down)

    def candidate(values: dict[fx.Node, Tensor]) -> Tensor:
        return _Resized(module, smaller).run(*(values[node] for node in order))

    for scale in SCALES:
        generator = torch.Generator().manual_seed(0)
        values = {node: _random(node, smaller, generator) for node in order}
        for node in region.parameters:
            values[node] *= hidden**-0.5
        values[roles.x] *= scale
        values[region.indices] = torch.rand(few, experts, generator=generator).topk(roles.top_k, dim=-1).indices
        found, expected = _with_gradients(candidate, values), _with_gradients(reference, values)
        tolerance = TOLERANCE[values[region.parameters[0]].dtype]
        if not all(_relative(a, b) < tolerance for a, b in zip(found, expected, strict=True)):
            return False
    return True


def _with_gradients(function: Callable[[dict[fx.Node, Tensor]], Tensor], values: dict[fx.Node, Tensor]) -> list[Tensor]:
    """The result of a function, flattened, and its gradients with respect to every floating-point input."""
    with torch.enable_grad():
        leaves = {node: value.clone().requires_grad_(value.is_floating_point()) for node, value in values.items()}
        result = function(leaves).reshape(-1)
        cotangent = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(result.dtype)
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        gradients = torch.autograd.grad(result, wanted, cotangent, allow_unused=True)
    return [
        result.detach(),
        *(torch.zeros_like(leaf) if g is None else g for g, leaf in zip(gradients, wanted, strict=True)),
    ]


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def _tokens(region: ExpertRegion) -> int:
    return region.micro_batch_size * region.sequence_length


def _reduced_sizes(region: ExpertRegion, roles: Roles) -> dict[int, int]:
    """Every size that can be written into a region -> the size to check it at; empty for a small region.

    Hidden and width sizes are divided by a power of two, the sequence becomes short; where one number stands for two
    sizes (512 tokens of 512 elements), both must be reduced to one number.
    """
    experts, width, hidden = roles.sizes()
    batch, length, top_k = region.micro_batch_size, region.sequence_length, roles.top_k
    if 6 * _tokens(region) * top_k * width * hidden <= CHECK_FLOPS:
        return {}
    common = math.gcd(width, hidden)
    factors = [2**i for i in range(common.bit_length()) if common % 2**i == 0 and common // 2**i >= SMALLEST]
    counts = [n * scale for scale in (1, experts) for n in (1, batch, batch * top_k)]  # of sequences, in a size
    for factor in reversed(factors):
        pairs = [(size, size) for size in (batch, experts, top_k)]
        short = [(size, size // factor) for size in (width, 2 * width, hidden)]
        pairs += [*short, *((size * experts, reduced * experts) for size, reduced in short)]
        equal = [reduced // n for size, reduced in pairs for n in counts if size == length * n]
        for steps in (SMALLEST, *equal):
            every = [*pairs, *((length * n, steps * n) for n in counts)]
            sizes = dict(every)
            if 0 < steps <= length and all(sizes[size] == reduced for size, reduced in every):
                return sizes
    return {}


def _random(node: fx.Node, smaller: dict[int, int], generator: torch.Generator) -> Tensor:
    value = tensor_of(node)
    shape = [smaller.get(int(size), int(size)) for size in value.shape]
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


class _Resized(fx.Interpreter):
    """Runs a graph on cpu with other sizes, wherever they are written as numbers."""

    def __init__(self, module: fx.GraphModule, sizes: dict[int, int]):
        super().__init__(module)
        self.sizes = sizes

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return map_aggregate(args, self._resize), map_aggregate(kwargs, self._resize)

    def _resize(self, value: Any) -> Any:
        if type(value) is int:
            return self.sizes.get(value, value)
        return torch.device("cpu") if isinstance(value, torch.device) else value
