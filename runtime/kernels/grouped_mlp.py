"""optimus::grouped_mlp: every expert's SwiGLU MLP over its rows, routing weight included (stage 4 of FastSparseMoE).

Row r, the k-th choice of token t, which is expert e's:
    gate, up = gate_up_e @ x[t]                      saved for backward, the only [R, .] tensor that is
    h        = silu(gate) * up * weights[t, k]       in fp32, rounded once; recomputed in backward
    y[r]     = down_e @ h
Folding the weight into h makes the output reduction a plain sum, and makes the weight's gradient <dh, silu(gate) * up>:
both are at hand in backward, so the MLP's output need not be saved (the trick is SonicMoE's).

The gradients of the weights are added in place to buffers where the caller gives them (the optimizer's buckets): a
training step then allocates, zeroes and copies no table of the experts' size.
Shape suffixes: index_tokens.py; r is the rows of one expert.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus_compiler.runtime.kernels.cpu import compiles
from optimus_compiler.runtime.kernels.dispatch import select
from optimus_compiler.runtime.kernels.grouped_mlp_cpu import grouped_mlp_backward_cpu, grouped_mlp_cpu
from optimus_compiler.runtime.kernels.recycle import recycled_empty_like
from optimus_compiler.runtime.kernels.reduce_outputs import sum_rows_reference
from optimus_compiler.runtime.kernels.rows import weight_of_rows


@torch.library.custom_op("optimus::grouped_mlp", mutates_args=())
def grouped_mlp(
    x_TH: Tensor,
    weights_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    token_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    gate_up_gradient_E2IH: Tensor | None = None,
    down_gradient_EHI: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Expert outputs y_RH, weighted by the router, and the gate_up_R2I to save (paper, Algorithm 1, stage 4).

    x_TH, gate_up_E2IH (gate at 0, up at 1) and down_EHI share one float dtype; weights_TK may have another, as routers
    in fp32 do. token_R, row_TK, offsets_E: from index_tokens. Both results have x's dtype; their rows past
    offsets_E[-1] are undefined. Differentiable in x, weights, gate_up and down. Raises ValueError where dtypes or
    shapes do not fit.

    gate_up_gradient_E2IH, down_gradient_EHI: buffers to which backward adds the weights' gradients, both or none;
    contiguous, of one dtype, the weights' or fp32. Autograd then sees no gradient of the weights (their hooks run, with
    None), and an expert without rows is not touched.
    """
    _check(x_TH, weights_TK, gate_up_E2IH, down_EHI, offsets_E)
    _check_buffers(gate_up_E2IH, down_EHI, gate_up_gradient_E2IH, down_gradient_EHI)
    return _forward_of(x_TH)(x_TH, weights_TK, gate_up_E2IH, down_EHI, token_R, row_TK, offsets_E)


