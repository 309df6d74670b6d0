"""ShardedAdamW against torch's AdamW and against a loop written out by hand; clipping, state, errors, memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimus_compiler.runtime import optimizer as optimizer_module
from optimus_compiler.runtime.optimizer import ShardedAdamW
from tests.runtime.flat_model import FlatModel

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "embed": {"embed.weight": (11, 7)},
    "layer.0": {"layer.0.norm.weight": (7,), "layer.0.q.weight": (7, 7), "layer.0.scalar": (1,)},
    "layer.0.experts": {"layer.0.gate_up": (3, 2, 5, 7), "layer.0.down": (3, 7, 5)},
}
SETTINGS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def make_model(dtype: torch.dtype = torch.float32) -> FlatModel:
    generator = torch.Generator().manual_seed(1)
    return FlatModel(
        {
            bucket: {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
            for bucket, shapes in SHAPES.items()
        },
        dtype,
    )


def add_gradients(parameters: dict[str, nn.Parameter], step: int, scale: float = 1.0) -> None:
    """Gradients that depend on the step only, added to what is there."""
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters.values():
        assert parameter.grad is not None
        parameter.grad += scale * torch.randn(parameter.shape, generator=generator).to(parameter.grad.dtype)


def reference_of(model: FlatModel) -> dict[str, nn.Parameter]:
    copies = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in model.named_parameters().items()}
    for copy in copies.values():
        copy.grad = torch.zeros_like(copy)
    return copies


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error <= tolerance, f"relative error {error:.2e}"


@pytest.mark.parametrize("clip_norm", [1.0, 1e6, math.inf])
def test_five_steps_equal_torch_adamw_with_clip_grad_norm(clip_norm: float) -> None:
    model = make_model()
    reference = reference_of(model)
    ours = ShardedAdamW(model, clip_norm=clip_norm, **SETTINGS)
    theirs = torch.optim.AdamW(reference.values(), fused=True, **SETTINGS)
    for step in range(5):
        add_gradients(model.named_parameters(), step)
        add_gradients(reference, step)
        expected_norm = nn.utils.clip_grad_norm_(reference.values(), clip_norm)
        norm = ours.step()
        theirs.step()
        assert norm.dtype == torch.float32
        assert norm.shape == ()
        assert_close(norm, expected_norm)
        ours.zero_grad()
        theirs.zero_grad(set_to_none=False)
        for name, parameter in model.named_parameters().items():
            assert_close(parameter.detach(), reference[name].detach())
    for name, parameter in model.named_parameters().items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert_close(ours.state[parameter][key], theirs.state[reference[name]][key])


def test_no_decay_patterns_equal_torch_param_groups() -> None:
    model = make_model()
    reference = reference_of(model)
    ours = ShardedAdamW(model, no_decay=("*.norm.weight", "*.gate_up", "*scalar"), **SETTINGS)
    exempt = {"layer.0.norm.weight", "layer.0.gate_up", "layer.0.scalar"}
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in reference.items() if name not in exempt]},
        {"params": [p for name, p in reference.items() if name in exempt], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, fused=True, **SETTINGS)
    for step in range(5):
        add_gradients(model.named_parameters(), step, scale=0.01)  # small, so that decay is a large part of the update
        add_gradients(reference, step, scale=0.01)
        nn.utils.clip_grad_norm_(reference.values(), 1.0)
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad(set_to_none=False)
    for name, parameter in model.named_parameters().items():
        assert_close(parameter.detach(), reference[name].detach())


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_bf16_weights_follow_an_fp32_master_written_out_by_hand(reduce_dtype: torch.dtype) -> None:
    model = make_model(torch.bfloat16)
    drawn = {name: p.detach() for name, p in make_model(torch.float32).named_parameters().items()}
    optimizer = ShardedAdamW(model, reduce_dtype=reduce_dtype, **SETTINGS)
    master = {name: value.double() for name, value in drawn.items()}
    first = {name: torch.zeros_like(value) for name, value in master.items()}
    second = {name: torch.zeros_like(value) for name, value in master.items()}
    for step in range(1, 6):
        add_gradients(model.named_parameters(), step)
        gradients = {name: p.grad.double() for name, p in model.named_parameters().items() if p.grad is not None}
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        assert float(optimizer.step()) == pytest.approx(norm, rel=1e-6)
        optimizer.zero_grad()
        for name, gradient in gradients.items():
            clipped = gradient * min(1.0, 1.0 / (norm + 1e-6))
            first[name] = 0.9 * first[name] + 0.1 * clipped
            second[name] = 0.99 * second[name] + 0.01 * clipped**2
            update = (first[name] / (1 - 0.9**step)) / ((second[name] / (1 - 0.99**step)).sqrt() + 1e-8)
            master[name] = master[name] * (1 - 3e-3 * 0.1) - 3e-3 * update
    for name, parameter in model.named_parameters().items():
        assert parameter.grad is not None
        assert parameter.grad.dtype == reduce_dtype
        assert_close(optimizer.state[parameter]["master"], master[name])
        assert torch.equal(parameter, optimizer.state[parameter]["master"].bfloat16())


def test_master_starts_from_the_fp32_draw_not_from_the_rounded_weights() -> None:
    model = make_model(torch.bfloat16)
    optimizer = ShardedAdamW(model, lr=0.0)
    optimizer.step()
    drawn = make_model(torch.float32).named_parameters()
    for name, parameter in model.named_parameters().items():
        assert torch.equal(optimizer.state[parameter]["master"], drawn[name])


def test_clipping_starts_after_the_warmup() -> None:
    model = make_model()
    optimizer = ShardedAdamW(model, lr=1e-3, clip_norm=0.5, clip_after=2)
    parameter = model.named_parameters()["embed.weight"]
    mean = torch.zeros_like(parameter)
    for step in range(4):
        add_gradients(model.named_parameters(), step)
        assert parameter.grad is not None
        gradient = parameter.grad.clone()
        norm = optimizer.step()
        factor = 1.0 if step < 2 else 0.5 / (float(norm) + 1e-6)
        assert float(norm) > 10
        mean = 0.9 * mean + 0.1 * factor * gradient
        assert_close(optimizer.state[parameter]["exp_avg"], mean)
        assert torch.equal(parameter.grad, gradient)  # what the user reads after a step is the true gradient
        optimizer.zero_grad()


def test_norm_given_by_the_caller_is_the_one_that_clips() -> None:
    model = make_model()
    optimizer = ShardedAdamW(model, lr=1e-3)
    add_gradients(model.named_parameters(), 0)
    parameter = model.named_parameters()["embed.weight"]
    assert parameter.grad is not None
    assert float(optimizer.step(gradient_norm=torch.tensor(1e3))) == 1e3
    assert_close(optimizer.state[parameter]["exp_avg"], 0.1 * 1e-3 * parameter.grad)


def test_norm_of_a_long_gradient_does_not_lose_digits() -> None:
    model = FlatModel({"embed": {"embed.weight": torch.zeros(5_000_001)}})
    optimizer = ShardedAdamW(model, lr=1e-3)
    gradient = model.buckets[0].gradients
    gradient[:5_000_001].uniform_(0, 1e-3, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.vector_norm(gradient.double())
    assert float(optimizer.gradient_norm()) == pytest.approx(float(expected), rel=1e-6)


def test_cutting_a_bucket_into_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for chunk in (2**22, 64):
        monkeypatch.setattr(optimizer_module, "_CHUNK", chunk)
        model = make_model()
        optimizer = ShardedAdamW(model, no_decay=("*.down",), **SETTINGS)
        for step in range(3):
            add_gradients(model.named_parameters(), step)
            optimizer.step()
            optimizer.zero_grad()
        weights.append(torch.cat([bucket.weights for bucket in model.buckets]))
    assert_close(weights[1], weights[0])


def test_padding_stays_zero() -> None:
    model = make_model()
    optimizer = ShardedAdamW(model, **SETTINGS)
    for step in range(3):
        add_gradients(model.named_parameters(), step)
        optimizer.step()
    for bucket in model.buckets:
        is_padding = torch.ones_like(bucket.weights, dtype=torch.bool)
        for entry in bucket.entries:
            is_padding[entry.offset : entry.offset + entry.numel] = False
        assert is_padding.any()
        assert not bucket.weights[is_padding].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_round_trip_continues_bitwise(dtype: torch.dtype) -> None:
    straight, resumed = make_model(dtype), make_model(dtype)
    optimizer = ShardedAdamW(straight, clip_after=3, no_decay=("*.norm.weight",), **SETTINGS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for step in range(2):
        add_gradients(straight.named_parameters(), step)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    second = ShardedAdamW(resumed, clip_after=3, no_decay=("*.norm.weight",), **SETTINGS)
    second.load_state_dict(optimizer.state_dict())
    for ours, theirs in zip(resumed.buckets, straight.buckets, strict=True):
        ours.weights.copy_(theirs.weights)
    assert second.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 1e-3
    for step in range(2, 5):
        norms = []
        for model, each in ((straight, optimizer), (resumed, second)):
            add_gradients(model.named_parameters(), step)
            norms.append(each.step())
            each.zero_grad()
        assert torch.equal(*norms)
    for ours, theirs in zip(resumed.buckets, straight.buckets, strict=True):
        assert torch.equal(ours.weights, theirs.weights)


def test_state_dict_is_keyed_by_parameter_name() -> None:
    model = make_model(torch.bfloat16)
    state = ShardedAdamW(model, lr=1e-3).state_dict()
    assert state["state"].keys() == model.named_parameters().keys()
    assert state["param_groups"][0]["params"] == list(model.named_parameters())
    for name, tensors in state["state"].items():
        assert {key: tensor.dtype for key, tensor in tensors.items()} == dict.fromkeys(
            ("exp_avg", "exp_avg_sq", "master"), torch.float32
        )
        assert all(tensor.shape == model.named_parameters()[name].shape for tensor in tensors.values())


def test_state_that_does_not_fit_is_refused_before_anything_changes() -> None:
    optimizer = ShardedAdamW(make_model(), lr=1e-3)
    other_precision = ShardedAdamW(make_model(torch.bfloat16), lr=1e-3).state_dict()
    with pytest.raises(ValueError, match=r"optimizer state of embed.weight has .*master.* another precision"):
        optimizer.load_state_dict(other_precision)
    wrong_shape = ShardedAdamW(FlatModel({"embed": {"embed.weight": torch.ones(11, 7)}}), lr=1e-3).state_dict()
    with pytest.raises(ValueError, match="lacks layer"):
        optimizer.load_state_dict(wrong_shape)
    small = ShardedAdamW(FlatModel({"embed": {"embed.weight": torch.ones(1)}}), lr=1e-3)
    with pytest.raises(ValueError, match=r"exp_avg of embed.weight has shape \(11, 7\) where \(1,\)"):
        small.load_state_dict(wrong_shape)
    with pytest.raises(ValueError, match="another no_decay"):
        ShardedAdamW(make_model(), lr=1e-3, no_decay=("embed*",)).load_state_dict(optimizer.state_dict())
    assert not any(tensor.any() for state in optimizer.state.values() for tensor in state.values())


def test_frozen_parameters_are_left_alone() -> None:
    model = make_model()
    frozen = model.named_parameters()["layer.0.q.weight"]
    frozen.requires_grad_(False)
    before = frozen.clone()
    optimizer = ShardedAdamW(model, **SETTINGS)
    model.buckets[1].gradients.fill_(1.0)
    trainable = sum(p.numel() for p in (model.named_parameters()["layer.0.norm.weight"],)) + 1
    norm = optimizer.step()
    assert torch.equal(frozen, before)
    assert frozen not in optimizer.state
    assert float(norm) == pytest.approx(math.sqrt(trainable), rel=1e-6)


def test_zero_grad_keeps_the_buffers() -> None:
    model = make_model()
    optimizer = ShardedAdamW(model, lr=1e-3)
    gradients = [parameter.grad for parameter in model.named_parameters().values()]
    add_gradients(model.named_parameters(), 0)
    optimizer.zero_grad()
    for parameter, gradient in zip(model.named_parameters().values(), gradients, strict=True):
        assert parameter.grad is gradient
        assert gradient is not None
        assert not gradient.any()
    with pytest.raises(ValueError, match="set_to_none"):
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("replacement", [None, torch.ones(7, 7)])
def test_gradient_cut_off_its_bucket_is_an_error(replacement: Tensor | None) -> None:
    model = make_model()
    optimizer = ShardedAdamW(model, lr=1e-3)
    model.named_parameters()["layer.0.q.weight"].grad = replacement
    with pytest.raises(RuntimeError, match=r"gradient of layer.0.q.weight is no longer a view"):
        optimizer.step()


def test_backward_fills_the_bucket_that_the_step_reads() -> None:
    model = make_model()
    optimizer = ShardedAdamW(model, lr=1e-3, clip_norm=math.inf)
    parameter = model.named_parameters()["embed.weight"]
    (parameter * 2).sum().backward()
    assert float(optimizer.step()) == pytest.approx(2 * math.sqrt(77), rel=1e-6)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("lr", -1.0, "lr is -1.0"),
        ("betas", (0.9, 1.0), "betas is"),
        ("eps", 0.0, "eps is 0.0"),
        ("weight_decay", -0.1, "weight_decay is -0.1"),
        ("clip_norm", 0.0, "clip_norm is 0.0"),
        ("clip_after", -1, "clip_after is -1"),
        ("sharding", "zero3", "sharding is 'zero3'.*epso, so, none"),
        ("zero", 3, "zero is 3"),
        ("reduce_dtype", torch.float16, "reduce_dtype is torch.float16"),
        ("no_decay", ("*.bias",), r"no_decay pattern '\*.bias' matches no parameter"),
    ],
)
def test_bad_setting_is_refused(setting: str, value: object, message: str) -> None:
    settings: dict[str, Any] = {"lr": 1e-3, setting: value}
    with pytest.raises(ValueError, match=message):
        ShardedAdamW(make_model(), **settings)


@pytest.mark.parametrize("sharding", ["epso", "so", "none"])
@pytest.mark.parametrize("zero", [1, 2])
def test_sharding_makes_no_difference_in_one_process(sharding: str, zero: int) -> None:
    weights = []
    for each in (("epso", 1), (sharding, zero)):
        model = make_model()
        optimizer = ShardedAdamW(model, lr=1e-3, sharding=each[0], zero=each[1])
        add_gradients(model.named_parameters(), 0)
        optimizer.step()
        weights.append(torch.cat([bucket.weights for bucket in model.buckets]))
    assert torch.equal(*weights)


def test_memory_report_counts_the_tensors() -> None:
    model = FlatModel({"a": {"w": torch.ones(64, 64)}, "b": {"v": torch.ones(32)}}, torch.bfloat16)
    report = ShardedAdamW(model, lr=1e-3, reduce_dtype=torch.bfloat16).memory_report()
    assert report.parameters == 64 * 64 + 32
    assert report.total == report.formula == 16 * (64 * 64 + 32)
    first = report.buckets[0]
    assert (first.weights, first.gradients, first.master, first.moments) == (8192, 8192, 16384, 32768)
    text = str(report)
    assert text.splitlines()[1].split() == ["a", "4,096", "1", "8,192", "8,192", "16,384", "32,768", "65,536"]
    assert "16.00 bytes a parameter; the rule gives 66,048 bytes" in text


def test_memory_report_of_fp32_has_no_master() -> None:
    report = ShardedAdamW(FlatModel({"a": {"w": torch.ones(32)}}), lr=1e-3).memory_report()
    assert (report.buckets[0].master, report.total) == (0, 16 * 32)
