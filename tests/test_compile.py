"""compile and CompiledModel: padding, micro-batches, weights, the self-check, and what is refused."""

import copy
from typing import Any

import pytest
import torch

import optimus_compiler as optimus
from optimus_compiler.lower import Backend
from optimus_compiler.micro_batches import padded
from optimus_compiler.passes import Canonicalise
from tests.models.twins import SIZES, olmoe_config, ours, relative_error, twins
from tests.parity import assert_parity, compile_for, random_ids, worst_gradient
from tests.v4_block import with_v4_blocks

V = SIZES["vocab_size"]


def test_a_shorter_batch_is_padded_and_cut() -> None:
    """Loss, auxiliary loss and gradients are those of the short batch, although the model has no attention mask."""
    model, reference = twins(olmoe_config())
    compiled = compile_for(model, random_ids(V, 3, 16)[0])
    short_ids, short_labels = random_ids(V, 2, 5)
    assert_parity(compiled, reference, short_ids, short_labels)
    logits = compiled(short_ids).logits
    assert logits.shape == (2, 5, V)
    assert relative_error(logits, reference(input_ids=short_ids).logits) <= 1e-5


def test_train_step_is_the_mean_over_micro_batches() -> None:
    model, reference = twins(olmoe_config())
    ids, labels = random_ids(V, 6, 8)
    compiled = optimus.compile(model, sequence_length=8, micro_batch_size=2, micro_batches=3, backend="aot_eager")
    step = compiled.train_step(ids, labels)
    reference.zero_grad()
    losses = []
    for first in (0, 2, 4):
        out = reference(input_ids=ids[first : first + 2], labels=labels[first : first + 2], output_router_logits=True)
        (out.loss / 3).backward()
        losses.append(out.loss.detach())
    assert relative_error(step.loss, torch.stack(losses).mean()) <= 1e-6
    assert worst_gradient(compiled, reference)[0] <= 1e-5
    before = [bucket.gradients.clone() for bucket in compiled.buckets]
    assert relative_error(compiled.eval_step(ids, labels).loss, step.loss) <= 1e-6
    assert all(torch.equal(a, bucket.gradients) for a, bucket in zip(before, compiled.buckets, strict=True))


@pytest.mark.parametrize("first", ["eval_step", "no_grad", "inference_mode"])
def test_evaluating_first_does_not_spoil_training(first: str) -> None:
    model, reference = twins(olmoe_config())
    ids, labels = random_ids(V, 2, 8)
    compiled = compile_for(model, ids)
    if first == "eval_step":
        compiled.eval_step(ids, labels)
    else:
        with torch.no_grad() if first == "no_grad" else torch.inference_mode():
            assert not compiled(ids, labels, return_logits=True).logits.requires_grad
    assert_parity(compiled, reference, ids, labels)
    expected = torch.autograd.grad(reference(input_ids=ids).logits.sum(), reference.lm_head.weight)[0]
    found = torch.autograd.grad(compiled(ids).logits.sum(), compiled.get_parameter("lm_head.weight"))[0]
    assert relative_error(found, expected) <= 1e-5


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_inputs_of_another_dtype_or_layout_are_the_same_inputs(backend: Backend) -> None:
    """Compiled code reads memory as it was captured: inputs are brought to that form or refused."""
    model = ours(olmoe_config(num_hidden_layers=1))
    ids, labels = random_ids(V, 2, 8)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    compiled = compile_for(model, ids, {"attention_mask": mask}, backend=backend)
    expected = compiled(ids, labels, attention_mask=mask).loss
    for variant in (mask.bool(), mask.int(), mask.t().contiguous().t()):
        given = padded({"input_ids": ids.int(), "attention_mask": variant}, compiled.program, compiled.device)
        assert all(value.is_contiguous() for value in given.values())
        assert given["input_ids"].dtype == given["attention_mask"].dtype == torch.int64
        assert torch.equal(compiled(ids, labels, attention_mask=variant).loss, expected)
    assert torch.equal(compiled(ids.int(), labels.t().contiguous().t(), attention_mask=mask).loss, expected)
    with pytest.raises(ValueError, match=r"attention_mask is torch\.float32: give integers"):
        compiled(ids, labels, attention_mask=mask.float())


def test_the_original_and_the_compiled_model_share_no_memory() -> None:
    model: Any = ours(olmoe_config())
    model.model.embed_tokens.weight.requires_grad_(False)
    ids, labels = random_ids(V, 2, 8)
    compiled = compile_for(model, ids, backend="eager")
    before = compiled(ids, labels).loss
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert torch.equal(compiled(ids, labels).loss, before)
    compiled.load_state_dict({name: torch.zeros_like(value) for name, value in compiled.state_dict().items()})
    assert model.model.embed_tokens.weight.abs().sum() > 0


