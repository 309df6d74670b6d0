"""Logits, losses and every gradient equal transformers' own."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from optimus_compiler.models import ModelConfig
from optimus_compiler.models.olmoe import OlmoeExperts
from tests.models.twins import (
    assert_same,
    batch,
    gradients,
    olmo_config,
    olmoe_config,
    relative_error,
    twins,
)

pytest.importorskip("transformers")

VARIATIONS = {
    "plain": {},
    "grouped-query": {"num_key_value_heads": 2},
    "one-kv-head": {"num_key_value_heads": 1},
    "clip_qkv": {"clip_qkv": 0.5},
    "attention_bias": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "no-pad-token": {"pad_token_id": None},
    "rope_theta": {"rope_theta": 500.0},
    "all": {"num_key_value_heads": 2, "clip_qkv": 0.4, "attention_bias": True, "tie_word_embeddings": True},
}
ROUTING = {
    "norm_topk_prob": {"norm_topk_prob": True},
    "K=1": {"num_experts_per_tok": 1},
    # The chosen weight is 1 whatever the router says, so all of its gradient must come from the auxiliary loss.
    "K=1-normalised": {"num_experts_per_tok": 1, "norm_topk_prob": True, "router_aux_loss_coef": 1.0},
    "K=N": {"num_experts_per_tok": 6},
    "N=1": {"num_experts": 1, "num_experts_per_tok": 1},
    "no-aux": {"output_router_logits": False},
    "aux-coefficient": {"router_aux_loss_coef": 3.0},
    "rms_norm_eps": {"rms_norm_eps": 0.1},
    "odd-widths": {"hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 7},
}


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fills every uninitialised tensor with NaN."""
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def padding_mask(ids_BS: Tensor, side: str) -> Tensor:
    """[B, S] int64 with row b short of b + 1 tokens, on the left or on the right."""
    B, S = ids_BS.shape
    lengths_B1 = S - 1 - torch.arange(B)[:, None]
    mask_BS = (torch.arange(S) < lengths_B1).long()
    return mask_BS.flip(1) if side == "left" else mask_BS


@pytest.mark.parametrize("changes", [pytest.param(v, id=k) for k, v in (VARIATIONS | ROUTING).items()])
def test_olmoe(changes: dict[str, object]) -> None:
    ids, labels = batch()
    assert_same(olmoe_config(**changes), input_ids=ids, labels=labels)


@pytest.mark.parametrize("changes", [pytest.param(v, id=k) for k, v in VARIATIONS.items()])
def test_olmo(changes: dict[str, object]) -> None:
    ids, labels = batch()
    assert_same(olmo_config(**changes), input_ids=ids, labels=labels)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 2}])
@pytest.mark.parametrize("make_config", [olmoe_config, olmo_config])
def test_padding(make_config: Callable[..., ModelConfig], changes: dict[str, int], side: str) -> None:
    ids, labels = batch(B=3)
    mask = padding_mask(ids, side)
    assert_same(make_config(**changes), input_ids=ids, labels=labels.masked_fill(mask == 0, -100), attention_mask=mask)


def test_a_mask_of_ones_changes_nothing() -> None:
    ids, labels = batch()
    model, reference = twins(olmoe_config())
    plain = model(ids, labels=labels)
    masked = model(ids, attention_mask=torch.ones_like(ids), labels=labels)
    expected = reference(ids, attention_mask=torch.ones_like(ids), labels=labels, use_cache=False)
    assert relative_error(masked.logits, plain.logits) <= 1e-6
    assert relative_error(masked.aux_loss, plain.aux_loss) <= 1e-6
    assert relative_error(masked.loss, expected.loss) <= 1e-6


@pytest.mark.parametrize("config", [olmoe_config(output_router_logits=False), olmo_config()])
def test_packed_documents(config: ModelConfig) -> None:
    """A 4-D mask and restarted positions give each document the logits it has alone, and transformers'."""
    ids, _ = batch(B=1, S=12)
    documents = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.tensor([[*range(5), *range(7)]])
    mask = (documents[:, None, :, None] == documents[:, None, None, :]) & torch.ones(12, 12, dtype=torch.bool).tril()
    assert_same(config, input_ids=ids, attention_mask=mask, position_ids=positions)

    model, _ = twins(config)
    packed = model(ids, attention_mask=mask, position_ids=positions).logits
    alone = torch.cat([model(ids[:, :5]).logits, model(ids[:, 5:]).logits], dim=1)
    assert relative_error(packed, alone) <= 1e-6


@pytest.mark.parametrize("config", [olmoe_config(), olmo_config()])
def test_one_token(config: ModelConfig) -> None:
    ids = torch.tensor([[3]])
    model, _ = assert_same(config, input_ids=ids)
    assert model(ids, labels=ids.clone()).loss.isnan(), "nothing to predict: the mean over no label, as transformers"
    assert_same(config, input_ids=torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]]))


