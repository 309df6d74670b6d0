"""The names under which Hugging Face publishes OLMo and OLMoE: one matrix for each projection of each expert.

Our own names, those of transformers 5, stack a layer's experts: `mlp.experts.gate_up_proj`, `mlp.experts.down_proj`.
"""

from collections.abc import Sequence
from math import prod

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def published_names(name: str, shape: Sequence[int]) -> tuple[str, ...]:
    """The published names of the matrices of a weight, in its row-major order; `shape` is that of a compiled program.

    allenai/OLMoE-1B-7B-0924 has `...experts.0.gate_proj.weight`, `...experts.0.up_proj.weight`, ... where a program has
    `...experts.gate_up_proj` [experts, 2, width, hidden]; a weight of no expert is one matrix, or vector, of its own
    name.
    """
    path, _, leaf = name.rpartition(".")
    if name.endswith(GATE_UP):
        halves = ("gate_proj", "up_proj")
        return tuple(f"{path}.{index // 2}.{halves[index % 2]}.weight" for index in range(prod(shape[:-2])))
    if name.endswith(DOWN):
        return tuple(f"{path}.{index}.{leaf}.weight" for index in range(prod(shape[:-2])))
    return (name,)


def published_shapes(name: str, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The published tensors, by name, of a parameter of our models with this shape."""
    if name.endswith(GATE_UP):
        experts, rows, hidden = shape
        return dict.fromkeys(published_names(name, (experts, 2, rows // 2, hidden)), (rows // 2, hidden))
    if name.endswith(DOWN):
        return dict.fromkeys(published_names(name, shape), tuple(shape[-2:]))
    return {name: tuple(shape)}
