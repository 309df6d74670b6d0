"""optimus::grouped_mlp: every expert's SwiGLU MLP over its rows, routing weight included (stage 4 of FastSparseMoE).

Row r, the k-th choice of token t, which is expert e's:
    gate, up = gate_up_e @ x[t]                      saved for backward, the only [R, .] tensor that is
    h        = silu(gate) * up * weights[t, k]       in fp32, rounded once; recomputed in backward
    y[r]     = down_e @ h
Folding the weight into h makes the output reduction a plain sum, and makes the weight's gradient <dh, silu(gate) * up>:
both are at hand in backward, so the MLP's output need not be saved (the trick is SonicMoE's).
Shape suffixes: index_tokens.py; r is the rows of one expert.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus_compiler.runtime.kernels.dispatch import select
from optimus_compiler.runtime.kernels.matmul import matmul_dtype, matmul_into
from optimus_compiler.runtime.kernels.recycle import recycled_empty
from optimus_compiler.runtime.kernels.reduce_outputs import sum_rows_cpu, sum_rows_reference


@torch.library.custom_op("optimus::grouped_mlp", mutates_args=())
def grouped_mlp(
    x_TH: Tensor,
    weights_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    token_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
) -> tuple[Tensor, Tensor]:
    """Expert outputs y_RH, weighted by the router, and the gate_up_R2I to save (paper, Algorithm 1, stage 4).

    x_TH, gate_up_E2IH (gate at 0, up at 1) and down_EHI share one float dtype; weights_TK may have another, as routers
    in fp32 do. token_R, row_TK, offsets_E: from index_tokens. Both results have x's dtype; their rows past
    offsets_E[-1] are undefined. Differentiable in x, weights, gate_up and down. Raises ValueError where dtypes or
    shapes do not fit.
    """
    _check(x_TH, weights_TK, gate_up_E2IH, down_EHI, offsets_E)
    forward = select(x_TH.device, reference=grouped_mlp_reference, cpu=grouped_mlp_cpu)
    return forward(x_TH, weights_TK, gate_up_E2IH, down_EHI, token_R, row_TK, offsets_E)


@grouped_mlp.register_fake
def _fake(
    x_TH: Tensor,
    weights_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    token_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
) -> tuple[Tensor, Tensor]:
    _check(x_TH, weights_TK, gate_up_E2IH, down_EHI, offsets_E)
    R = token_R.shape[0]
    return x_TH.new_empty(R, x_TH.shape[1]), x_TH.new_empty(R, 2 * down_EHI.shape[2])


def _check(x_TH: Tensor, weights_TK: Tensor, gate_up_E2IH: Tensor, down_EHI: Tensor, offsets_E: Tensor) -> None:
    if not x_TH.dtype == gate_up_E2IH.dtype == down_EHI.dtype:
        raise ValueError(
            f"grouped_mlp: x is {x_TH.dtype}, gate_up {gate_up_E2IH.dtype}, down {down_EHI.dtype}; "
            "cast them to one dtype"
        )
    E, H, width = down_EHI.shape
    if gate_up_E2IH.shape != (E, 2, width, H) or x_TH.shape != (len(weights_TK), H) or offsets_E.shape != (E,):
        raise ValueError(
            f"grouped_mlp: down [experts, hidden, width] = {(E, H, width)} wants gate_up {(E, 2, width, H)}, "
            f"offsets [{E}], x [tokens, {H}] and weights [tokens, choices], got gate_up {tuple(gate_up_E2IH.shape)}, "
            f"offsets {tuple(offsets_E.shape)}, x {tuple(x_TH.shape)}, weights {tuple(weights_TK.shape)}"
        )


@torch.library.custom_op("optimus::grouped_mlp_backward", mutates_args=())
def grouped_mlp_backward(
    dy_RH: Tensor,
    x_TH: Tensor,
    weights_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    token_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    gate_up_R2I: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dx_TH, dweights_TK, dgate_up_E2IH, ddown_EHI) of grouped_mlp, each in its input's dtype.

    Rows of dy_RH and gate_up_R2I past offsets_E[-1] are not read. An expert without rows gets exactly zero, and so does
    the weight of a choice without a row.
    """
    backward = select(x_TH.device, reference=grouped_mlp_backward_reference, cpu=grouped_mlp_backward_cpu)
    return backward(dy_RH, x_TH, weights_TK, gate_up_E2IH, down_EHI, token_R, row_TK, offsets_E, gate_up_R2I)