def test_experts_without_a_token(poisoned_memory: None) -> None:
    """Three tokens with one choice each leave at least three of six experts idle: their gradient is exactly zero."""
    ids, labels = batch(B=1, S=3)
    model, out = assert_same(olmoe_config(num_experts_per_tok=1), input_ids=ids, labels=labels)
    for layer, logits_TE in zip(model.model.layers, out.router_logits, strict=True):
        chosen = logits_TE.argmax(dim=-1)
        for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            trained = {e for e in range(6) if (weight.grad[e] != 0).any()}
            assert set() < trained <= set(chosen.tolist())


def test_poisoned_memory(poisoned_memory: None) -> None:
    ids, labels = batch()
    assert_same(olmoe_config(num_key_value_heads=2), input_ids=ids, labels=labels)
    assert_same(olmo_config(num_key_value_heads=2), input_ids=ids, labels=labels)


def test_what_an_unchosen_expert_would_make_of_a_token_does_not_matter() -> None:
    """Expert 1 overflows on token 0, which did not choose it."""
    experts = OlmoeExperts(olmoe_config(num_experts=2, num_experts_per_tok=1))
    torch.manual_seed(0)
    with torch.no_grad():
        experts.gate_up_proj.normal_()
        experts.down_proj.normal_()
        experts.gate_up_proj[1].abs_().mul_(1e30)
    x_TH = torch.ones(2, 24)
    x_TH[0] *= 1e10  # times 1e30: infinite in expert 1
    x_TH[1] *= 1e-30
    x_TH.requires_grad_()
    weights_TK = torch.tensor([[0.5], [0.25]], requires_grad=True)
    y_TH = experts(x_TH, torch.tensor([[0], [1]]), weights_TK)
    y_TH.sum().backward()
    for tensor in (y_TH, x_TH.grad, weights_TK.grad, experts.gate_up_proj.grad, experts.down_proj.grad):
        assert tensor is not None
        assert tensor.isfinite().all()


def test_experts_by_hand() -> None:
    """Two tokens, three experts, each token's two choices in descending and in ascending order of index."""
    experts = OlmoeExperts(olmoe_config(num_experts=3))
    torch.manual_seed(1)
    with torch.no_grad():
        experts.gate_up_proj.normal_()
        experts.down_proj.normal_()
    x_TH = torch.randn(2, 24)
    indices_TK, weights_TK = torch.tensor([[2, 0], [0, 1]]), torch.tensor([[0.7, 0.1], [0.4, 0.3]])

    def expert(e: int, x_H: Tensor) -> Tensor:
        gate, up = (experts.gate_up_proj[e] @ x_H).chunk(2)
        return experts.down_proj[e] @ (gate * torch.sigmoid(gate) * up)

    expected = torch.stack(
        [
            0.7 * expert(2, x_TH[0]) + 0.1 * expert(0, x_TH[0]),
            0.4 * expert(0, x_TH[1]) + 0.3 * expert(1, x_TH[1]),
        ]
    )
    assert relative_error(experts(x_TH, indices_TK, weights_TK), expected) <= 1e-6


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 2, "clip_qkv": 0.5, "attention_bias": True}])
@pytest.mark.parametrize(
    ("make_config", "experts"), [(olmo_config, "eager"), (olmoe_config, "grouped_mm")], ids=["olmo", "olmoe"]
)
def test_bf16_rounds_where_transformers_does(
    make_config: Callable[..., ModelConfig], experts: str, changes: dict[str, object]
) -> None:
    """Logits and loss are bitwise equal; gradients too, but for the order of sums over grouped heads."""
    config = make_config(intermediate_size=16, **changes)  # 32 bytes: grouped_mm refuses a pitch not divisible by 16
    model, reference = (m.bfloat16() for m in twins(config, experts))
    # `.bfloat16()` rounded transformers' buffer of frequencies too; loading a checkpoint in bf16 would not have.
    reference.model.rotary_emb.inv_freq = type(reference.model.rotary_emb)(reference.config).inv_freq
    ids, labels = batch()
    out, expected = model(ids, labels=labels), reference(ids, labels=labels, use_cache=False)
    out.loss.backward()
    expected.loss.backward()
    assert torch.equal(out.logits, expected.logits)
    assert torch.equal(out.loss, expected.loss)
    tolerance = 0.02 if "num_key_value_heads" in changes else 0.0
    grads, expected_grads = gradients(model), gradients(reference)
    for name, grad in grads.items():
        assert relative_error(grad, expected_grads[name]) <= tolerance, name


def test_attention_mask_of_a_wrong_shape_is_refused() -> None:
    model, _ = twins(olmo_config())
    ids, _ = batch(B=2, S=4)
    with pytest.raises(ValueError, match=r"attention_mask is torch.int64 \[2, 5\]; give \[2, 4\] of 0 and 1"):
        model(ids, attention_mask=torch.ones(2, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"attention_mask is torch.float32 \[2, 1, 4, 4\]"):
        model(ids, attention_mask=torch.zeros(2, 1, 4, 4))


def test_output_router_logits_can_be_asked_for_per_call() -> None:
    ids, labels = batch()
    model, _ = twins(olmoe_config(output_router_logits=False))
    plain, asked = model(ids, labels=labels), model(ids, labels=labels, output_router_logits=True)
    assert plain.router_logits is None
    assert plain.aux_loss is None
    assert relative_error(asked.loss, plain.loss + 0.01 * asked.aux_loss) <= 1e-6
