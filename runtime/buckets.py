"""Buckets: the weights and gradients of one segment in two flat tensors, of which parameters are views."""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optimus_compiler.mesh import Mesh
from optimus_compiler.program import ParameterSpec, Program

ALIGNMENT = 128  # bytes: every parameter starts on a cache line pair, on any device


@dataclass(frozen=True)
class Entry:
    """Where one parameter lies in its bucket."""

    name: str
    parameter: nn.Parameter
    offset: int  # elements
    numel: int

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat tensor of the bucket, in the parameter's shape."""
        return flat[self.offset : self.offset + self.numel].view(self.parameter.shape)


@dataclass
class Bucket:
    """Weights and gradients of the trainable parameters of one segment and placement, this rank's shards.

    Parameters and their `.grad` are views into `weights` and `gradients` and persist: backward adds in place, the
    optimizer updates flat tensors. Padding between entries and at the end is zero and stays zero; the end is padded so
    that `state` ranks own equal parts.
    """

    name: str
    weights: Tensor  # [numel], the parameters' dtype
    gradients: Tensor  # [numel]; empty while whole gradients are not kept (release_gradients)
    entries: tuple[Entry, ...]
    replicated: tuple[str, ...] = ()  # mesh dimensions over which gradients are summed
    state: tuple[str, ...] = ()  # those of them over which optimizer state may be sharded
    stage_ranks: tuple[int, ...] = (0,)  # coordinates on pp that hold it: two for weights tied across stages

    def set_gradient_dtype(self, dtype: torch.dtype) -> None:
        """Keeps gradients in another dtype (fp32 for bf16 weights). Gradients that are there already are lost."""
        if dtype != self.gradients.dtype or not self.gradients.numel():
            self.gradients = torch.zeros_like(self.weights, dtype=dtype)
            self._attach()

    def release_gradients(self, dtype: torch.dtype) -> None:
        """Keeps no whole gradients: `.grad` is None between backward passes, and of this dtype within one."""
        self.gradients = self.weights.new_empty(0, dtype=dtype)
        for entry in self.entries:
            entry.parameter.grad = None
            entry.parameter.grad_dtype = dtype

    def _attach(self) -> None:
        for entry in self.entries:
            entry.parameter.grad = None
            entry.parameter.grad_dtype = self.gradients.dtype
            entry.parameter.grad = entry.view(self.gradients)


def make_buckets(program: Program, device: torch.device) -> tuple[Bucket, ...]:
    """Buckets of zeros for each (segment, dtype, placement), in program order; a tied weight is in its first segment's.

    The embedding is with the first layer: its backward, the last, is too short for anything to travel meanwhile.
    """
    members: dict[str, list[ParameterSpec]] = {}
    placed: set[str] = set()
    for label, segment in zip(_labels(program), program.segments, strict=True):
        for name in segment.parameters:
            spec = program.parameters[name]
            if spec.trainable and name not in placed and program.is_here(spec):
                placed.add(name)
                label = "tied" if len(program.ranks_of(spec)) > 1 else label  # laid out alike on both ranks
                members.setdefault(f"{label}.{_kind_of(spec, program.mesh)}", []).append(spec)
    return tuple(_bucket(program, name, specs, device) for name, specs in members.items())


def _labels(program: Program) -> list[str]:
    """What the bucket of each segment is called: embed+layer0, layer1, ..., head."""
    layers = itertools.count()
    labels = [f"layer{next(layers)}" if segment.kind == "layer" else segment.kind for segment in program.segments]
    if "embed" in labels and "layer0" in labels:
        labels = ["embed+layer0" if label in ("embed", "layer0") else label for label in labels]
    return labels


def _kind_of(spec: ParameterSpec, mesh: Mesh) -> str:
    """What the parameters of a bucket have in common: float32, or bfloat16/ep."""
    sharded = [name for name in spec.placement if mesh.size_of(name) > 1]
    return "/".join([str(spec.dtype).removeprefix("torch."), *sharded])


def _bucket(program: Program, name: str, specs: list[ParameterSpec], device: torch.device) -> Bucket:
    mesh, dtype, state = program.mesh, specs[0].dtype, specs[0].state
    step = ALIGNMENT // dtype.itemsize
    shapes = [spec.local_shape(mesh) for spec in specs]
    offsets, size = [], 0
    for shape in shapes:
        offsets.append(size)
        size = _round_up(size + math.prod(shape), step)
    weights = torch.zeros(_round_up(size, step * mesh.size_of(*state)), dtype=dtype, device=device)
    entries = []
    for spec, shape, offset in zip(specs, shapes, offsets, strict=True):
        numel = math.prod(shape)
        parameter = nn.Parameter(weights[offset : offset + numel].view(shape))
        entries.append(Entry(spec.name, parameter, offset, numel))
    gradients = torch.zeros_like(weights)
    stage_ranks = program.ranks_of(specs[0])
    bucket = Bucket(name, weights, gradients, tuple(entries), specs[0].replicated(), state, stage_ranks)
    bucket._attach()
    return bucket


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