def test_weights_stay_in_their_buckets() -> None:
    ids, labels = random_ids(V, 2, 8)
    compiled = compile_for(ours(olmoe_config()), ids, backend="eager")
    with pytest.raises(RuntimeError, match="cast or move the model before compile"):
        compiled.to(torch.bfloat16)
    compiled.train_step(ids, labels)
    compiled.zero_grad()
    assert not any(bucket.gradients.any() for bucket in compiled.buckets)
    compiled.train_step(ids, labels)
    assert all(bucket.gradients.any() for bucket in compiled.buckets)


def test_partly_frozen_experts_are_refused() -> None:
    """v4 experts are stored as one parameter, which is trainable or not."""
    model: Any = ours(olmoe_config())
    model = with_v4_blocks(model)
    model.model.layers[0].mlp.experts[0].requires_grad_(False)
    with pytest.raises(optimus.PassError, match="freeze all or none"):
        compile_for(model, random_ids(V, 2, 8)[0])


def test_aux_loss_can_be_dropped() -> None:
    model = ours(olmoe_config())
    ids, labels = random_ids(V, 2, 8)
    out = compile_for(model, ids, aux_loss=False)(ids, labels)
    assert float(out.aux_loss) == 0.0
    assert relative_error(out.loss, model(input_ids=ids, labels=labels, output_router_logits=False).loss) <= 1e-6


def test_state_dict_round_trip_and_what_it_refuses() -> None:
    config = olmoe_config()
    ids, labels = random_ids(V, 2, 8)
    first, second = ours(config, seed=1), ours(config, seed=2)
    compiled = compile_for(first, ids, backend="eager")
    assert all(torch.equal(value, first.state_dict()[name]) for name, value in compiled.full_state_dict().items())
    compiled.load_state_dict(second.state_dict())
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in compiled.full_state_dict().items())
    expected = second(input_ids=ids, labels=labels, output_router_logits=False).loss
    assert relative_error(compiled(ids, labels).ce_loss, expected) <= 1e-6
    short = dict(second.state_dict())
    del short["model.norm.weight"]
    with pytest.raises(ValueError, match=r"lacks \['model.norm.weight'\]"):
        compiled.load_state_dict(short)
    with pytest.raises(ValueError, match="has unknown"):
        compiled.load_state_dict({**second.state_dict(), "surplus": torch.zeros(1)})
    wrong = {**second.state_dict(), "model.norm.weight": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(3,\)"):
        compiled.load_state_dict(wrong)


def test_a_seed_draws_the_weights_of_a_model_on_meta() -> None:
    config = olmoe_config()
    ids = random_ids(V, 2, 8)[0]
    with torch.device("meta"):
        on_meta = ours(config)
    compiled = compile_for(on_meta, ids, backend="eager", seed=3)
    again = compile_for(ours(config), ids, backend="eager", seed=3)
    for name, value in compiled.full_state_dict().items():
        assert torch.equal(value, again.full_state_dict()[name])
    embedding = compiled.full_state_dict()["model.embed_tokens.weight"]
    assert abs(float(embedding.std()) / config.initializer_range - 1) < 0.05
    assert torch.equal(compiled.full_state_dict()["model.norm.weight"], torch.ones(24))
    rounded = compile_for(ours(config).to(torch.bfloat16), ids, backend="eager", seed=3)
    for bucket, exact in zip(rounded.buckets, compiled.buckets, strict=True):
        drawn = rounded.fp32_weights(bucket, 0, bucket.weights.numel())
        for entry, exact_entry in zip(bucket.entries, exact.entries, strict=True):
            assert torch.equal(entry.view(drawn), exact_entry.view(exact.weights))
    with pytest.raises(ValueError, match="give compile a seed"):
        compile_for(on_meta, ids)


def test_check_accepts_the_right_program_and_refuses_a_wrong_one() -> None:
    ids, labels = random_ids(V, 2, 8)
    for dtype in (torch.float32, torch.bfloat16):
        compile_for(ours(olmoe_config()).to(dtype), ids, check=True).train_step(ids, labels)
    without_aux = compile_for(ours(olmoe_config()), ids, check=True, aux_loss=False)
    without_aux.eval_step(ids, labels)
    without_aux(ids, torch.full_like(labels, -100))  # no label counts: both losses are NaN
    compiled = compile_for(ours(olmoe_config()), ids, check=True, force_uniform_routing=True)
    for _ in range(2):  # it does not train on after a refusal
        with pytest.raises(optimus.CheckError, match="differs from the original module's"):
            compiled.train_step(ids, labels)


def test_gradients_of_bf16_weights_can_be_kept_in_fp32() -> None:
    model = ours(olmoe_config()).to(torch.bfloat16)
    ids, labels = random_ids(V, 2, 8)
    compiled = compile_for(model, ids)
    for bucket in compiled.buckets:
        bucket.set_gradient_dtype(torch.float32)
    pointers = {name: p.grad.data_ptr() for name, p in compiled.named_parameters() if p.grad is not None}
    compiled.train_step(ids, labels)
    once = [bucket.gradients.clone() for bucket in compiled.buckets]
    compiled.train_step(ids, labels)
    assert all(bucket.gradients.dtype == torch.float32 for bucket in compiled.buckets)
    assert all(torch.equal(bucket.gradients, 2 * a) for bucket, a in zip(compiled.buckets, once, strict=True))
    assert pointers == {name: p.grad.data_ptr() for name, p in compiled.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": ("labels", "input_ids")}, "must begin with"),
        ({"inputs": ("input_ids", "labels", "token_type_ids")}, "may also take attention_mask"),
        ({"micro_batches": 0}, "must be at least 1"),
        ({"backend": "Inductor"}, "backend='Inductor' is unknown: choose one of inductor, aot_eager, eager"),
        ({"kernels": "fast"}, "kernels='fast' is unknown"),
        ({"passes": [Canonicalise()]}, "passes is a list: give PassPipeline"),
    ],
)
def test_compile_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimus.compile(ours(olmoe_config()), sequence_length=8, **options)


