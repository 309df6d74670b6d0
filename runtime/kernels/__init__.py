"""Fused ops of the SparseMoE block and of the loss: `torch.ops.optimus.*`, registered by importing this package."""

from optimus_compiler.runtime.kernels.dispatch import Kernels, set_kernels, use_kernels
from optimus_compiler.runtime.kernels.exchange_tokens import plan_exchange, return_tokens, send_tokens
from optimus_compiler.runtime.kernels.grouped_mlp import grouped_mlp, grouped_mlp_backward
from optimus_compiler.runtime.kernels.index_tokens import index_tokens
from optimus_compiler.runtime.kernels.linear_logsumexp import linear_logsumexp, linear_logsumexp_backward
from optimus_compiler.runtime.kernels.matmul import matmul_dtype
from optimus_compiler.runtime.kernels.moe import moe
from optimus_compiler.runtime.kernels.reduce_outputs import reduce_outputs

__all__ = [
    "Kernels",
    "grouped_mlp",
    "grouped_mlp_backward",
    "index_tokens",
    "linear_logsumexp",
    "linear_logsumexp_backward",
    "matmul_dtype",
    "moe",
    "plan_exchange",
    "reduce_outputs",
    "return_tokens",
    "send_tokens",
    "set_kernels",
    "use_kernels",
]