@grouped_mlp.register_fake
def _fake(
    x_TH: Tensor,
    weights_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    token_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    gate_up_gradient_E2IH: Tensor | None = None,
    down_gradient_EHI: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    _check(x_TH, weights_TK, gate_up_E2IH, down_EHI, offsets_E)
    _check_buffers(gate_up_E2IH, down_EHI, gate_up_gradient_E2IH, down_gradient_EHI)
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


def _check_buffers(
    gate_up: Tensor, down: Tensor, gate_up_gradient: Tensor | None, down_gradient: Tensor | None
) -> None:
    if (gate_up_gradient is None) != (down_gradient is None):
        raise ValueError("grouped_mlp: give the gradient buffers of both gate_up and down, or none")
    for name, weight, buffer in (("gate_up", gate_up, gate_up_gradient), ("down", down, down_gradient)):
        fits = buffer is None or (buffer.shape == weight.shape and buffer.is_contiguous())
        if not fits or (buffer is not None and buffer.dtype not in (weight.dtype, torch.float32)):
            raise ValueError(
                f"grouped_mlp: the gradient buffer of {name} must be contiguous, {tuple(weight.shape)}, {weight.dtype} "
                f"or torch.float32, got {tuple(buffer.shape)}, {buffer.dtype}"  # type: ignore[union-attr]
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
    inputs = (x_TH, weights_TK, gate_up_E2IH, down_EHI, token_R, row_TK, offsets_E, gate_up_R2I)
    tables = tuple(recycled_empty_like(table) for table in (gate_up_E2IH, down_EHI))
    dx_TH, dweights_TK = _backward_of(x_TH)(dy_RH, *inputs, *tables, adds=False)
    return dx_TH, dweights_TK, tables[0], tables[1]


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


@torch.library.custom_op(
    "optimus::grouped_mlp_backward_into", mutates_args=("gate_up_gradient_E2IH", "down_gradient_EHI")
)
def grouped_mlp_backward_into(
    dy_RH: Tensor,
    x_TH: Tensor,
    weights_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    token_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    gate_up_R2I: Tensor,
    gate_up_gradient_E2IH: Tensor,
    down_gradient_EHI: Tensor,
) -> tuple[Tensor, Tensor]:
    """grouped_mlp_backward that adds the weights' gradients to buffers: (dx_TH, dweights_TK).

    Rows of experts that have none are not touched.
    """
    inputs = (x_TH, weights_TK, gate_up_E2IH, down_EHI, token_R, row_TK, offsets_E, gate_up_R2I)
    return _backward_of(x_TH)(dy_RH, *inputs, gate_up_gradient_E2IH, down_gradient_EHI, adds=True)


@grouped_mlp_backward_into.register_fake
def _fake_backward_into(
    dy_RH: Tensor,
    x_TH: Tensor,
    weights_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    token_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    gate_up_R2I: Tensor,
    gate_up_gradient_E2IH: Tensor,
    down_gradient_EHI: Tensor,
) -> tuple[Tensor, Tensor]:
    return x_TH.new_empty(x_TH.shape), weights_TK.new_empty(weights_TK.shape)


def _setup_context(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]
) -> None:
    gate_up_R2I = output[1]
    ctx.save_for_backward(*inputs[:7], gate_up_R2I)  # type: ignore[arg-type]
    # not saved: other micro-batches add to the buffers meanwhile, which is no error
    ctx.buffers = tuple(buffer for buffer in inputs[7:] if buffer is not None)  # type: ignore[attr-defined]
    ctx.mark_non_differentiable(gate_up_R2I)
    ctx.set_materialize_grads(False)  # or autograd fills a [R, 2I] zero gradient for gate_up_R2I


def _backward(ctx: torch.autograd.function.FunctionCtx, dy_RH: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy_RH is None:
        return (None,) * 9
    saved, buffers = ctx.saved_tensors, ctx.buffers  # type: ignore[attr-defined]
    if buffers:
        return (*grouped_mlp_backward_into(dy_RH.contiguous(), *saved, *buffers), *(None,) * 7)
    return (*grouped_mlp_backward(dy_RH.contiguous(), *saved), *(None,) * 5)


grouped_mlp.register_autograd(_backward, setup_context=_setup_context)


Implementation = Callable[..., tuple[Tensor, Tensor]]


def _forward_of(x_TH: Tensor) -> Implementation:
    chosen: Implementation = select(x_TH, reference=grouped_mlp_reference, cpu=grouped_mlp_cpu, triton=_forward_triton)
    return grouped_mlp_reference if chosen is grouped_mlp_cpu and not compiles(x_TH) else chosen


def _backward_of(x_TH: Tensor) -> Implementation:
    reference: Implementation = grouped_mlp_backward_reference
    cpu: Implementation = grouped_mlp_backward_cpu
    chosen = select(x_TH, reference=reference, cpu=cpu, triton=_backward_triton)
    return reference if chosen is grouped_mlp_backward_cpu and not compiles(x_TH) else chosen


def _forward_triton(*arguments: Any) -> tuple[Tensor, Tensor]:
    from optimus_compiler.runtime.kernels.triton.grouped_mlp import grouped_mlp_triton  # triton is optional

    return grouped_mlp_triton(*arguments)


def _backward_triton(*arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
    from optimus_compiler.runtime.kernels.triton.grouped_mlp import grouped_mlp_backward_triton

    return grouped_mlp_backward_triton(*arguments, **keywords)


def experts_with_rows(offsets_E: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) for every expert that has rows."""
    start = 0
    for expert, end in enumerate(offsets_E.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


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
    dgate_up_E2IH: Tensor,
    ddown_EHI: Tensor,
    adds: bool,
) -> tuple[Tensor, Tensor]:
    """The chain rule over all rows at once: dx_TH, dweights_TK; the weights' gradients are added to the tables, or
    written. Rows past the last offset are zero in every grouped product."""
    used_R1 = (torch.arange(len(token_R), device=token_R.device) < offsets_E[-1])[:, None]
    gate_RI, up_RI = _accumulate(gate_up_R2I.where(used_R1, 0)).chunk(2, dim=1)
    weight_R1 = weight_of_rows(weights_TK, row_TK, len(token_R))
    act_RI = F.silu(gate_RI) * up_RI
    h_RI = (act_RI * weight_R1).to(x_TH.dtype)

    dh_RI = _accumulate(_grouped_matmul(dy_RH, down_EHI, offsets_E))
    _write(_grouped_outer(dy_RH, h_RI, offsets_E), ddown_EHI, adds)
    dweight_R = (dh_RI * act_RI).sum(1)
    dweights_TK = F.pad(dweight_R, (0, 1))[row_TK].to(weights_TK.dtype)  # row -1 reads the padding

    dact_RI = dh_RI * weight_R1
    sigmoid_RI = torch.sigmoid(gate_RI)
    dgate_RI = dact_RI * up_RI * sigmoid_RI * (1 + gate_RI * (1 - sigmoid_RI))
    dgate_up_R2I = torch.cat([dgate_RI, dact_RI * F.silu(gate_RI)], dim=1).to(x_TH.dtype)
    _write(_grouped_outer(dgate_up_R2I, x_TH[token_R], offsets_E).view(gate_up_E2IH.shape), dgate_up_E2IH, adds)
    dx_RH = _grouped_matmul(dgate_up_R2I, gate_up_E2IH.flatten(1, 2), offsets_E)
    return sum_rows_reference(dx_RH, row_TK), dweights_TK


def _write(gradient: Tensor, table: Tensor, adds: bool) -> None:
    if adds:
        table.add_(gradient)
    else:
        table.copy_(gradient)


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
