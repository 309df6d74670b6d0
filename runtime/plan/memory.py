"""Bytes that a rank holds: weights, gradients and optimizer state by the sharding, activations by the schedule."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import torch

from optimus_compiler.activation_memory import activation_bytes
from optimus_compiler.config import Config
from optimus_compiler.program import ParameterSpec, Program
from optimus_compiler.runtime.reduction import owners
from optimus_compiler.runtime.run import DTYPES


@dataclass(frozen=True)
class RankMemory:
    """Of the ranks at one coordinate of pp."""

    parameters: int  # elements
    owned: int  # elements whose optimizer state lies here
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
    mesh, stages = program.mesh, program.stages_on(rank)
    parameters = owned_here = weights = gradients = optimizer = 0
    whole_gradients: dict[object, int] = defaultdict(int)  # by bucket, as zero=2 holds one at a time
    owned_by_bucket: dict[object, int] = defaultdict(int)
    for name, spec in program.parameters.items():
        if not set(stages) & set(spec.stages):
            continue
        elements = math.prod(spec.local_shape(mesh))
        owned = elements // mesh.size_of(*owners(spec.state, config.optimizer.sharding)) if spec.trainable else 0
        gradient = gradient_bytes(spec, config)
        parameters += elements
        owned_here += owned
        weights += elements * spec.dtype.itemsize
        gradients += (owned if config.optimizer.zero == 2 else elements) * gradient if spec.trainable else 0
        # two moments, and for bf16 weights their fp32 masters
        optimizer += owned * (8 if spec.dtype == torch.float32 else 12)
        bucket = (_layer(name), tuple(spec.placement))
        whole_gradients[bucket] += elements * gradient
        owned_by_bucket[bucket] += owned
    if config.optimizer.zero == 2 and whole_gradients:
        gradients += max(whole_gradients.values())
    activations = sum(activation_bytes(program, stage) for stage in stages)
    update = 8 * max(owned_by_bucket.values(), default=0)  # a bucket's gradients in fp32, and clipped
    return RankMemory(parameters, owned_here, weights, gradients, optimizer, activations, update)


def gradient_bytes(spec: ParameterSpec, config: Config) -> int:
    """Of one element, as it is kept and reduced."""
    return 4 if spec.dtype == torch.float32 else DTYPES[config.optimizer.reduce_dtype].itemsize


def _layer(name: str) -> str:
    """model.layers.3.mlp...: layers.3."""
    parts = name.split(".")
    return ".".join(parts[:3]) if "layers" in parts[:2] else "rest"
