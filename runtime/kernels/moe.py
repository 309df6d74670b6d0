"""The fused SparseMoE block: the three ops in a row, for callers that need no expert parallelism."""

from torch import Tensor

from optimus_compiler.runtime.kernels.grouped_mlp import grouped_mlp
from optimus_compiler.runtime.kernels.index_tokens import index_tokens
from optimus_compiler.runtime.kernels.reduce_outputs import reduce_outputs


def moe(
    x_TH: Tensor,
    weights_TK: Tensor,
    indices_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    gate_up_gradient_E2IH: Tensor | None = None,
    down_gradient_EHI: Tensor | None = None,
) -> Tensor:
    """y_TH[t] = sum over k of weights[t, k] * expert_{indices[t, k]}(x[t]), in x's dtype.

    Differentiable in all but the indices; the gradients of gate_up and down are added to the buffers, where given. A
    choice outside [0, E) contributes nothing. Argument dtypes and errors: grouped_mlp, index_tokens.
    """
    token_R, row_TK, offsets_E, _ = index_tokens(indices_TK, None, down_EHI.shape[0])
    buffers = (gate_up_gradient_E2IH, down_gradient_EHI)
    y_RH, _ = grouped_mlp(x_TH, weights_TK, gate_up_E2IH, down_EHI, token_R, row_TK, offsets_E, *buffers)
    return reduce_outputs(y_RH, row_TK, token_R)
