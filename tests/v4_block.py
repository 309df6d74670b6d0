"""The SparseMoE block as transformers 4 wrote it: a ModuleList of experts, torch.where, index_add_."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus_compiler.models import OlmoeForCausalLM


class V4Mlp(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class V4SparseMoeBlock(nn.Module):
    def __init__(self, hidden: int, width: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(V4Mlp(hidden, width) for _ in range(experts))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, hidden = hidden_states.shape
        x = hidden_states.view(-1, hidden)
        router_logits = self.gate(x)
        weights, chosen = torch.topk(F.softmax(router_logits, dim=1, dtype=torch.float), self.top_k, dim=-1)
        weights = weights.to(x.dtype)
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for index, expert in enumerate(self.experts):
            place, token = torch.where(mask[index])
            current = expert(x[None, token].reshape(-1, hidden)) * weights[token, place, None]
            out.index_add_(0, token, current.to(x.dtype))
        return out.reshape(batch, length, hidden), router_logits


def with_v4_blocks(model: OlmoeForCausalLM) -> OlmoeForCausalLM:
    """Replaces every block by a v4 one with the same weights."""
    config = model.config
    layers: Any = model.model.layers
    for layer in layers:
        block = V4SparseMoeBlock(
            config.hidden_size, config.intermediate_size, config.num_experts, config.num_experts_per_tok
        )
        with torch.no_grad():
            block.gate.weight.copy_(layer.mlp.gate.weight)
            experts: Any = block.experts
            for index, expert in enumerate(experts):
                gate, up = layer.mlp.experts.gate_up_proj[index].chunk(2)
                expert.gate_proj.weight.copy_(gate)
                expert.up_proj.weight.copy_(up)
                expert.down_proj.weight.copy_(layer.mlp.experts.down_proj[index])
        layer.mlp = block
    return model
