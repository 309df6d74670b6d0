"""One SparseMoE block as different libraries compute it, all with the same weights, and the products none can avoid."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus_compiler.experts import register_experts
from optimus_compiler.runtime.kernels import moe
from optimus_compiler.runtime.kernels.matmul import matmul_dtype


class Shape(NamedTuple):
    """Of a block: tokens, hidden size, expert width; 64 experts, 8 a token, as OLMoE has."""

    tokens: int
    hidden: int
    width: int
    experts: int = 64
    top_k: int = 8

    @property
    def flops(self) -> float:
        """Of the products of forward and backward: three matrices, each in three products."""
        return 18.0 * self.tokens * self.top_k * self.hidden * self.width

    def __str__(self) -> str:
        return f"hidden {self.hidden}, width {self.width}, {self.tokens:,} tokens"


def hf_block(shape: Shape, dtype: torch.dtype, implementation: str) -> Any:
    """transformers' OLMoE block with the same random weights for every implementation."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

    register_experts()
    config = transformers.OlmoeConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.width,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = implementation
    block = OlmoeSparseMoeBlock(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.02, generator=generator)
    return block.to(dtype)


class OurBlock(nn.Module):
    """transformers' router before the fused ops, which add to the experts' `.grad` as they do in a compiled model."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.gate, self.experts = block.gate, block.experts
        for parameter in block.experts.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        x_TH = hidden.view(-1, hidden.shape[-1])
        _, weights_TK, indices_TK = self.gate(x_TH)
        gate_up, down = self.experts.gate_up_proj, self.experts.down_proj
        E, H, width = down.shape
        tables = (gate_up.view(E, 2, width, H), down, gate_up.grad.view(E, 2, width, H), down.grad)
        return moe(x_TH, weights_TK, indices_TK, *tables).view(hidden.shape)


class LoopBlock(nn.Module):
    """The block of transformers 4: an MLP an expert, torch.where to find its tokens, index_add_ to add them up."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.gate = copy.deepcopy(block.gate)
        gate, up = block.experts.gate_up_proj.detach().chunk(2, dim=1)
        self.gate_proj = nn.ParameterList(w.clone() for w in gate)
        self.up_proj = nn.ParameterList(w.clone() for w in up)
        self.down_proj = nn.ParameterList(w.clone() for w in block.experts.down_proj.detach())

    def forward(self, hidden: Tensor) -> Tensor:
        x_TH = hidden.view(-1, hidden.shape[-1])
        _, weights_TK, indices_TK = self.gate(x_TH)
        out_TH = torch.zeros_like(x_TH)
        experts = len(self.gate_proj)
        chosen_EKT = F.one_hot(indices_TK, experts).permute(2, 1, 0)
        for expert in range(experts):
            k, token = torch.where(chosen_EKT[expert])
            x = x_TH[token]
            h = F.silu(F.linear(x, self.gate_proj[expert])) * F.linear(x, self.up_proj[expert])
            y = F.linear(h, self.down_proj[expert]) * weights_TK[token, k, None]
            out_TH.index_add_(0, token, y.to(out_TH.dtype))
        return out_TH.view(hidden.shape)


def torchtitan_block(shape: Shape, block: Any) -> nn.Module:
    """torchtitan's MoE module with the weights of a transformers block. Raises ImportError where it is missing."""
    from torchtitan.models.common.config_utils import make_routed_experts_config
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import MoE, TokenChoiceTopKRouter

    E, K = shape.experts, shape.top_k
    experts = make_routed_experts_config(
        dim=shape.hidden, hidden_dim=shape.width, num_experts=E, top_k=K, param_init={}, comm_backend="standard"
    )
    gate = Linear.Config(in_features=shape.hidden, out_features=E, bias=False)
    router = TokenChoiceTopKRouter.Config(num_experts=E, gate=gate, top_k=K, score_func="softmax", route_norm=False)
    config = MoE.Config(num_experts=E, routed_experts=experts, router=router, load_balance_coeff=None)
    module = config.build().to(block.experts.down_proj.dtype)
    inner = module.routed_experts.inner_experts
    with torch.no_grad():
        module.router.gate.weight.copy_(block.gate.weight)
        for own, given in zip((inner.w1_EFD, inner.w3_EFD), block.experts.gate_up_proj.chunk(2, dim=1), strict=True):
            own.copy_(given)
        inner.w2_EDF.copy_(block.experts.down_proj)
    return module


def training_step(block: nn.Module, x: Tensor, dout: Tensor) -> Callable[[], None]:
    """Forward and backward; gradients stay and accumulate, as they do in buffers that persist between steps."""
    x = x.clone().requires_grad_()
    return lambda: block(x).backward(dout)


def bare_products(block: Any, x: Tensor) -> Callable[[], None]:
    """The floor: per expert gate, up and down forward (3), and their input and weight gradients (6), outputs
    preallocated, in the fastest dtype this machine has for them (on a CPU without bf16 products that is fp32)."""
    hidden, width = x.shape[-1], block.experts.down_proj.shape[-1]
    with torch.no_grad():
        _, _, indices_TK = block.gate(x.view(-1, hidden))
    counts = torch.bincount(indices_TK.flatten(), minlength=len(block.experts.down_proj)).tolist()
    dtype = matmul_dtype(x)
    gate_up = block.experts.gate_up_proj.detach().to(dtype)
    down = block.experts.down_proj.detach().to(dtype)
    dgate_up, ddown = torch.empty_like(gate_up), torch.empty_like(down)
    x_rH, h_rI, gate_up_r2I = (torch.randn(max(counts), n, dtype=dtype) for n in (hidden, width, 2 * width))
    out_rH, out_rI, out_r2I = torch.empty_like(x_rH), torch.empty_like(h_rI), torch.empty_like(gate_up_r2I)

    def run() -> None:
        for e, n in enumerate(counts):
            if n:
                torch.mm(x_rH[:n], gate_up[e].t(), out=out_r2I[:n])
                torch.mm(h_rI[:n], down[e].t(), out=out_rH[:n])
        for e, n in enumerate(counts):
            if n:
                torch.mm(x_rH[:n], down[e], out=out_rI[:n])
                torch.mm(x_rH[:n].t(), h_rI[:n], out=ddown[e])
                torch.mm(gate_up_r2I[:n], gate_up[e], out=out_rH[:n])
                torch.mm(gate_up_r2I[:n].t(), x_rH[:n], out=dgate_up[e])

    return run


def square_product(dtype: torch.dtype, size: int = 1536) -> tuple[Callable[[], Tensor], float]:
    """A large square product, and its floating-point operations: what one could hope for."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype)
    return lambda: torch.mm(a, b, out=out), 2.0 * size**3