@grouped_mlp_backward.register_fake
def _fake_backward(
    dy_RH: Tensor,
    x_TH: Tensor,
    weights_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    token_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    gate_up_R2I: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        x_TH.new_empty(x_TH.shape),
        weights_TK.new_empty(weights_TK.shape),
        gate_up_E2IH.new_empty(gate_up_E2IH.shape),
        down_EHI.new_empty(down_EHI.shape),
    )


def _setup_context(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]
) -> None:
    gate_up_R2I = output[1]
    ctx.save_for_backward(*inputs, gate_up_R2I)
    ctx.mark_non_differentiable(gate_up_R2I)
    ctx.set_materialize_grads(False)  # or autograd fills a [R, 2I] zero gradient for gate_up_R2I


def _backward(ctx: torch.autograd.function.FunctionCtx, dy_RH: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy_RH is None:
        return (None,) * 7
    saved = ctx.saved_tensors  # type: ignore[attr-defined]
    return (*grouped_mlp_backward(dy_RH.contiguous(), *saved), None, None, None)


grouped_mlp.register_autograd(_backward, setup_context=_setup_context)


def experts_with_rows(offsets_E: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) for every expert that has rows."""
    start = 0
    for expert, end in enumerate(offsets_E.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def weight_of_rows(weights_TK: Tensor, row_TK: Tensor, num_rows: int) -> Tensor:
    """[R, 1]: the routing weight of each row in fp32 (fp64 for fp64), 0 past the last offset."""
    accumulate = torch.promote_types(weights_TK.dtype, torch.float32)
    spare_R1 = weights_TK.new_zeros(num_rows + 1, dtype=accumulate)
    spare_R1[row_TK.flatten()] = weights_TK.flatten().to(accumulate)  # row -1, no row, is the spare slot
    return spare_R1[:-1, None]


def grouped_mlp_reference(
    x_TH: Tensor,
    weights_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    token_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
) -> tuple[Tensor, Tensor]:
    """The definition: gather, grouped product, activation, grouped product, over all rows at once."""
    gate_up_R2I = _grouped_matmul(x_TH[token_R], gate_up_E2IH.flatten(1, 2).mT, offsets_E)
    gate_RI, up_RI = _accumulate(gate_up_R2I).chunk(2, dim=1)
    h_RI = F.silu(gate_RI) * up_RI * weight_of_rows(weights_TK, row_TK, len(token_R))
    return _grouped_matmul(h_RI.to(x_TH.dtype), down_EHI.mT, offsets_E), gate_up_R2I


def grouped_mlp_backward_reference(
    dy_RH: Tensor,
    x_TH: Tensor,
    weights_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    token_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    gate_up_R2I: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The chain rule over all rows at once. Rows past the last offset are zero in every grouped product."""
    used_R1 = (torch.arange(len(token_R), device=token_R.device) < offsets_E[-1])[:, None]
    gate_RI, up_RI = _accumulate(gate_up_R2I.where(used_R1, 0)).chunk(2, dim=1)
    weight_R1 = weight_of_rows(weights_TK, row_TK, len(token_R))
    act_RI = F.silu(gate_RI) * up_RI
    h_RI = (act_RI * weight_R1).to(x_TH.dtype)

    dh_RI = _accumulate(_grouped_matmul(dy_RH, down_EHI, offsets_E))
    ddown_EHI = _grouped_outer(dy_RH, h_RI, offsets_E)
    dweight_R = (dh_RI * act_RI).sum(1)
    dweights_TK = F.pad(dweight_R, (0, 1))[row_TK].to(weights_TK.dtype)  # row -1 reads the padding

    dact_RI = dh_RI * weight_R1
    sigmoid_RI = torch.sigmoid(gate_RI)
    dgate_RI = dact_RI * up_RI * sigmoid_RI * (1 + gate_RI * (1 - sigmoid_RI))
    dgate_up_R2I = torch.cat([dgate_RI, dact_RI * F.silu(gate_RI)], dim=1).to(x_TH.dtype)
    dgate_up_E2IH = _grouped_outer(dgate_up_R2I, x_TH[token_R], offsets_E).view(gate_up_E2IH.shape)
    dx_RH = _grouped_matmul(dgate_up_R2I, gate_up_E2IH.flatten(1, 2), offsets_E)
    return sum_rows_reference(dx_RH, row_TK), dweights_TK, dgate_up_E2IH, ddown_EHI


def _accumulate(x: Tensor) -> Tensor:
    """x in the dtype that elementwise work runs in: fp32, or fp64 for fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _grouped_matmul(a_RM: Tensor, table_EMN: Tensor, offsets_E: Tensor) -> Tensor:
    """[R, N]: each expert's rows times its matrix, zero past the last offset."""
    out_RN = a_RM.new_zeros(a_RM.shape[0], table_EMN.shape[2])
    for expert, rows in experts_with_rows(offsets_E):
        out_RN[rows] = a_RM[rows] @ table_EMN[expert]
    return out_RN


def _grouped_outer(a_RM: Tensor, b_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """[E, M, N]: the sum over each expert's rows of a x b, the gradient of its matrix; zero without rows."""
    out_EMN = a_RM.new_zeros(len(offsets_E), a_RM.shape[1], b_RN.shape[1])
    for expert, rows in experts_with_rows(offsets_E):
        out_EMN[expert] = a_RM[rows].mT @ b_RN[rows]
    return out_EMN


def grouped_mlp_cpu(
    x_TH: Tensor,
    weights_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    token_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
) -> tuple[Tensor, Tensor]:
    """Expert by expert, so that its rows are gathered, activated and multiplied while they are in cache."""
    gate_up_R2I = x_TH.new_empty(len(token_R), 2 * down_EHI.shape[2])
    y_RH = x_TH.new_empty(len(token_R), x_TH.shape[1])
    weight_R1 = weight_of_rows(weights_TK, row_TK, len(token_R))
    matmul = matmul_dtype(x_TH)
    x_TH = x_TH.to(matmul)
    for expert, rows in experts_with_rows(offsets_E):
        x_rH = x_TH.index_select(0, token_R[rows])
        matmul_into(x_rH, gate_up_E2IH[expert].flatten(0, 1).to(matmul).t(), gate_up_R2I[rows])
        gate_rI, up_rI = _accumulate(gate_up_R2I[rows]).chunk(2, dim=1)
        h_rI = F.silu(gate_rI).mul_(up_rI).mul_(weight_R1[rows])
        matmul_into(h_rI.to(matmul), down_EHI[expert].to(matmul).t(), y_RH[rows])
    return y_RH, gate_up_R2I


def grouped_mlp_backward_cpu(
    dy_RH: Tensor,
    x_TH: Tensor,
    weights_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    token_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    gate_up_R2I: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Expert by expert as forward; the weight gradients go straight into their slices, which are written once."""
    width = down_EHI.shape[2]
    matmul, dtype = matmul_dtype(x_TH), x_TH.dtype
    x_TH = x_TH.to(matmul)
    dx_RH = recycled_empty((len(token_R), x_TH.shape[1]), matmul)
    dgate_up_E2IH = recycled_empty(gate_up_E2IH.shape, dtype)
    ddown_EHI = recycled_empty(down_EHI.shape, dtype)
    weight_R1 = weight_of_rows(weights_TK, row_TK, len(token_R))
    dweight_R1 = torch.zeros_like(weight_R1)
    for expert, rows in experts_with_rows(offsets_E):
        dy_rH = dy_RH[rows].to(matmul)
        gate_rI, up_rI = _accumulate(gate_up_R2I[rows]).chunk(2, dim=1)
        silu_rI = F.silu(gate_rI)
        act_rI = silu_rI * up_rI
        dh_rI = _accumulate(torch.mm(dy_rH, down_EHI[expert].to(matmul)))
        torch.sum(dh_rI * act_rI, dim=1, keepdim=True, out=dweight_R1[rows])
        matmul_into(dy_rH.t(), act_rI.mul_(weight_R1[rows]).to(matmul), ddown_EHI[expert])

        dact_rI = dh_rI.mul_(weight_R1[rows])
        dgate_up_r2I = dact_rI.new_empty(len(dact_rI), 2 * width)
        torch.mul(dact_rI, silu_rI, out=dgate_up_r2I[:, width:])
        torch.ops.aten.silu_backward.grad_input(dact_rI.mul_(up_rI), gate_rI, grad_input=dgate_up_r2I[:, :width])
        dgate_up_r2I = dgate_up_r2I.to(matmul)
        matmul_into(dgate_up_r2I, gate_up_E2IH[expert].flatten(0, 1).to(matmul), dx_RH[rows])
        x_rH = x_TH.index_select(0, token_R[rows])
        matmul_into(dgate_up_r2I.t(), x_rH, dgate_up_E2IH[expert].flatten(0, 1))
    unused = (offsets_E.diff(prepend=offsets_E.new_zeros(1)) == 0).nonzero()[:, 0]
    dgate_up_E2IH.index_fill_(0, unused, 0)  # not a boolean mask, which passes over the whole table
    ddown_EHI.index_fill_(0, unused, 0)
    dweights_TK = F.pad(dweight_R1[:, 0], (0, 1))[row_TK].to(weights_TK.dtype)  # row -1 reads the padding
    return sum_rows_cpu(dx_RH, row_TK).to(dtype), dweights_TK, dgate_up_E2IH, ddown_EHI
