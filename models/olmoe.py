"""Sparse OLMoE in plain torch, with transformers' module and parameter names.

Shape suffixes: B batch, S sequence, T = B*S tokens, H hidden, V vocabulary, E experts, K experts chosen per token,
I width of one expert.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus_compiler.models.config import OlmoeConfig
from optimus_compiler.models.layers import (
    CausalLMOutput,
    OlmoAttention,
    RotaryEmbedding,
    attention_mask_4d,
    causal_lm_loss,
    draw_initial_weights,
    tie_embeddings,
)


class OlmoeRMSNorm(nn.Module):
    """Root mean square norm: computed in fp32, scaled in the input's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width], dtype kept."""
        x_fp32 = x.float()
        variance = x_fp32.pow(2).mean(-1, keepdim=True)
        return self.weight * (x_fp32 * torch.rsqrt(variance + self.variance_epsilon)).to(x.dtype)


class OlmoeAttention(OlmoAttention):
    """OLMo's attention with queries and keys normalised over their full width, before the split into heads."""

    def __init__(self, config: OlmoeConfig) -> None:
        super().__init__(config)
        self.q_norm = OlmoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.k_norm = OlmoeRMSNorm(config.num_key_value_heads * config.head_dim, config.rms_norm_eps)

    def project(self, x_BSH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values before they are clipped and split into heads."""
        return self.q_norm(self.q_proj(x_BSH)), self.k_norm(self.k_proj(x_BSH)), self.v_proj(x_BSH)


class OlmoeTopKRouter(nn.Module):
    """Chooses K experts per token by the softmax of a linear map."""

    def __init__(self, config: OlmoeConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, H] -> logits [T, E], weights [T, K] in x's dtype, indices [T, K] int64, by descending weight."""
        logits_TE = F.linear(x_TH, self.weight)
        weights_TK, indices_TK = F.softmax(logits_TE, dim=-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return logits_TE, weights_TK.to(logits_TE.dtype), indices_TK


class OlmoeExperts(nn.Module):
    """All experts' SwiGLU weights, stacked. The forward is the readable reference: every expert sees every token."""

    def __init__(self, config: OlmoeConfig) -> None:
        super().__init__()
        E, H, width = config.num_experts, config.hidden_size, config.intermediate_size
        self.num_experts = E
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * width, H))
        self.down_proj = nn.Parameter(torch.empty(E, H, width))
        self.register_load_state_dict_pre_hook(_stack_published_experts)

    def forward(self, x_TH: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """y[t] = sum over k of weights[t, k] * expert indices[t, k] of x[t]; [T, H] -> [T, H].

        The cost is that of E experts per token and the graph's size does not depend on E. A token that did not choose
        an expert enters it as zeros, so what that expert would have made of it, were it infinite, reaches neither y
        nor a gradient.
        """
        experts_E = torch.arange(self.num_experts, device=x_TH.device)
        chosen_TKE = indices_TK[..., None] == experts_E
        weights_TE = torch.where(chosen_TKE, weights_TK[..., None], 0).sum(dim=1)
        chosen_ET1 = chosen_TKE.any(dim=1).t()[..., None]

        x_ETH = torch.where(chosen_ET1, x_TH, 0)
        gate_ETI, up_ETI = torch.bmm(x_ETH, self.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
        y_ETH = torch.bmm(F.silu(gate_ETI) * up_ETI, self.down_proj.transpose(1, 2))
        return (y_ETH * weights_TE.t()[..., None]).sum(dim=0)


def _stack_published_experts(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Before loading, turns the published `{i}.{gate,up,down}_proj.weight` into this module's stacked tensors."""
    E = module.get_parameter("down_proj").shape[0]
    projections = ("gate_proj", "up_proj", "down_proj")
    names = {p: [f"{prefix}{i}.{p}.weight" for i in range(E)] for p in projections}
    expected = [name for p in projections for name in names[p]]
    if not any(name in state_dict for name in expected):
        return
    if missing := [name for name in expected if name not in state_dict]:
        raise ValueError(
            f"the checkpoint lacks {missing[0]} ({len(missing)} of the {len(expected)} matrices of {prefix[:-1]}): "
            "give all its files, or a configuration with its number of experts."
        )
    gate_EIH, up_EIH, down_EHI = (torch.stack([state_dict.pop(name) for name in names[p]]) for p in projections)
    state_dict[prefix + "gate_up_proj"] = torch.cat((gate_EIH, up_EIH), dim=1)
    state_dict[prefix + "down_proj"] = down_EHI


class OlmoeSparseMoeBlock(nn.Module):
    """Router and experts in place of the MLP."""

    def __init__(self, config: OlmoeConfig) -> None:
        super().__init__()
        self.gate = OlmoeTopKRouter(config)
        self.experts = OlmoeExperts(config)

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, H] -> the same, and the router's logits [T, E]."""
        x_TH = x_BSH.reshape(-1, x_BSH.shape[-1])
        logits_TE, weights_TK, indices_TK = self.gate(x_TH)
        return self.experts(x_TH, indices_TK, weights_TK).view_as(x_BSH), logits_TE


class OlmoeDecoderLayer(nn.Module):
    """Pre-norm attention and sparse MoE block, each added to the residual."""

    def __init__(self, config: OlmoeConfig) -> None:
        super().__init__()
        self.self_attn = OlmoeAttention(config)
        self.mlp = OlmoeSparseMoeBlock(config)
        self.input_layernorm = OlmoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = OlmoeRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_BSH: Tensor, rope: tuple[Tensor, Tensor], mask_B1SS: Tensor | None) -> tuple[Tensor, Tensor]:
        """[B, S, H] -> the same, and the router's logits [T, E]."""
        x_BSH = x_BSH + self.self_attn(self.input_layernorm(x_BSH), rope, mask_B1SS)
        moe_BSH, router_logits_TE = self.mlp(self.post_attention_layernorm(x_BSH))
        return x_BSH + moe_BSH, router_logits_TE


class OlmoeModel(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: OlmoeConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(OlmoeDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = OlmoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(
        self, input_ids_BS: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Token ids -> hidden states [B, S, H] and each layer's router logits [T, E]."""
        if position_ids is None:
            position_ids = torch.arange(input_ids_BS.shape[1], device=input_ids_BS.device)[None]
        mask_B1SS = attention_mask_4d(attention_mask, input_ids_BS)
        x_BSH = self.embed_tokens(input_ids_BS)
        rope = self.rotary_emb(position_ids, x_BSH.dtype)
        router_logits: list[Tensor] = []
        for layer in self.layers:
            x_BSH, logits_TE = layer(x_BSH, rope, mask_B1SS)
            router_logits.append(logits_TE)
        return self.norm(x_BSH), tuple(router_logits)


def load_balancing_loss(
    router_logits: tuple[Tensor, ...], num_experts: int, top_k: int, attention_mask: Tensor | None = None
) -> Tensor:
    """Auxiliary loss of Switch Transformers, equations 4 to 6 (https://arxiv.org/abs/2101.03961), pooled over layers.

    router_logits: one [T, E] a layer. attention_mask [B, S] leaves padding out; one that is not [B, S] says nothing
    about padding and is not used. E * sum over experts of (choices per token) * (mean probability), a scalar in fp32.
    """
    experts_E = torch.arange(num_experts, device=router_logits[0].device)
    counted_T1 = None
    if attention_mask is not None and attention_mask.dim() == 2:
        counted_T1 = attention_mask.reshape(-1, 1).float()
    choices_E = probabilities_E = tokens = torch.zeros((), device=experts_E.device)
    for logits_TE in router_logits:
        probs_TE = F.softmax(logits_TE, dim=-1)  # in the logits' dtype, unlike the router's own, as in transformers
        indices_TK = probs_TE.topk(top_k, dim=-1).indices
        chosen_TE = (indices_TK[..., None] == experts_E).sum(dim=1).float()
        probs_TE = probs_TE.float()
        if counted_T1 is None:
            tokens = tokens + logits_TE.shape[0]
        else:
            chosen_TE, probs_TE, tokens = chosen_TE * counted_T1, probs_TE * counted_T1, tokens + counted_T1.sum()
        choices_E = choices_E + chosen_TE.sum(dim=0)
        probabilities_E = probabilities_E + probs_TE.sum(dim=0)
    return num_experts * torch.sum(choices_E / tokens * (probabilities_E / tokens))


class OlmoeForCausalLM(nn.Module):
    """OLMoE with its language model head (https://arxiv.org/abs/2409.02060)."""

    loss_function = staticmethod(causal_lm_loss)

    def __init__(self, config: OlmoeConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.num_experts = config.num_experts
        self.num_experts_per_tok = config.num_experts_per_tok
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.model = OlmoeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            tie_embeddings(self)
        draw_initial_weights(self, config.initializer_range)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_router_logits: bool | None = None,
    ) -> CausalLMOutput:
        """Logits [B, S, V] and, with labels, the loss.

        input_ids, labels, position_ids: [B, S] int64; labels of -100 do not count. position_ids only turn RoPE:
        documents are kept apart by the mask. attention_mask: [B, S] of 0 and 1, or [B, 1, S, S] bool, itself causal.
        output_router_logits (default: the configuration's) returns each layer's router logits [T, E] and the
        auxiliary loss, and adds router_aux_loss_coef times the latter to the loss.
        """
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        hidden_BSH, router_logits = self.model(input_ids, attention_mask, position_ids)
        logits_BSV = self.lm_head(hidden_BSH)
        loss = None if labels is None else self.loss_function(logits_BSV, labels, self.vocab_size)
        if not output_router_logits:
            return CausalLMOutput(loss=loss, logits=logits_BSV)
        aux_loss = load_balancing_loss(router_logits, self.num_experts, self.num_experts_per_tok, attention_mask)
        if loss is not None:
            loss = loss + self.router_aux_loss_coef * aux_loss
        return CausalLMOutput(loss=loss, logits=logits_BSV, aux_loss=aux_loss, router_logits=router_logits)
