"""Bytes that a rank holds: weights, gradients and optimizer state by the sharding, activations by the schedule."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import torch

from optimus_compiler.activation_memory import activation_bytes
from optimus_compiler.config import Config
from optimus_compiler.program import ParameterSpec, Program
from optimus_compiler.runtime.run import DTYPES


@dataclass(frozen=True)
class RankMemory:
    """Of the ranks at one coordinate of pp."""

    parameters: int  # elements
    weights: int
    gradients: int
    optimizer: int
    activations: int  # at the worst moment of forward and backward
    update: int  # what the optimizer's step needs for a moment, when activations are gone

    @property
    def state(self) -> int:
        """What is there from the first step to the last."""
        return self.weights + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """The most at any moment."""
        return self.state + max(self.activations, self.update)


def rank_memory(program: Program, config: Config, rank: int) -> RankMemory:
    """Memory of the ranks at coordinate `rank` of pp."""
    stages = [stage for stage, at in enumerate(program.stage_ranks) if at == rank]
    mesh, reduced = program.mesh, DTYPES[config.optimizer.reduce_dtype].itemsize
    parameters = weights = gradients = optimizer = 0
    whole_gradients: dict[object, int] = defaultdict(int)  # by bucket, as zero=2 holds one at a time
    owned_by_bucket: dict[object, int] = defaultdict(int)
    for name, spec in program.parameters.items():
        if not set(stages) & set(spec.stages):
            continue
        elements = math.prod(spec.local_shape(mesh))
        owned = elements // mesh.size_of(*owners(spec, config)) if spec.trainable else 0
        is_fp32 = spec.dtype == torch.float32
        gradient = 4 if is_fp32 else reduced
        parameters += elements
        weights += elements * spec.dtype.itemsize
        gradients += (owned if config.optimizer.zero == 2 else elements) * gradient if spec.trainable else 0
        optimizer += owned * (8 if is_fp32 else 12)  # two moments, and for bf16 weights their fp32 masters
        bucket = (_layer(name), tuple(spec.placement))
        whole_gradients[bucket] += elements * gradient
        owned_by_bucket[bucket] += owned
    if config.optimizer.zero == 2 and whole_gradients:
        gradients += max(whole_gradients.values())
    activations = sum(activation_bytes(program, stage) for stage in stages)
    update = 8 * max(owned_by_bucket.values(), default=0)  # a bucket's gradients in fp32, and clipped
    return RankMemory(parameters, weights, gradients, optimizer, activations, update)


def owners(spec: ParameterSpec, config: Config) -> tuple[str, ...]:
    """The mesh dimensions over which a parameter's optimizer state is divided."""
    dp = tuple(name for name in spec.state if name == "dp")
    return {"epso": spec.state, "so": dp, "none": ()}[config.optimizer.sharding]


def _layer(name: str) -> str:
    """model.layers.3.mlp...: layers.3."""
    parts = name.split(".")
    return ".".join(parts[:3]) if "layers" in parts[:2] else "rest"
