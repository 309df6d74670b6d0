"""optimus::index_tokens: group the routing choices of all tokens by local expert (stages 2 and 3 of FastSparseMoE).

Letters of the shape suffixes in this folder: T tokens, K choices a token, E local experts, R rows, H hidden size, I
expert width. A row is one (token, choice) pair; rows are ordered by (expert, token, choice), so every expert's rows are
contiguous. T * K rows always suffice; buffers may be bounded to fewer, and `needed` says when the bound was too low.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus_compiler.runtime.kernels.dispatch import select

TOKENS_PER_BLOCK = 8  # TBS in the paper: the tokens one thread counts
MAX_ROWS = 2**31 - 1  # offsets_E is int32, as grouped matrix multiplies take it

Tables = tuple[Tensor, Tensor, Tensor, Tensor]  # token_R, row_TK, offsets_E, needed


@torch.library.custom_op("optimus::index_tokens", mutates_args=())
def index_tokens(
    indices_TK: Tensor, first_expert: Tensor | None, num_experts: int, num_rows: int | None = None
) -> Tables:
    """Number the rows of local experts [first_expert, first_expert + num_experts) (Algorithm 1, stages 2 and 3).

    indices_TK: integer, the experts each token chose, numbered over all ranks. first_expert: 0-d int64 tensor (a
    tensor, so that every rank runs the same graph), None for 0. num_rows: R, at most T * K, None for T * K. Returns
      token_R int64: the token each row reads; 0 for the rows past offsets_E[-1], which belong to no local expert;
      row_TK int64: the row of each choice, -1 if its expert is not local or its row is past the last, R - 1;
      offsets_E int32: where each expert's rows end, at most R; expert e owns [offsets_E[e-1], offsets_E[e]);
      needed int64, 0-d, on the device: how many rows the local experts have. Above R, rows are missing: the caller
        must redo the step with more.
    Raises ValueError for indices that are not [T, K], for R outside [0, T * K] or above 2**31 - 1. Integer results, no
    gradient.
    """
    R = _check(indices_TK, num_rows)
    index = select(indices_TK, reference=index_tokens_reference, cpu=index_tokens_cpu, triton=_index_tokens_triton)
    return index(indices_TK, first_expert, num_experts, R)


@index_tokens.register_fake
def _fake(indices_TK: Tensor, first_expert: Tensor | None, num_experts: int, num_rows: int | None = None) -> Tables:
    R = _check(indices_TK, num_rows)
    return (
        indices_TK.new_empty(R, dtype=torch.int64),
        indices_TK.new_empty(indices_TK.shape, dtype=torch.int64),
        indices_TK.new_empty(num_experts, dtype=torch.int32),
        indices_TK.new_empty((), dtype=torch.int64),
    )


def _check(indices_TK: Tensor, num_rows: int | None) -> int:
    """R."""
    if indices_TK.dim() != 2:
        raise ValueError(f"index_tokens: indices must be [tokens, choices], got shape {tuple(indices_TK.shape)}")
    choices = indices_TK.numel()
    R = choices if num_rows is None else num_rows
    if not 0 <= R <= choices:
        raise ValueError(f"index_tokens: num_rows is {R}: must be between 0 and {choices}, one row for every choice")
    if R > MAX_ROWS:
        raise ValueError(
            f"index_tokens: {R} rows do not fit int32 offsets (at most {MAX_ROWS}); "
            "use a smaller micro-batch or sequence"
        )
    return R


def _local_experts(indices_TK: Tensor, first_expert: Tensor | None, num_experts: int) -> Tensor:
    """The chosen experts numbered on this rank; num_experts, one past the last, stands for all experts elsewhere."""
    local_TK = indices_TK.long() if first_expert is None else indices_TK.long() - first_expert
    return local_TK.masked_fill((local_TK < 0) | (local_TK >= num_experts), num_experts)


def index_tokens_reference(indices_TK: Tensor, first_expert: Tensor | None, num_experts: int, num_rows: int) -> Tables:
    """The paper's counting: a thread (here, a row of a tensor) for 8 tokens, prefix sums in place of atomics."""
    T, K = indices_TK.shape
    E, B = num_experts, -(-T // TOKENS_PER_BLOCK)
    local_TK = _local_experts(indices_TK, first_expert, E)
    padded = F.pad(local_TK, (0, 0, 0, B * TOKENS_PER_BLOCK - T), value=E)
    local_BC = padded.view(B, TOKENS_PER_BLOCK * K)  # C: the choices of one block, in the order its thread visits them

    # Stage 2: partial_token_counts[n * B + b], how often block b chose expert n; its exclusive prefix sum is the first
    # row of that block in that expert. Expert E collects the foreign choices after all local rows.
    count_of_BC = local_BC * B + torch.arange(B, device=local_BC.device)[:, None]
    partial_token_counts = count_of_BC.new_zeros((E + 1) * B)
    partial_token_counts.scatter_add_(0, count_of_BC.flatten(), torch.ones_like(count_of_BC).flatten())
    partial_cum_token_counts = F.pad(partial_token_counts.cumsum(0), (1, 0))
    offsets_E = partial_cum_token_counts[B : E * B + 1 : B] if B else partial_cum_token_counts.new_zeros(E)

    # Stage 3: a choice lands behind the earlier choices of its block that named the same expert.
    counter_BC = (local_BC[:, :, None] == local_BC[:, None, :]).tril(-1).sum(-1)
    row_BC = partial_cum_token_counts[count_of_BC] + counter_BC
    row_TK = row_BC.view(-1, K)[:T]
    row_TK = row_TK.masked_fill((local_TK == E) | (row_TK >= num_rows), -1)

    # Choices without a row (-1) write into a spare last slot, so no size depends on the data.
    token_of_choice = torch.arange(T, device=row_TK.device).repeat_interleave(K)
    spare_R1 = row_TK.new_zeros(num_rows + 1)
    spare_R1[row_TK.flatten()] = token_of_choice
    return spare_R1[:-1].clone(), row_TK, offsets_E.clamp(max=num_rows).to(torch.int32), offsets_E[-1].clone()


def _index_tokens_triton(indices_TK: Tensor, first_expert: Tensor | None, num_experts: int, num_rows: int) -> Tables:
    from optimus_compiler.runtime.kernels.triton.index_tokens import index_tokens_triton  # triton is optional

    return index_tokens_triton(indices_TK, first_expert, num_experts, num_rows)


def index_tokens_cpu(indices_TK: Tensor, first_expert: Tensor | None, num_experts: int, num_rows: int) -> Tables:
    """One stable integer sort (torch's is a radix sort for large inputs): 20 times faster than one-hot prefix sums."""
    local_TK = _local_experts(indices_TK, first_expert, num_experts)
    choices = torch.sort(local_TK.flatten(), stable=True).indices
    offsets_E = torch.bincount(local_TK.flatten(), minlength=num_experts + 1)[:num_experts].cumsum(0)
    choices = choices[: min(int(offsets_E[-1]), num_rows)]  # those that have a row, row by row

    token_R = local_TK.new_zeros(num_rows)
    torch.div(choices, max(indices_TK.shape[1], 1), rounding_mode="floor", out=token_R[: len(choices)])
    row_TK = torch.full_like(local_TK, -1, memory_format=torch.contiguous_format)
    row_TK.view(-1)[choices] = torch.arange(len(choices))
    return token_R, row_TK, offsets_E.clamp(max=num_rows).to(torch.int32), offsets_E[-1].clone()
