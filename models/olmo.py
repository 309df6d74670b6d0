"""Dense OLMo in plain torch, with transformers' module and parameter names.

Shape suffixes: B batch, S sequence, H hidden, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus_compiler.models.config import OlmoConfig
from optimus_compiler.models.layers import (
    CausalLMOutput,
    OlmoAttention,
    OlmoMLP,
    RotaryEmbedding,
    attention_mask_4d,
    causal_lm_loss,
    draw_initial_weights,
    tie_embeddings,
)


class OlmoLayerNorm(nn.Module):
    """LayerNorm in fp32 without parameters."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.normalized_shape = (hidden_size,)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H], dtype kept."""
        return F.layer_norm(x.float(), self.normalized_shape, eps=1e-5).to(x.dtype)


class OlmoDecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual."""

    def __init__(self, config: OlmoConfig) -> None:
        super().__init__()
        self.self_attn = OlmoAttention(config)
        self.mlp = OlmoMLP(config)
        self.input_layernorm = OlmoLayerNorm(config.hidden_size)
        self.post_attention_layernorm = OlmoLayerNorm(config.hidden_size)

    def forward(self, x_BSH: Tensor, rope: tuple[Tensor, Tensor], mask_B1SS: Tensor | None) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        x_BSH = x_BSH + self.self_attn(self.input_layernorm(x_BSH), rope, mask_B1SS)
        return x_BSH + self.mlp(self.post_attention_layernorm(x_BSH))


class OlmoModel(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: OlmoConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(OlmoDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = OlmoLayerNorm(config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(self, input_ids_BS: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
        """Token ids -> hidden states [B, S, H]."""
        if position_ids is None:
            position_ids = torch.arange(input_ids_BS.shape[1], device=input_ids_BS.device)[None]
        rope = self.rotary_emb(position_ids, torch.float32)  # OLMo rotates in fp32, OLMoE in the hidden dtype
        mask_B1SS = attention_mask_4d(attention_mask, input_ids_BS)
        x_BSH = self.embed_tokens(input_ids_BS)
        for layer in self.layers:
            x_BSH = layer(x_BSH, rope, mask_B1SS)
        return self.norm(x_BSH)


class OlmoForCausalLM(nn.Module):
    """Dense OLMo with its language model head (https://arxiv.org/abs/2402.00838)."""

    loss_function = staticmethod(causal_lm_loss)

    def __init__(self, config: OlmoConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.model = OlmoModel(config)
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
        output_router_logits is accepted for OLMoE's sake; a dense model has none.
        """
        hidden_BSH = self.model(input_ids, attention_mask, position_ids)
        logits_BSV = self.lm_head(hidden_BSH)
        loss = None if labels is None else self.loss_function(logits_BSV, labels, self.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits_BSV)
