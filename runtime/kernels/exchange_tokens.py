"""optimus::plan_exchange, send_tokens, return_tokens: every (token, choice) row to the rank of its expert, and back.

The all-to-all form of expert parallelism: rank r of a group of `ep` owns experts [r * N / ep, (r + 1) * N / ep).

    plan_exchange   who sends how many rows to whom: the one host read of a layer
    send_tokens     x_SH, weights_SK -> x_RH, weights_R1
                    index_tokens, grouped_mlp, reduce_outputs on the rows received, each a token of one choice
    return_tokens   y_RH -> y_SH

Rows travel ordered by (expert, token, choice) and arrive ordered by (rank, expert, token, choice); index_tokens is
stable, so an expert works on the rows, in the order, that it would see if all tokens were on one rank.

Shape suffixes: index_tokens.py; N experts of all ranks, S tokens of this rank, P = S * K rows to send, R rows to
receive into. `group` is the name of a process group; fake kernels never look it up.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from optimus_compiler.runtime.kernels.index_tokens import index_tokens
from optimus_compiler.runtime.kernels.reduce_outputs import sum_rows


@torch.library.custom_op("optimus::plan_exchange", mutates_args=())
def plan_exchange(
    indices_SK: Tensor, num_experts: int, num_rows: int, ep: int, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sort this rank's choices by expert and tell the other ranks how many each of their experts gets.

    indices_SK: integer, the experts each token chose, numbered over all ranks; a choice outside [0, num_experts) is
    not sent. num_rows: R, the rows this rank has room for. Returns
      token_P int64: the token of each row to send, in sending order; 0 past the last;
      row_SK int64: the place of each choice in that order, -1 for a choice that is not sent;
      counts int64 [2, ep], on the CPU: rows sent to and received from each rank. Reading them is the layer's one wait
        of the host for the device;
      indices_R1 int64: the expert of each row received, numbered over all ranks; -1 past the last;
      needed int64, 0-d, on the device: how many rows this rank receives. Above R, the rows from R on are dropped: the
        caller must redo the step with more.
    Raises ValueError for indices that are not [S, K], experts that ep does not divide, or a group of another size.
    """
    _check(indices_SK, num_experts, ep)
    process_group = _group(group)
    if process_group.size() != ep:
        raise ValueError(f"plan_exchange: group {group!r} has {process_group.size()} ranks, but ep is {ep}")
    token_P, row_SK, offsets_N, _ = index_tokens(indices_SK, None, num_experts)
    sent_N = offsets_N.diff(prepend=offsets_N.new_zeros(1)).long()
    received_N = torch.empty_like(sent_N)  # from rank 0 for each of this rank's experts, from rank 1, ...
    dist.all_to_all_single(received_N, sent_N, group=process_group)
    counts = torch.stack([sent_N, received_N]).view(2, ep, -1).sum(2).cpu()

    ends_N = received_N.cumsum(0)
    local_experts = num_experts // ep
    source_R = torch.searchsorted(ends_N, torch.arange(num_rows, device=ends_N.device), right=True)
    expert_R = process_group.rank() * local_experts + source_R % local_experts
    return token_P, row_SK, counts, expert_R.where(source_R < num_experts, -1)[:, None], ends_N[-1].clone()


