"""A whole training step: forward, backward, clipping, fused AdamW; ours beside transformers' and its compiled form.

python -m pytest bench/test_step.py -s
4 layers, hidden 512, 64 experts of width 256, 8 a token, vocabulary 50,304, 4 x 512 tokens, auxiliary loss on. All
sides run torch's own AdamW(fused=True) in the dtype of the weights; one more row has ours, with fp32 masters.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimus_compiler as optimus

BATCH, LENGTH, VOCABULARY = 4, 512, 50304
SETTINGS: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.99), "weight_decay": 0.1}


def hf_model(dtype: torch.dtype, implementation: str) -> Any:
    """transformers' OLMoE, the same weights for every implementation."""
    transformers = pytest.importorskip("transformers")
    config = transformers.OlmoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_experts=64,
        num_experts_per_tok=8,
        experts_implementation=implementation,
    )
    torch.manual_seed(0)
    return transformers.OlmoeForCausalLM(config).to(dtype)


def hf_step(model: Any, ids: Tensor, forward: Callable[..., Any] | None = None) -> Callable[[], None]:
    """One step of a transformers model, as its users write it."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **SETTINGS)
    run = model if forward is None else forward

    def step() -> None:
        run(ids, labels=ids, output_router_logits=True, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def our_step(model: Any, ids: Tensor, *, sharded: bool) -> Callable[[], None]:
    """One step of the compiled model, with torch's optimizer or ours."""
    compiled = optimus.compile(model, sequence_length=LENGTH, micro_batch_size=BATCH)
    if sharded:
        ours = optimus.ShardedAdamW(compiled, **SETTINGS)

        def step() -> None:
            compiled.train_step(ids, ids)
            ours.step()
            ours.zero_grad()

        return step
    optimizer = torch.optim.AdamW(compiled.parameters(), fused=True, **SETTINGS)

    def step_with_torch() -> None:
        compiled.train_step(ids, ids)
        nn.utils.clip_grad_norm_(compiled.parameters(), 1.0)
        optimizer.step()
        compiled.zero_grad()

    return step_with_torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_step(dtype: torch.dtype, interleave: Callable[..., tuple], publish: Callable[..., None]) -> None:
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    compiled_by_torch = hf_model(dtype, "grouped_mm")
    variants = {
        "ours": our_step(hf_model(dtype, "grouped_mm"), ids.clone(), sharded=False),
        "ours, ShardedAdamW": our_step(hf_model(dtype, "grouped_mm"), ids.clone(), sharded=True),
        "HF grouped_mm": hf_step(hf_model(dtype, "grouped_mm"), ids),
        "torch.compile(HF grouped_mm)": hf_step(compiled_by_torch, ids, torch.compile(compiled_by_torch)),
        "HF eager": hf_step(hf_model(dtype, "eager"), ids),
    }
    wall, cpu = interleave(variants, 9)
    tokens = BATCH * LENGTH
    short = str(dtype).removeprefix("torch.")
    publish(
        f"step-{short}",
        f"Training step of 4 layers, 4 x 512 tokens, {short}; medians of 9 interleaved rounds",
        ["variant", "wall ms", "CPU ms", "tokens/s", "x ours"],
        [
            [name, f"{wall[name]:.0f}", f"{cpu[name]:.0f}", f"{1e3 * tokens / wall[name]:.0f}",
             f"{cpu[name] / cpu['ours']:.2f}"]
            for name in variants
        ],
    )  # fmt: skip
    assert cpu["ours"] <= 1.05 * min(cpu["HF grouped_mm"], cpu["torch.compile(HF grouped_mm)"])