def test_calls_refuse_what_was_not_compiled() -> None:
    ids, labels = random_ids(V, 2, 8)
    compiled = compile_for(ours(olmoe_config()), ids, backend="eager")
    with pytest.raises(ValueError, match="attention_mask was not declared"):
        compiled(ids, labels, attention_mask=torch.ones_like(ids))
    with pytest.raises(ValueError, match=r"input_ids has shape \(2, 9\)"):
        compiled(*random_ids(V, 2, 9))
    with pytest.raises(ValueError, match="a step takes"):
        compiled.train_step(*random_ids(V, 1, 8))
    with pytest.raises(ValueError, match="labels has shape"):
        compiled(ids, labels[:, :4])


def test_a_lost_gradient_is_an_error() -> None:
    """A backend that drops a parameter's gradient is found at the end of the first backward."""
    ids, labels = random_ids(V, 2, 8)
    compiled = compile_for(ours(olmoe_config()), ids, backend="eager")
    step = compiled._executor._schedule(0, ("loss", "ce_loss", "aux_loss", "expert_counts"), True)[-1]
    step.parameters = [parameter.detach() for parameter in step.parameters]
    with pytest.raises(RuntimeError, match=r"2 parameters got no gradient, lm_head\.weight among them"):
        compiled.train_step(ids, labels)


def test_weights_loaded_after_the_optimizer_was_made_are_kept() -> None:
    """bf16: a step works on fp32 masters, which must follow the weights that were loaded."""
    ids, labels = random_ids(V, 2, 8)
    compiled = compile_for(ours(olmoe_config()).bfloat16(), ids, backend="eager", seed=0)
    optimizer = optimus.ShardedAdamW(compiled, lr=1e-4, weight_decay=0.0)
    for number in (1, 2):
        loaded = ours(olmoe_config(), seed=number).bfloat16().state_dict()
        compiled.load_state_dict(loaded)
        compiled.train_step(ids, labels)
        optimizer.step()
        optimizer.zero_grad()
        for name, value in compiled.full_state_dict().items():
            assert (value.float() - loaded[name].float()).abs().max() <= 1e-3 + 2**-7 * loaded[name].abs().max(), name


@pytest.mark.parametrize("weights_first", [True, False])
def test_weights_and_state_are_restored_in_either_order(weights_first: bool) -> None:
    """bf16 weights are rounded masters: loading both continues bit by bit, whichever comes last."""
    ids, labels = random_ids(V, 2, 8)
    compiled = compile_for(ours(olmoe_config()).bfloat16(), ids, backend="eager", seed=0)
    optimizer = optimus.ShardedAdamW(compiled, lr=1e-3)

    def step() -> dict[str, torch.Tensor]:
        compiled.train_step(ids, labels)
        optimizer.step()
        optimizer.zero_grad()
        return compiled.full_state_dict()

    weights, state = step(), copy.deepcopy(optimizer.state_dict())
    expected = [step(), step()]
    restore = [lambda: compiled.load_state_dict(weights), lambda: optimizer.load_state_dict(state)]
    for load in restore if weights_first else reversed(restore):
        load()
    for wanted in expected:
        found = step()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
