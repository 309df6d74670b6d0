"""Training a small model in one process and under a mesh: the same micro-batches, and what both must agree on."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import optimus_compiler as optimus
from optimus_compiler.models import ModelConfig
from tests.models.twins import olmo_config, olmoe_config, ours, twins

MICRO_BATCHES, B, S, V = 4, 2, 16, 64
STEPS, CLIP = 5, 0.05
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}


def small_model(kind: str) -> nn.Module:
    """olmoe, olmo; the same with tied embeddings (tied-), with biases and clipped projections (biased-), transformers'
    (hf-); idle: an OLMoE whose experts 4 to 7 never receive a token."""
    sizes: dict[str, Any] = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 16, "pad_token_id": None}
    if kind.startswith("tied-"):
        sizes["tie_word_embeddings"] = True
    if kind.startswith("biased-"):
        sizes.update(attention_bias=True, clip_qkv=1.0, pad_token_id=3)
    if kind.endswith("olmo"):
        config: ModelConfig = olmo_config(**sizes)
    else:
        config = olmoe_config(**sizes, num_experts=8, num_key_value_heads=2)
    if kind.startswith("hf-"):
        return twins(config)[1]
    model = ours(config)
    if kind == "idle":
        gates = [value for name, value in model.named_parameters() if name.endswith("gate.weight")]
        with torch.no_grad():
            for gate in gates:
                gate[1], gate[3], gate[4:] = -gate[0], -gate[2], 0  # two of the first four are positive, the rest zero
    return model


def batches() -> tuple[Tensor, Tensor]:
    """[STEPS, MICRO_BATCHES * B, S] of ids and labels; the micro-batches have different counts of ignored labels."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, V, (STEPS, MICRO_BATCHES * B, S), generator=generator)
    labels = ids.clone()
    for row in range(MICRO_BATCHES * B):
        labels[:, row, : row + 1] = -100
    return ids, labels


@dataclass
class Result:
    """What runs must agree on: losses and norms of each step, first gradients, weights and moments at the end."""

    losses: list[float] = field(default_factory=list)
    aux_losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    redone: list[bool] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    exp_avg: dict[str, Tensor] = field(default_factory=dict)
    exp_avg_sq: dict[str, Tensor] = field(default_factory=dict)


def reference_run(model: nn.Module) -> Result:
    """The unmodified module, one process, accumulating the micro-batches, clipped and stepped by torch."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    is_moe = hasattr(model, "router_aux_loss_coef")
    result = Result()
    for ids, labels in zip(*batches(), strict=True):
        optimizer.zero_grad()
        losses, aux_losses = [], []
        for rows, targets in zip(ids.split(B), labels.split(B), strict=True):
            out = model(input_ids=rows, labels=targets, **({"output_router_logits": True} if is_moe else {}))
            (out.loss / MICRO_BATCHES).backward()
            losses.append(out.loss.item())
            aux_losses.append(out.aux_loss.item() if is_moe else 0.0)
        if not result.losses:
            result.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        result.losses.append(sum(losses) / MICRO_BATCHES)
        result.aux_losses.append(sum(aux_losses) / MICRO_BATCHES)
        result.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    names = dict(model.named_parameters())
    result.weights = {name: p.detach().clone() for name, p in names.items()}
    result.exp_avg = {name: optimizer.state[p]["exp_avg"] for name, p in names.items()}
    result.exp_avg_sq = {name: optimizer.state[p]["exp_avg_sq"] for name, p in names.items()}
    return result


def compile_small(kind: str, mesh: optimus.Mesh, **options: Any) -> optimus.CompiledModel:
    """Compiled for this layout."""
    options.setdefault("backend", "aot_eager")
    return optimus.compile(
        small_model(kind),
        mesh,
        sequence_length=S,
        micro_batch_size=B,
        micro_batches=MICRO_BATCHES // mesh.size_of("dp", "ep"),
        **options,
    )


def own_rows(values: Tensor, mesh: optimus.Mesh) -> Tensor:
    """This (dp, ep) coordinate's share of a global batch."""
    return values.chunk(mesh.size_of("dp", "ep"))[mesh.index_in("dp", "ep")]


def layout_run(compiled: optimus.CompiledModel, start: dict[str, Tensor], **settings: Any) -> Result:
    """The same training by a compiled model, from the weights `start`."""
    mesh = compiled.program.mesh
    compiled.load_state_dict(start)
    optimizer = optimus.ShardedAdamW(compiled, clip_norm=CLIP, **ADAMW, **settings)
    result = Result()
    for ids, labels in zip(*batches(), strict=True):
        out = compiled.train_step(own_rows(ids, mesh), own_rows(labels, mesh))
        if not result.losses:
            result.gradients = compiled.full_gradients()
        result.losses.append(out.loss.item())
        result.aux_losses.append(out.aux_loss.item())
        result.redone.append(out.redone)
        result.norms.append(float(optimizer.step()))
        optimizer.zero_grad()
    result.weights = compiled.full_state_dict()
    full = optimizer.full_state()
    result.exp_avg, result.exp_avg_sq = full["exp_avg"], full["exp_avg_sq"]
    return result
