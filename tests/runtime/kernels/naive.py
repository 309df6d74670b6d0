"""The SparseMoE block one token and one choice at a time in fp64: what the fused ops are tested against."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus_compiler.runtime.kernels import grouped_mlp, index_tokens, reduce_outputs

NAMES = ("x", "weights", "gate_up", "down")


class Block(NamedTuple):
    """Inputs of one block; all float tensors require gradients."""

    x_TH: Tensor
    weights_TK: Tensor
    gate_up_E2IH: Tensor
    down_EHI: Tensor
    indices_TK: Tensor

    @property
    def differentiable(self) -> tuple[Tensor, ...]:
        return self[:4]


def make_block(
    T: int,
    K: int,
    E: int,
    H: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    weights_dtype: torch.dtype | None = None,
    indices_TK: Tensor | None = None,
) -> Block:
    """Random inputs, the same for every dtype up to rounding. Experts differ, so mixed-up ones are seen."""
    generator = torch.Generator().manual_seed(T * 1000 + K * 100 + E * 10 + H)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    tensors = (draw(T, H), draw(T, K).softmax(1), draw(E, 2, width, H, scale=H**-0.5), draw(E, H, width, scale=0.3))
    if indices_TK is None:
        indices_TK = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    dtypes = (dtype, weights_dtype or dtype, dtype, dtype)
    leaves = (tensor.to(to).requires_grad_() for tensor, to in zip(tensors, dtypes, strict=True))
    x_TH, weights_TK, gate_up_E2IH, down_EHI = leaves
    return Block(x_TH, weights_TK, gate_up_E2IH, down_EHI, indices_TK)


def run_moe(block: Block, first_expert: Tensor | None = None) -> Tensor:
    """y_TH of the three fused ops, for experts [first_expert, first_expert + E)."""
    token_R, row_TK, offsets_E, _ = index_tokens(block.indices_TK, first_expert, len(block.down_EHI))
    y_RH, _ = grouped_mlp(*block.differentiable, token_R, row_TK, offsets_E)
    return reduce_outputs(y_RH, row_TK, token_R)


def naive_moe(block: Block, first_expert: int = 0) -> Tensor:
    """y_TH in fp64, differentiable; experts outside [first_expert, first_expert + E) contribute nothing."""
    x_TH, weights_TK, gate_up_E2IH, down_EHI = (tensor.double() for tensor in block.differentiable)
    rows = []
    for t, experts in enumerate(block.indices_TK.tolist()):
        y_H = torch.zeros_like(x_TH[t])
        for k, expert in enumerate(experts):
            local = expert - first_expert
            if 0 <= local < len(down_EHI):
                gate, up = gate_up_E2IH[local] @ x_TH[t]
                y_H = y_H + weights_TK[t, k] * (down_EHI[local] @ (F.silu(gate) * up))
        rows.append(y_H)
    unused = 0 * (
        x_TH.sum() + weights_TK.sum() + gate_up_E2IH.sum() + down_EHI.sum()
    )  # without a local choice: zero, not None
    return torch.stack(rows) + unused


def output_gradient(shape: torch.Size) -> Tensor:
    """The fixed random dy of `gradients`, in fp64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def gradients(y_TH: Tensor, block: Block) -> tuple[Tensor, ...]:
    """Gradients of x, weights, gate_up, down for a fixed random dy."""
    return torch.autograd.grad(y_TH, block.differentiable, output_gradient(y_TH.shape).to(y_TH.dtype))


def relative_error(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b|| in fp64; ||a|| where b is zero. NaN in a gives NaN, which no bound accepts."""
    a, b = a.detach().double(), b.detach().double()
    scale = b.norm()
    return float((a - b).norm() / (scale if scale > 0 else 1))


@contextmanager
def poisoned() -> Iterator[None]:
    """Every torch.empty is filled with NaN."""
    deterministic: Any = torch.utils.deterministic
    before = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        deterministic.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(False)
