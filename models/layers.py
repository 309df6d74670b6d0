"""What OLMo and OLMoE share: attention, rotary position embedding, gated MLP, mask, loss and initial weights.

Numerics are those of transformers, operation by operation: every cast to or from fp32 stands where theirs stands.

Shape suffixes: B batch, S sequence, T = B*S tokens, H hidden, A heads, G key-value heads, D head width, V vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus_compiler.models.config import DecoderConfig


@dataclass
class CausalLMOutput:
    """What a model returns. `loss` (scalar fp32) is None without labels; the router's fields are None when dense."""

    loss: Tensor | None
    logits: Tensor  # [B, S, V]
    aux_loss: Tensor | None = None  # scalar fp32, before its coefficient
    router_logits: tuple[Tensor, ...] | None = None  # one [T, E] a layer


class RotaryEmbedding(nn.Module):
    """Cosines and sines of rotary position embedding, in fp32 from integer positions.

    Nothing is kept in a buffer: a model on the meta device holds parameters only, and `.to(bfloat16)` cannot round
    the frequencies.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.theta = config.rope_theta

    def forward(self, position_ids_BS: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """position_ids [B or 1, S] int -> cos, sin [B or 1, S, D], rounded to `dtype` at the very end."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=position_ids_BS.device)
        inverse_frequencies = 1.0 / self.theta ** (exponents / self.head_dim)
        angles = position_ids_BS[..., None].float() * inverse_frequencies
        angles_BSD = torch.cat((angles, angles), dim=-1)
        return angles_BSD.cos().to(dtype), angles_BSD.sin().to(dtype)


def rotate_half(x: Tensor) -> Tensor:
    """[..., D] -> [..., D]: (x1, x2) -> (-x2, x1)."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rope(x_BASD: Tensor, cos_BSD: Tensor, sin_BSD: Tensor) -> Tensor:
    """Rotates queries or keys; computes in the wider of the two dtypes and returns x's."""
    rotated = x_BASD * cos_BSD[:, None] + rotate_half(x_BASD) * sin_BSD[:, None]
    return rotated.to(x_BASD.dtype)


def repeat_kv(x_BGSD: Tensor, repeats: int) -> Tensor:
    """Grouped-query attention: [B, G, S, D] -> [B, G*repeats, S, D], each head repeated in place."""
    if repeats == 1:
        return x_BGSD
    B, G, S, D = x_BGSD.shape
    return x_BGSD[:, :, None].expand(B, G, repeats, S, D).reshape(B, G * repeats, S, D)


class OlmoAttention(nn.Module):
    """Causal multi-head attention with RoPE and, by configuration, grouped key-value heads, biases and clipping."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width, kv_width = config.hidden_size, config.num_key_value_heads * config.head_dim
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.clip_qkv = config.clip_qkv
        self.q_proj = nn.Linear(width, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, width, bias=config.attention_bias)

    def project(self, x_BSH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values before they are clipped and split into heads."""
        return self.q_proj(x_BSH), self.k_proj(x_BSH), self.v_proj(x_BSH)

    def forward(self, x_BSH: Tensor, rope: tuple[Tensor, Tensor], mask_B1SS: Tensor | None) -> Tensor:
        """[B, S, H] -> [B, S, H]; without a mask attention is causal."""
        B, S, _ = x_BSH.shape
        projected: Iterable[Tensor] = self.project(x_BSH)
        if self.clip_qkv is not None:
            projected = [t.clamp(min=-self.clip_qkv, max=self.clip_qkv) for t in projected]
        q_BASD, k_BGSD, v_BGSD = [t.view(B, S, -1, self.head_dim).transpose(1, 2) for t in projected]
        attended_BASD = F.scaled_dot_product_attention(
            apply_rope(q_BASD, *rope),
            repeat_kv(apply_rope(k_BGSD, *rope), self.num_key_value_groups),
            repeat_kv(v_BGSD, self.num_key_value_groups),
            attn_mask=mask_B1SS,
            is_causal=mask_B1SS is None,
        )
        return self.o_proj(attended_BASD.transpose(1, 2).reshape(B, S, -1))


class OlmoMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def attention_mask_4d(attention_mask: Tensor | None, input_ids_BS: Tensor) -> Tensor | None:
    """The mask every layer uses, [B, 1, S, S] bool, True where a query sees a key; None means plainly causal.

    `attention_mask` [B, S] of 0 and 1 marks padding and is joined with the causal mask; [B, 1, S, S] bool is taken as
    it is, as transformers does, so it must be causal itself. Anything else is a ValueError.
    """
    if attention_mask is None:
        return None
    B, S = input_ids_BS.shape
    if attention_mask.dtype == torch.bool and attention_mask.shape == (B, 1, S, S):
        return attention_mask
    if attention_mask.shape != (B, S):
        raise ValueError(
            f"attention_mask is {attention_mask.dtype} {list(attention_mask.shape)}; give [{B}, {S}] of 0 and 1 "
            f"or bool [{B}, 1, {S}, {S}]."
        )
    causal_SS = torch.ones(S, S, dtype=torch.bool, device=input_ids_BS.device).tril()
    return causal_SS & attention_mask.to(torch.bool)[:, None, None, :]


def causal_lm_loss(logits_BSV: Tensor, labels_BS: Tensor, vocab_size: int) -> Tensor:
    """Mean cross entropy in fp32 of predicting labels[:, s + 1] at position s; labels of -100 do not count."""
    targets_BS = F.pad(labels_BS, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits_BSV.float().view(-1, vocab_size), targets_BS.reshape(-1))


@torch.no_grad()
def draw_initial_weights(model: nn.Module, std: float) -> None:
    """Matrices are drawn from N(0, std^2), biases and the padding token's row are zero, norms keep their ones."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(mean=0.0, std=std)
        elif name.endswith("bias"):
            parameter.zero_()
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx].zero_()


def tie_embeddings(model: Any) -> None:
    """Makes the head's weight the embedding's, also for checkpoints that hold it once."""
    model.lm_head.weight = model.model.embed_tokens.weight
    model.register_load_state_dict_pre_hook(_fill_tied_head)


def _fill_tied_head(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    head, embedding = prefix + "lm_head.weight", prefix + "model.embed_tokens.weight"
    if embedding not in state_dict:
        return  # load_state_dict reports it as missing
    if head not in state_dict:
        state_dict[head] = state_dict[embedding]
    elif not torch.equal(state_dict[head], state_dict[embedding]):
        raise ValueError(f"{head} differs from {embedding}, but tie_word_embeddings is set: set it to false.")
