"""grouped_mlp and its backward, from the grouped products."""

from torch import Tensor

from optimus_compiler.runtime.kernels.triton import device
from optimus_compiler.runtime.kernels.triton.outer import sum_outer
from optimus_compiler.runtime.kernels.triton.products import multiply, multiply_down_backward, multiply_gate_up
from optimus_compiler.runtime.kernels.triton.row_weights import weight_of_rows_triton, weights_gradient_triton
from optimus_compiler.runtime.kernels.triton.sum_rows import sum_rows_triton


def grouped_mlp_triton(
    x_TH: Tensor, weights_TK: Tensor, gate_up_E2IH: Tensor, down_EHI: Tensor,
    token_R: Tensor, row_TK: Tensor, offsets_E: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """grouped_mlp: y_RH and gate_up_R2I."""
    gate_up_E2IH, down_EHI = gate_up_E2IH.contiguous(), down_EHI.contiguous()
    weight_R = weight_of_rows_triton(weights_TK, row_TK, len(token_R))
    gate_up_R2I, h_RI = multiply_gate_up(*rows_of(x_TH, token_R), weight_R, gate_up_E2IH, offsets_E)
    return multiply(h_RI, down_EHI, offsets_E, transposed=True, product="down"), gate_up_R2I


def grouped_mlp_backward_triton(
    dy_RH: Tensor, x_TH: Tensor, weights_TK: Tensor, gate_up_E2IH: Tensor, down_EHI: Tensor,
    token_R: Tensor, row_TK: Tensor, offsets_E: Tensor, gate_up_R2I: Tensor,
    dgate_up_E2IH: Tensor, ddown_EHI: Tensor, adds: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """grouped_mlp's backward: dx_TH and dweights_TK; the weights' gradients are added to the tables, or written."""
    gate_up_E2IH, down_EHI = gate_up_E2IH.contiguous(), down_EHI.contiguous()
    dy_RH = dy_RH.contiguous()
    weight_R = weight_of_rows_triton(weights_TK, row_TK, len(token_R))
    h_RI, dgate_up_R2I, dweight_PR = multiply_down_backward(dy_RH, down_EHI, gate_up_R2I, weight_R, offsets_E)
    dweights_TK = weights_gradient_triton(dweight_PR, weights_TK, row_TK)
    sum_outer(dy_RH, h_RI, None, offsets_E, ddown_EHI, adds=adds)
    del h_RI
    sum_outer(dgate_up_R2I, *rows_of(x_TH, token_R), offsets_E, dgate_up_E2IH.flatten(1, 2), adds=adds)
    dx_RH = multiply(dgate_up_R2I, gate_up_E2IH.flatten(1, 2), offsets_E, transposed=False, product="dx")
    return sum_rows_triton(dx_RH, row_TK), dweights_TK


def rows_of(x_TH: Tensor, token_R: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows for a product to read through token_R; where that is slow, one copy of them in order, and None."""
    if device.per_expert(x_TH.device):
        return x_TH.index_select(0, token_R), None
    return x_TH.contiguous(), token_R
