"""index_tokens on a GPU, as the paper counts (Algorithm 1, stages 2 and 3): a program for each block of 8 tokens.

No atomics: every program counts its own block, one prefix sum over (expert, block) gives it the first row of each
expert, and its choices are numbered in their order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimus_compiler.runtime.kernels.triton.launch import launch

TOKENS = 8  # TBS in the paper


def index_tokens_triton(
    indices_TK: Tensor, first_expert: Tensor | None, num_experts: int, num_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """token_R, row_TK, offsets_E, needed: see index_tokens."""
    T, K = indices_TK.shape
    E, B = num_experts, triton.cdiv(T, TOKENS)
    new = indices_TK.new_zeros
    row_TK = torch.empty_like(indices_TK, dtype=torch.int64, memory_format=torch.contiguous_format)
    token_R = new(num_rows, dtype=torch.int64)
    if E * B * K == 0:
        return token_R, row_TK.fill_(-1), new(E, dtype=torch.int32), new((), dtype=torch.int64)

    first_expert = new((), dtype=torch.int64) if first_expert is None else first_expert
    indices_TK = indices_TK.contiguous()
    sizes = {
        "choices": T * K,
        "E": E,
        "K": K,
        "TOKENS": TOKENS,
        "BLOCK_C": triton.next_power_of_2(TOKENS * K),
    }
    counts_EB = indices_TK.new_empty(E, B, dtype=torch.int32)
    bins = triton.next_power_of_2(E + 1)
    launch(count_kernel, (B,), indices_TK, first_expert, counts_EB, **sizes, BINS=bins)
    rows_to_EB = counts_EB.view(-1).cumsum(0, dtype=torch.int32)
    launch(number_kernel, (B,), indices_TK, first_expert, rows_to_EB, row_TK, token_R, **sizes, R=num_rows)
    rows_to_E = rows_to_EB[B - 1 :: B]
    return token_R, row_TK, rows_to_E.clamp(max=num_rows), rows_to_E[-1].long()


@triton.jit
def count_kernel(
    indices_TK, first_expert, counts_EB,
    choices, E, K: tl.constexpr, TOKENS: tl.constexpr, BLOCK_C: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """How often a block of tokens chose each local expert."""
    local_C = _local_experts(indices_TK, first_expert, choices, E, K, TOKENS, BLOCK_C)
    count_E = tl.histogram(local_C, BINS)
    e = tl.arange(0, BINS)
    tl.store(counts_EB + e.to(tl.int64) * tl.num_programs(0) + tl.program_id(0), count_E, mask=e < E)


@triton.jit
def number_kernel(
    indices_TK, first_expert, rows_to_EB, row_TK, token_R,
    choices, E, R, K: tl.constexpr, TOKENS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The row of each choice: behind those of earlier blocks, and of its own block's earlier choices."""
    local_C = _local_experts(indices_TK, first_expert, choices, E, K, TOKENS, BLOCK_C)
    c = tl.arange(0, BLOCK_C)
    same_CC = (local_C[:, None] == local_C[None, :]) & (c[None, :] < c[:, None])
    cell_C = local_C.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    before_C = tl.load(rows_to_EB + cell_C - 1, mask=(local_C < E) & (cell_C > 0), other=0)
    row_C = before_C + tl.sum(same_CC.to(tl.int32), 1)

    has_row_C = (local_C < E) & (row_C < R)
    choice_C = tl.program_id(0).to(tl.int64) * (TOKENS * K) + c
    exists_C = (c < TOKENS * K) & (choice_C < choices)
    tl.store(row_TK + choice_C, tl.where(has_row_C, row_C, -1).to(tl.int64), mask=exists_C)
    tl.store(token_R + row_C, choice_C // K, mask=has_row_C)


@triton.jit
def _local_experts(
    indices_TK, first_expert, choices, E, K: tl.constexpr, TOKENS: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """The choices of this program's tokens, numbered on this rank; E stands for experts elsewhere and for no choice."""
    c = tl.arange(0, BLOCK_C)
    choice_C = tl.program_id(0).to(tl.int64) * (TOKENS * K) + c
    exists_C = (c < TOKENS * K) & (choice_C < choices)
    local_C = tl.load(indices_TK + choice_C, mask=exists_C, other=0).to(tl.int64) - tl.load(first_expert)
    return tl.where(exists_C & (local_C >= 0) & (local_C < E), local_C, E).to(tl.int32)
