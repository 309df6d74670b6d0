"""A model of a few flat buckets, as the optimizer sees a compiled one, for tests that need no compiler."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from optimus_compiler.mesh import Mesh
from optimus_compiler.runtime.buckets import Bucket, Entry
from optimus_compiler.runtime.reduction import GradientReduction

_ALIGNMENT = 32  # elements: 128 bytes of fp32


class FlatModel:
    """Buckets by name; `fp32_weights` keeps the values from before the cast to the weights' dtype."""

    def __init__(self, tensors: Mapping[str, Mapping[str, Tensor]], dtype: torch.dtype = torch.float32) -> None:
        self._fp32 = {name: _flatten(weights) for name, weights in tensors.items()}
        self.buckets = tuple(_bucket(name, weights, self._fp32[name].to(dtype)) for name, weights in tensors.items())

        self.weight_loads = 0
        self.reduction = GradientReduction(self.buckets, Mesh())

    def fp32_weights(self, bucket: Bucket, start: int, stop: int) -> Tensor:
        return self._fp32[bucket.name][start:stop].clone()

    def full_tensors(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(local)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {entry.name: entry.parameter for bucket in self.buckets for entry in bucket.entries}


def _padded(tensor: Tensor) -> int:
    return -(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT


def _flatten(weights: Mapping[str, Tensor]) -> Tensor:
    parts = [nn.functional.pad(tensor.flatten(), (0, _padded(tensor) - tensor.numel())) for tensor in weights.values()]
    return torch.cat(parts)


def _bucket(name: str, weights: Mapping[str, Tensor], flat: Tensor) -> Bucket:
    entries, offset = [], 0
    for key, tensor in weights.items():
        parameter = nn.Parameter(flat[offset : offset + tensor.numel()].view(tensor.shape))
        entries.append(Entry(key, parameter, offset, tensor.numel()))
        offset += _padded(tensor)
    bucket = Bucket(name, flat, torch.zeros_like(flat), tuple(entries))
    for entry in bucket.entries:
        entry.parameter.grad = entry.view(bucket.gradients)
    return bucket
