"""Text from a compiled model: temperature and nucleus sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class LogitsModel(Protocol):
    """What sampling needs: token ids [B, S] to an output with `.logits` [B, S, V]."""

    def __call__(self, input_ids: Tensor) -> Any: ...


@torch.no_grad()
def sample(
    model: LogitsModel,
    prompt: Sequence[int],
    *,
    count: int,
    new_tokens: int,
    sequence_length: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> Tensor:
    """Continue `prompt` in `count` ways: int64 [count, len(prompt) + new_tokens], the same for the same seed.

    Each token is drawn from the smallest set of tokens whose probability reaches `top_p` (Holtzman et al., arXiv
    1904.09751), after dividing the logits by `temperature`. The model sees the last `sequence_length` tokens. Raises
    ValueError for an empty prompt and for a temperature or top_p that is not positive.
    """
    if not prompt or temperature <= 0 or top_p <= 0:
        raise ValueError("sampling needs a prompt of at least one token, temperature > 0 and top_p > 0")
    generator = torch.Generator().manual_seed(seed)
    ids_BS = torch.tensor([list(prompt)] * count, dtype=torch.int64)
    for _ in range(new_tokens):
        logits_BV = model(ids_BS[:, -sequence_length:]).logits[:, -1].float().cpu()
        probs_BV = _nucleus(torch.softmax(logits_BV / temperature, dim=-1), top_p)
        ids_BS = torch.cat([ids_BS, torch.multinomial(probs_BV, 1, generator=generator)], dim=1)
    return ids_BS


def _nucleus(probs_BV: Tensor, top_p: float) -> Tensor:
    """Zero what lies outside the nucleus; the likeliest token always stays."""
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True)
    before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
    sorted_BV = sorted_BV.masked_fill(before_BV >= top_p, 0.0)
    return torch.zeros_like(probs_BV).scatter(-1, order_BV, sorted_BV)
