"""One forward + backward of the SparseMoE block: ours beside transformers' eager, grouped_mm and a v4-style loop.

"floor" is the nine bare matrix products of each expert's forward and backward at this routing's row counts, outputs
preallocated, in the fastest dtype this machine has for them (on a CPU without bf16 products that is fp32).
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus_compiler.experts import register_experts
from optimus_compiler.runtime.kernels.matmul import matmul_dtype

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 1024, 512, 256, 64, 8
ROUNDS = 9


def hf_block(dtype: torch.dtype, implementation: str) -> Any:
    """transformers' OLMoE block with the same random weights for every implementation."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

    register_experts()
    config = transformers.OlmoeConfig(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = implementation
    block = OlmoeSparseMoeBlock(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.02, generator=generator)
    return block.to(dtype)


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
        x_TH = hidden.view(-1, HIDDEN)
        _, weights_TK, indices_TK = self.gate(x_TH)
        out_TH = torch.zeros_like(x_TH)
        chosen_EKT = F.one_hot(indices_TK, EXPERTS).permute(2, 1, 0)
        for expert in range(EXPERTS):
            k, token = torch.where(chosen_EKT[expert])
            x = x_TH[token]
            h = F.silu(F.linear(x, self.gate_proj[expert])) * F.linear(x, self.up_proj[expert])
            y = F.linear(h, self.down_proj[expert]) * weights_TK[token, k, None]
            out_TH.index_add_(0, token, y.to(out_TH.dtype))
        return out_TH.view(hidden.shape)


def training_step(block: nn.Module, x: Tensor, dout: Tensor) -> Callable[[], None]:
    """Forward and backward; gradients stay and accumulate, as they do in buffers that persist between steps."""
    x = x.clone().requires_grad_()
    return lambda: block(x).backward(dout)


def bare_products(block: Any, x: Tensor) -> Callable[[], None]:
    """The floor: per expert gate, up and down forward (3), and their input and weight gradients (6)."""
    with torch.no_grad():
        _, _, indices_TK = block.gate(x.view(-1, HIDDEN))
    counts = torch.bincount(indices_TK.flatten(), minlength=EXPERTS).tolist()
    dtype = matmul_dtype(x)
    gate_up = block.experts.gate_up_proj.detach().to(dtype)
    down = block.experts.down_proj.detach().to(dtype)
    dgate_up, ddown = torch.empty_like(gate_up), torch.empty_like(down)
    x_rH, h_rI, gate_up_r2I = (torch.randn(max(counts), n, dtype=dtype) for n in (HIDDEN, WIDTH, 2 * WIDTH))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_block_forward_backward(
    dtype: torch.dtype, threads: int, interleave: Callable[..., tuple], capsys: pytest.CaptureFixture[str]
) -> None:
    generator = torch.Generator().manual_seed(1)
    x, dout = (torch.randn(1, TOKENS, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    ours = hf_block(dtype, "optimus")
    variants = {
        "ours": training_step(ours, x, dout),
        "floor": bare_products(ours, x),
        "HF grouped_mm": training_step(hf_block(dtype, "grouped_mm"), x, dout),
        "v4 loop": training_step(LoopBlock(ours), x, dout),
        "HF eager": training_step(hf_block(dtype, "eager"), x, dout),
    }
    wall, cpu = interleave(variants, ROUNDS)

    with capsys.disabled():
        print(f"\n{TOKENS} tokens, hidden {HIDDEN}, width {WIDTH}, {EXPERTS} experts, K {TOP_K}, {dtype}, ", end="")
        print(f"{threads} thread(s), medians of {ROUNDS} interleaved rounds, gradients kept")
        print(f"{'variant':<16}{'wall ms':>10}{'CPU ms':>10}{'x ours':>10}{'% of floor':>12}")
        for name in variants:
            ratio, share = cpu[name] / cpu["ours"], 100 * cpu["floor"] / cpu[name]
            print(f"{name:<16}{wall[name]:>10.1f}{cpu[name]:>10.1f}{ratio:>10.2f}{share:>12.1f}")
    assert cpu["HF eager"] >= 2.5 * cpu["ours"]
    assert cpu["HF grouped_mm"] >= cpu["ours"]
