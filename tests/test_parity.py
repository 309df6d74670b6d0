"""Parity: loss and all gradients of compiled models equal transformers' own, in every form and corner."""

from typing import Any

import pytest
import torch
from torch import Tensor

from optimus_compiler.passes import Canonicalise, CausalMask, FuseLoss, FuseSparseMoE, PassPipeline
from tests.models.others import other_model
from tests.models.twins import SIZES, gradients, olmo_config, olmoe_config, ours, relative_error, theirs, twins
from tests.parity import assert_parity, compile_for, random_ids, worst_gradient
from tests.v4_block import with_v4_blocks

V = SIZES["vocab_size"]

MOE_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one choice": {"num_experts_per_tok": 1},
    "all experts": {"num_experts_per_tok": 6},
    "one expert": {"num_experts": 1, "num_experts_per_tok": 1},
    "norm_topk_prob": {"norm_topk_prob": True},
    "clip_qkv": {"clip_qkv": 0.4},
    "grouped-query attention": {"num_key_value_heads": 2},
    "attention_bias, tied": {"attention_bias": True, "tie_word_embeddings": True},
    "widths off 16 bytes": {"hidden_size": 18, "num_attention_heads": 3, "intermediate_size": 13},
}


@pytest.mark.parametrize("case", MOE_CASES)
@pytest.mark.parametrize("form", [pytest.param("ours", marks=pytest.mark.slow), "transformers"])
def test_moe_gradients_equal_transformers(form: str, case: str) -> None:
    model, reference = twins(olmoe_config(**MOE_CASES[case]))
    ids, labels = random_ids(V, 2, 13)  # 26 tokens: not divisible by 8
    compiled = compile_for(model if form == "ours" else reference, ids)
    assert_parity(compiled, reference, ids, labels)
    gate = compiled.full_gradients()["model.layers.0.mlp.gate.weight"]
    assert gate.abs().sum() > 0 or MOE_CASES[case].get("num_experts") == 1


@pytest.mark.parametrize("form", ["ours", "transformers"])
@pytest.mark.parametrize("tied", [False, True])
def test_dense_gradients_equal_transformers(form: str, tied: bool) -> None:
    model, reference = twins(olmo_config(tie_word_embeddings=tied, clip_qkv=0.5, num_key_value_heads=2))
    ids, labels = random_ids(V, 2, 13)
    compiled = compile_for(model if form == "ours" else reference, ids)
    assert_parity(compiled, reference, ids, labels)
    assert float(compiled(ids, labels).aux_loss) == 0.0
    assert set(compiled.full_state_dict()) == set(reference.state_dict())


@pytest.mark.parametrize("form", ["ours", "transformers"])
def test_padding_mask(form: str) -> None:
    model, reference = twins(olmoe_config())
    ids, labels = random_ids(V, 2, 13)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    labels[1, 8:] = -100
    compiled = compile_for(model if form == "ours" else reference, ids, {"attention_mask": mask})
    assert_parity(compiled, reference, ids, labels, attention_mask=mask)


def test_packed_documents_do_not_see_each_other() -> None:
    """document_ids and position_ids: each document computes what it computes alone."""
    model = ours(olmoe_config())
    ids, labels = random_ids(V, 1, 12)
    documents = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    inputs = {"document_ids": documents, "position_ids": positions}
    compiled = compile_for(model, ids, inputs)
    packed = compiled(ids, labels, return_logits=True, **inputs).logits
    for part in (slice(0, 5), slice(5, 12)):
        alone = model(input_ids=ids[:, part]).logits
        assert relative_error(packed[:, part], alone) <= 1e-5


def test_one_token() -> None:
    """A single token has no next token: no cross entropy, but logits, and a router with an auxiliary loss."""
    model, reference = twins(olmoe_config())
    ids, labels = random_ids(V, 1, 1)
    compiled = compile_for(model, ids)
    out, expected = compiled(ids, labels, return_logits=True), reference(input_ids=ids, output_router_logits=True)
    assert relative_error(out.logits, expected.logits) <= 1e-5
    assert relative_error(out.aux_loss, expected.aux_loss) <= 1e-6
    out.aux_loss.backward()
    expected.aux_loss.backward()
    gate = "model.layers.1.mlp.gate.weight"
    assert relative_error(compiled.full_gradients()[gate], reference.get_parameter(gate).grad) <= 1e-4


