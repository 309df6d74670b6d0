"""optimus::linear_logsumexp: log-sum-exp and target logit of a linear head, the two numbers cross entropy needs.

cross entropy = lse - logit. Logits exist one piece at a time: forward cuts the tokens, backward the vocabulary, because
then a piece of the weight gradient is one whole product over all tokens (fp32 inside, rounded once) and needs no fp32
copy of the table. With a sharded vocabulary every rank calls this on its shard: the lses combine by log-sum-exp, the
logits by a sum, outside.

Shape suffixes: T tokens, H hidden size, V vocabulary (of this rank); t and v are pieces of T and V.
"""

import torch
from torch import Tensor

from optimus_compiler.runtime.kernels.matmul import matmul_dtype, matmul_into

PIECE = 2**24  # logits alive at a time: 64 MiB in fp32


@torch.library.custom_op("optimus::linear_logsumexp", mutates_args=())
def linear_logsumexp(x_TH: Tensor, w_VH: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    """(lse_T, logit_T) of the logits x_TH @ w_VH^T, both fp32 (fp64 for fp64).

    target_T: int64. A target outside [0, V) gives logit 0 and sends no gradient through it; the caller masks its loss.
    x and w share one float dtype; raises ValueError otherwise. Differentiable in x and w.
    """
    _check(x_TH, w_VH, target_T)
    (tokens, _), vocabulary = x_TH.shape, len(w_VH)
    lse_T = x_TH.new_empty(tokens, dtype=_accumulate_dtype(x_TH))
    logit_T = torch.empty_like(lse_T)
    w_VH = w_VH.to(matmul_dtype(x_TH))
    step = max(1, PIECE // vocabulary)
    for start in range(0, tokens, step):
        piece = slice(start, start + step)
        z_tV = torch.mm(x_TH[piece].to(w_VH.dtype), w_VH.t()).to(lse_T.dtype)
        inside_t, column_t = _targets_inside(target_T[piece], 0, vocabulary)
        lse_T[piece] = z_tV.logsumexp(1)
        logit_T[piece] = z_tV.gather(1, column_t[:, None])[:, 0].where(inside_t, 0)
    return lse_T, logit_T


@linear_logsumexp.register_fake
def _fake(x_TH: Tensor, w_VH: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    _check(x_TH, w_VH, target_T)
    lse_T = x_TH.new_empty(x_TH.shape[0], dtype=_accumulate_dtype(x_TH))
    return lse_T, torch.empty_like(lse_T)


@torch.library.custom_op("optimus::linear_logsumexp_backward", mutates_args=())
def linear_logsumexp_backward(
    dlse_T: Tensor, dlogit_T: Tensor, x_TH: Tensor, w_VH: Tensor, target_T: Tensor, lse_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients (dx_TH, dw_VH): dz = dlse * softmax(z), plus dlogit at the target; softmax from the saved lse."""
    tokens, vocabulary = len(x_TH), len(w_VH)
    matmul = matmul_dtype(x_TH)
    x = x_TH.to(matmul)
    dx_TH = torch.zeros_like(x, dtype=lse_T.dtype)
    dw_VH = torch.empty_like(w_VH, memory_format=torch.contiguous_format)
    step = max(1, PIECE // max(1, tokens))
    for start in range(0, vocabulary, step):
        piece = slice(start, min(start + step, vocabulary))
        w_vH = w_VH[piece].to(matmul)
        z_Tv = torch.mm(x, w_vH.t()).to(lse_T.dtype)
        dz_Tv = z_Tv.sub_(lse_T[:, None]).exp_().mul_(dlse_T[:, None])
        inside_T, column_T = _targets_inside(target_T, piece.start, piece.stop)
        dz_Tv.scatter_add_(1, column_T[:, None], dlogit_T.where(inside_T, 0)[:, None])
        dz_Tv = dz_Tv.to(matmul)
        matmul_into(dz_Tv.t(), x, dw_VH[piece])
        dx_TH += torch.mm(dz_Tv, w_vH)
    return dx_TH.to(x_TH.dtype), dw_VH


@linear_logsumexp_backward.register_fake
def _fake_backward(
    dlse_T: Tensor, dlogit_T: Tensor, x_TH: Tensor, w_VH: Tensor, target_T: Tensor, lse_T: Tensor
) -> tuple[Tensor, Tensor]:
    return x_TH.new_empty(x_TH.shape), w_VH.new_empty(w_VH.shape)


def _setup_context(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]
) -> None:
    ctx.save_for_backward(*inputs, output[0])


def _backward(ctx: torch.autograd.function.FunctionCtx, dlse_T: Tensor, dlogit_T: Tensor) -> tuple[Tensor | None, ...]:
    # Autograd fills an undefined one of the two with zeros.
    saved = ctx.saved_tensors  # type: ignore[attr-defined]
    return (*linear_logsumexp_backward(dlse_T.contiguous(), dlogit_T.contiguous(), *saved), None)


linear_logsumexp.register_autograd(_backward, setup_context=_setup_context)


def _check(x_TH: Tensor, w_VH: Tensor, target_T: Tensor) -> None:
    shapes_fit = x_TH.dim() == w_VH.dim() == 2 and x_TH.shape[1] == w_VH.shape[1] and target_T.shape == x_TH.shape[:1]
    if x_TH.dtype != w_VH.dtype or not shapes_fit:
        raise ValueError(
            "linear_logsumexp: wants x [T, H] and w [V, H] of one dtype and target [T], got "
            f"x {tuple(x_TH.shape)} {x_TH.dtype}, w {tuple(w_VH.shape)} {w_VH.dtype}, target {tuple(target_T.shape)}"
        )


def _accumulate_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _targets_inside(target_T: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Which targets lie in [start, stop), and the column of each there (any valid column for the others)."""
    inside_T = (target_T >= start) & (target_T < stop)
    return inside_T, (target_T - start).clamp(0, stop - start - 1)