@plan_exchange.register_fake
def _fake_plan(
    indices_SK: Tensor, num_experts: int, num_rows: int, ep: int, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check(indices_SK, num_experts, ep)
    return (
        indices_SK.new_empty(indices_SK.numel(), dtype=torch.int64),
        indices_SK.new_empty(indices_SK.shape, dtype=torch.int64),
        indices_SK.new_empty((2, ep), dtype=torch.int64, device="cpu"),
        indices_SK.new_empty((num_rows, 1), dtype=torch.int64),
        indices_SK.new_empty((), dtype=torch.int64),
    )


def _check(indices_SK: Tensor, num_experts: int, ep: int) -> None:
    if indices_SK.dim() != 2:
        raise ValueError(f"plan_exchange: indices must be [tokens, choices], got shape {tuple(indices_SK.shape)}")
    if num_experts % ep:
        raise ValueError(f"plan_exchange: {num_experts} experts cannot be divided over ep={ep} ranks")


@torch.library.custom_op("optimus::send_tokens", mutates_args=())
def send_tokens(
    x_SH: Tensor, weights_SK: Tensor, token_P: Tensor, row_SK: Tensor, counts: Tensor, num_rows: int, group: str
) -> tuple[Tensor, Tensor]:
    """(x_RH, weights_R1): the hidden state and routing weight of every row received, zero past the last.

    x and weights: any float dtypes, kept. token_P, row_SK, counts: from plan_exchange; num_rows: R, as there.
    Differentiable in x and weights: gradients travel back and are summed over a token's choices as reduce_outputs does.
    """
    spare_P = weights_SK.new_empty(row_SK.numel() + 1)
    spare_P[row_SK.flatten()] = weights_SK.flatten()  # row -1, not sent, is the spare slot
    x_RH = _send(x_SH.index_select(0, _token_of_sent(token_P, counts)), counts, num_rows, group)
    return x_RH, _send(spare_P[: int(counts[0].sum()), None], counts, num_rows, group)


@send_tokens.register_fake
def _fake_send(
    x_SH: Tensor, weights_SK: Tensor, token_P: Tensor, row_SK: Tensor, counts: Tensor, num_rows: int, group: str
) -> tuple[Tensor, Tensor]:
    return x_SH.new_empty(num_rows, x_SH.shape[1]), weights_SK.new_empty(num_rows, 1)


@torch.library.custom_op("optimus::send_tokens_backward", mutates_args=())
def send_tokens_backward(
    dx_RH: Tensor, dweights_R1: Tensor, row_SK: Tensor, counts: Tensor, group: str
) -> tuple[Tensor, Tensor]:
    """Gradients (dx_SH, dweights_SK) of send_tokens, each in its input's dtype; zero for a choice that is not sent."""
    dx_SH = sum_rows(_send_back(dx_RH, counts, group), row_SK)
    dweights_P = _send_back(dweights_R1, counts, group)[:, 0]
    return dx_SH, F.pad(dweights_P, (0, 1))[row_SK]  # row -1 reads the padding


@send_tokens_backward.register_fake
def _fake_send_backward(
    dx_RH: Tensor, dweights_R1: Tensor, row_SK: Tensor, counts: Tensor, group: str
) -> tuple[Tensor, Tensor]:
    return dx_RH.new_empty(row_SK.shape[0], dx_RH.shape[1]), dweights_R1.new_empty(row_SK.shape)


def _setup_send(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
) -> None:
    *_, row_SK, counts, _, group = inputs
    ctx.save_for_backward(row_SK, counts)
    ctx.group = group  # type: ignore[attr-defined]


def _backward_of_send(
    ctx: torch.autograd.function.FunctionCtx, dx_RH: Tensor, dweights_R1: Tensor
) -> tuple[Tensor | None, ...]:
    row_SK, counts = ctx.saved_tensors  # type: ignore[attr-defined]
    group = ctx.group  # type: ignore[attr-defined]
    gradients = send_tokens_backward(dx_RH.contiguous(), dweights_R1.contiguous(), row_SK, counts, group)
    return (*gradients, None, None, None, None, None)


send_tokens.register_autograd(_backward_of_send, setup_context=_setup_send)


@torch.library.custom_op("optimus::return_tokens", mutates_args=())
def return_tokens(y_RH: Tensor, token_P: Tensor, row_SK: Tensor, counts: Tensor, group: str) -> Tensor:
    """y_SH: the experts' outputs y_RH back at their tokens, summed over a token's choices.

    y_RH: any float dtype, rows in the order of send_tokens' results; those past the last received are not read. The
    sum is reduce_outputs': in fp32, in the order of the choices, rounded once. token_P, row_SK, counts: from
    plan_exchange. Differentiable in y.
    """
    return sum_rows(_send_back(y_RH, counts, group), row_SK)


@return_tokens.register_fake
def _fake_return(y_RH: Tensor, token_P: Tensor, row_SK: Tensor, counts: Tensor, group: str) -> Tensor:
    return y_RH.new_empty(row_SK.shape[0], y_RH.shape[1])


@torch.library.custom_op("optimus::return_tokens_backward", mutates_args=())
def return_tokens_backward(dy_SH: Tensor, token_P: Tensor, counts: Tensor, num_rows: int, group: str) -> Tensor:
    """Gradient dy_RH of return_tokens: each row gets its token's, zero past the last row received."""
    return _send(dy_SH.index_select(0, _token_of_sent(token_P, counts)), counts, num_rows, group)


@return_tokens_backward.register_fake
def _fake_return_backward(dy_SH: Tensor, token_P: Tensor, counts: Tensor, num_rows: int, group: str) -> Tensor:
    return dy_SH.new_empty(num_rows, dy_SH.shape[1])


def _setup_return(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
    y_RH, token_P, _, counts, group = inputs
    ctx.save_for_backward(token_P, counts)
    ctx.num_rows, ctx.group = y_RH.shape[0], group  # type: ignore[attr-defined]


def _backward_of_return(ctx: torch.autograd.function.FunctionCtx, dy_SH: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # type: ignore[attr-defined]
    dy_RH = return_tokens_backward(dy_SH.contiguous(), *saved, ctx.num_rows, ctx.group)  # type: ignore[attr-defined]
    return dy_RH, None, None, None, None


return_tokens.register_autograd(_backward_of_return, setup_context=_setup_return)


def _group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(name)  # type: ignore[arg-type]  # torch calls such a str a GroupName


def _token_of_sent(token_P: Tensor, counts: Tensor) -> Tensor:
    """token_P without the places past the last row to send."""
    return token_P[: int(counts[0].sum())]


def _send(rows_PX: Tensor, counts: Tensor, num_rows: int, group: str) -> Tensor:
    """[R, X]: the rows received for rows_PX sent, zeros past the last; what exceeds R is received and dropped."""
    sent, received = counts.tolist()
    arriving = sum(received)
    rows_RX = rows_PX.new_empty(max(num_rows, arriving), rows_PX.shape[1])
    dist.all_to_all_single(rows_RX[:arriving], rows_PX, received, sent, group=_group(group))
    rows_RX[arriving:] = 0
    return rows_RX[:num_rows]


def _send_back(rows_RX: Tensor, counts: Tensor, group: str) -> Tensor:
    """[P, X]: what the receivers made of the rows sent, in sending order; zero for a row that was dropped."""
    sent, received = counts.tolist()
    arrived = sum(received)
    dropped = arrived - len(rows_RX)
    answer = F.pad(rows_RX, (0, 0, 0, dropped)) if dropped > 0 else rows_RX[:arrived]
    rows_PX = rows_RX.new_empty(sum(sent), rows_RX.shape[1])
    dist.all_to_all_single(rows_PX, answer, sent, received, group=_group(group))
    return rows_PX