def test_expert_without_a_token_has_a_gradient_of_exactly_zero() -> None:
    model, reference = twins(olmoe_config(num_experts=24, num_experts_per_tok=1))
    ids, labels = random_ids(V, 1, 9)
    compiled = compile_for(model, ids)
    assert_parity(compiled, reference, ids, labels)
    counts = compiled.train_step(ids, labels).expert_counts
    assert counts is not None
    assert float(counts.sum()) == 2 * 9  # layers x tokens
    unused = counts == 0
    assert unused.any()
    gradient = compiled.full_gradients()["model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.equal(gradient[unused], torch.zeros_like(gradient[unused]))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_near_ties_choose_as_the_original_does(backend: str) -> None:
    """Two experts whose router rows are equal but for one rounding step, and two that are exactly equal.

    One layer: after it, another order of the experts' sums is another input of the next router.
    """
    model: Any = ours(olmoe_config(num_hidden_layers=1))
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.mlp.gate.weight
            weight[1] = weight[0] * (1 + 2e-7)
            weight[3] = weight[2]
    reference = theirs(model.config)
    reference.load_state_dict(model.state_dict())
    ids, labels = random_ids(V, 4, 16)
    compiled = compile_for(reference, ids, backend=backend)
    assert_parity(compiled, reference, ids, labels)
    chosen: list[Tensor] = []
    for layer in reference.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
    reference(input_ids=ids)
    expected = torch.bincount(torch.cat(chosen).reshape(-1), minlength=6).float()
    counts = compiled.train_step(ids, labels).expert_counts
    assert counts is not None
    assert torch.equal(counts, expected)


def test_poisoned_memory_leaves_everything_finite_and_equal(poisoned_memory: None) -> None:
    model, reference = twins(olmoe_config(num_experts=16, num_experts_per_tok=2))
    ids, labels = random_ids(V, 1, 7)
    assert_parity(compile_for(model, ids), reference, ids, labels)


@pytest.fixture
def poisoned_memory() -> Any:
    """Every tensor that is allocated without a value holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_three_passes_give_bitwise_the_same_gradients(backend: str) -> None:
    ids, labels = random_ids(V, 2, 16)
    compiled = compile_for(ours(olmoe_config()), ids, backend=backend)
    seen = []
    for _ in range(3):
        for bucket in compiled.buckets:
            bucket.gradients.zero_()
        loss = compiled.train_step(ids, labels).loss
        seen.append([loss, *(bucket.gradients.clone() for bucket in compiled.buckets)])
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


def test_forty_repeats_give_one_loss() -> None:
    ids, labels = random_ids(V, 2, 16)
    compiled = compile_for(ours(olmoe_config()), ids)
    assert len({float(compiled.train_step(ids, labels).loss) for _ in range(40)}) == 1


def test_skewed_routing_never_recompiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 steps in which the experts' token counts change every time, up to all tokens on one expert."""
    model = ours(olmoe_config(num_experts=8, num_experts_per_tok=1))
    ids, labels = random_ids(V, 2, 16)
    compiled = compile_for(model, ids)
    compiled.train_step(ids, labels)
    monkeypatch.setattr("optimus_compiler.executor.lower", None)  # another compilation would fail
    torch._dynamo.utils.counters.clear()
    counts = set()
    for step in range(20):
        for name, parameter in compiled.named_parameters():
            if name.endswith("gate.weight"):
                with torch.no_grad():
                    parameter.copy_(torch.randn_like(parameter) * 10 ** (step / 5))
        step_ids, _ = random_ids(V, 2, 16, seed=step)
        found = compiled.train_step(step_ids, labels).expert_counts
        assert found is not None
        counts.add(tuple(found.tolist()))
    assert len(counts) == 20
    assert not torch._dynamo.utils.counters["aot_autograd"]


PASSES = (Canonicalise(), CausalMask(), FuseSparseMoE(), FuseLoss(logits_limit=0))


@pytest.mark.parametrize("count", range(len(PASSES) + 1))
def test_losses_equal_transformers_after_every_pass(count: int) -> None:
    reference = twins(olmoe_config())[1]
    ids, labels = random_ids(V, 2, 8)
    compiled = compile_for(reference, ids, backend="eager", passes=PassPipeline(PASSES[:count]))
    assert_parity(compiled, reference, ids, labels)


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm", "eager", "v4"])
def test_every_form_of_experts_is_one_graph_and_fuses(form: str) -> None:
    sparse: Any = ours(olmoe_config())
    model: Any = with_v4_blocks(sparse) if form == "v4" else theirs(olmoe_config(), form)
    ids, labels = random_ids(V, 2, 8)
    compiled = compile_for(model, ids)
    report = next(r for r in compiled.program.history if r.name == "FuseSparseMoE")
    assert report.matches == 2
    assert ("a loop" in report.notes[0]) == (form == "v4")
    assert set(compiled.full_state_dict()) == set(model.state_dict())
    if form != "v4":
        assert model.config._experts_implementation == form  # as it was before the capture
    assert_parity(compiled, model, ids, labels)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE", "DeepSeek-V3"])
def test_other_transformers_moe_models(name: str) -> None:
    model = other_model(name)
    ids, labels = random_ids(V, 2, 8)
    compiled = compile_for(model, ids)
    assert_parity(compiled, model, ids, labels)
    assert next(r for r in compiled.program.history if r.name == "FuseSparseMoE").matches == 2
    if name == "DeepSeek-V3":  # its first layer is dense
        assert "layer 1 is not the same function as layer 0" in compiled.explain()


@pytest.mark.parametrize("dense", [False, True])
def test_bf16_is_as_close_to_fp32_as_transformers(dense: bool) -> None:
    """Error against the fp32 run at most 1.25 times the larger of transformers' own two (eager, grouped_mm).

    Given the same choice of experts: where rounding flips a near tie, an error says nothing. Over several batches: one
    scalar of one batch may happen to be rounded well.
    """
    config = olmo_config() if dense else olmoe_config(intermediate_size=16, output_router_logits=False)
    model, exact = twins(config)
    options: dict[str, Any] = {} if dense else {"force_uniform_routing": True, "aux_loss": False}
    compiled = compile_for(model.bfloat16(), random_ids(V, 2, 16)[0], **options)
    references = {form: in_bf16(config, exact.state_dict(), form) for form in ["eager", "grouped_mm"][: 2 - dense]}
    for original in (exact, *references.values()) if not dense else ():
        for layer in original.model.layers:
            layer.mlp.gate.register_forward_hook(uniform_choice)

    def step(form: str, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if form == "compiled":
            compiled.zero_grad()
            loss = compiled(ids, labels).loss
            loss.backward()
            return {"loss": loss.detach(), **compiled.full_gradients()}
        rounded = exact if form == "exact" else references[form]
        rounded.zero_grad()
        loss = rounded(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        return {"loss": loss.detach(), **{n: g.clone() for n, g in gradients(rounded).items()}}

    batches = [random_ids(V, 2, 16, seed) for seed in range(32)]
    exact_steps = [step("exact", *batch) for batch in batches]
    errors: dict[str, dict[str, float]] = {}
    for form in ("compiled", *references):
        steps = [step(form, *batch) for batch in batches]
        stacked = {
            name: [torch.stack([one[name].float() for one in many]) for many in (steps, exact_steps)]
            for name in steps[0]
        }
        errors[form] = {name: relative_error(*pair) for name, pair in stacked.items()}
    for name, error in errors.pop("compiled").items():
        assert error <= 1.25 * max(other[name] for other in errors.values()), name


def in_bf16(config: Any, state: dict[str, Tensor], experts: str) -> Any:
    """transformers' model in bf16 with the given weights and rope frequencies in fp32, as from_pretrained does."""
    rounded = theirs(config, experts)
    rounded.load_state_dict(state)
    inverse_frequencies = rounded.model.rotary_emb.inv_freq.clone()
    rounded.to(torch.bfloat16)
    rounded.model.rotary_emb.inv_freq = inverse_frequencies
    return rounded


def test_inductor_equals_transformers() -> None:
    """Given the same choice of experts (uniform routing), Inductor's loss and gradients are eager's."""
    model, reference = twins(olmoe_config(num_key_value_heads=2, num_hidden_layers=1))
    for layer in reference.model.layers:
        layer.mlp.gate.register_forward_hook(uniform_choice)
    ids, labels = random_ids(V, 2, 13)
    compiled = compile_for(model, ids, backend="inductor", force_uniform_routing=True, aux_loss=False)
    out = reference(input_ids=ids, labels=labels, output_router_logits=False)
    out.loss.backward()
    found = compiled(ids, labels)
    found.loss.backward()
    assert relative_error(found.loss, out.loss) <= 1e-5
    assert worst_gradient(compiled, reference)[0] <= 1e-5


def uniform_choice(module: Any, args: Any, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """What ForceUniformRouting makes of a router: token t takes experts (t + j) mod N."""
    logits, _, indices = out
    tokens, top_k = indices.shape
    chosen = (torch.arange(tokens)[:, None] + torch.arange(top_k)) % logits.shape[1]
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, chosen)
    return logits, weights.to(logits.dtype), chosen
