"""capture and cut: one graph cut into the right segments, the model left as it was, and errors that name the module."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimus_compiler as optimus
from tests.models.twins import olmo_config, olmoe_config, ours, theirs


def captured(model: Any, **options: Any) -> optimus.Program:
    return optimus.capture(model, **{"sequence_length": 8, "micro_batch_size": 2, **options})


@pytest.mark.parametrize("form", ["ours", "transformers"])
def test_segments_of_a_sparse_model(form: str) -> None:
    config = olmoe_config(num_hidden_layers=3)
    program = captured(ours(config) if form == "ours" else theirs(config))
    assert [s.kind for s in program.segments] == ["const", "embed", "layer", "layer", "layer", "head"]
    assert len({s.key for s in program.segments}) == len(program.groups()) == 4
    assert program.verify() == []
    assert program.inputs == ("input_ids", "labels", "valid")
    assert set(program.outputs) == {"loss", "ce_loss", "aux_loss", "expert_counts", "logits"}
    layers = [s for s in program.segments if s.kind == "layer"]
    for before, after in pairwise(layers):
        # hidden states and the two router statistics are all that a layer hands on
        assert len(before.outputs) == 3
        assert set(before.outputs) <= set(after.inputs)
    assert layers[0].parameters[0] == "model.layers.0.input_layernorm.weight"
    assert set(program.parameters) == {name for name, _ in ours(config).named_parameters()}
    roles = {name: spec.role for name, spec in program.parameters.items()}
    assert {name for name, role in roles.items() if role == "expert"} == {
        f"model.layers.{i}.mlp.experts.{p}" for i in range(3) for p in ("gate_up_proj", "down_proj")
    }


def test_segments_of_a_dense_model() -> None:
    program = captured(ours(olmo_config(num_hidden_layers=3, tie_word_embeddings=True)))
    assert [s.kind for s in program.segments] == ["const", "embed", "layer", "layer", "layer", "head"]
    assert len(program.groups()) == 4
    assert set(program.outputs) == {"loss", "ce_loss", "aux_loss", "logits"}
    assert program.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "model.embed_tokens.weight" in program.segments[1].parameters
    assert "model.embed_tokens.weight" in program.segments[-1].parameters


def test_distinct_segments_do_not_depend_on_depth_nor_on_experts() -> None:
    shallow, deep = (captured(ours(olmoe_config(num_hidden_layers=n, num_experts=e))) for n, e in ((1, 4), (5, 9)))
    assert len(shallow.groups()) == len(deep.groups()) == 4
    sizes = [[len(group[0].graph.graph.nodes) for group in program.groups()] for program in (shallow, deep)]
    assert sizes[0] == sizes[1]


def test_the_model_is_left_as_it_was() -> None:
    model = theirs(olmoe_config(), "batched_mm").eval()
    model.config._attn_implementation = "eager"
    before = {name: (parameter.data_ptr(), parameter.clone()) for name, parameter in model.named_parameters()}
    captured(model)
    assert not model.training
    assert not any(module.training for module in model.modules())
    assert (model.config._experts_implementation, model.config._attn_implementation) == ("batched_mm", "eager")
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == before[name][0]
        assert torch.equal(parameter, before[name][1])


@pytest.mark.parametrize("form", ["ours", "transformers"])
def test_a_model_on_meta_gives_the_same_program(form: str) -> None:
    make = ours if form == "ours" else theirs
    with torch.device("meta"):
        on_meta = make(olmoe_config())
    real, meta = captured(make(olmoe_config())), captured(on_meta)
    assert [s.key for s in real.segments] == [s.key for s in meta.segments]
    values = real.constant_values()
    assert values
    for name, value in meta.constant_values().items():
        assert torch.equal(value, values[name])  # rope tables too, though transformers keeps their source in a buffer
    assert all(parameter.is_meta for parameter in on_meta.parameters())


class Breaks(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        if float(x.sum()) > 1e30:
            return x
        return self.inner(x)


def test_what_cannot_be_captured_names_the_module_and_the_cause() -> None:
    model: Any = ours(olmoe_config())
    model.model.layers[1].mlp = Breaks(model.model.layers[1].mlp)
    with pytest.raises(
        optimus.CaptureError, match=r"model.layers.1.mlp \(Breaks\) cannot be captured: .*[Dd]ata-dependent"
    ):
        captured(model)


def test_a_parameter_that_takes_no_part_is_an_error() -> None:
    model: Any = ours(olmoe_config())
    model.model.layers[0].extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(optimus.CaptureError, match=r"parameter model.layers.0.extra takes no part"):
        captured(model)
    model.model.layers[0].extra.requires_grad_(False)
    assert "model.layers.0.extra" not in captured(model).parameters


def test_a_frozen_parameter_is_not_trainable() -> None:
    model: Any = ours(olmoe_config())
    model.model.embed_tokens.weight.requires_grad_(False)
    compiled = optimus.compile(model, sequence_length=8, backend="eager")
    ids = torch.arange(8)[None]
    compiled.train_step(ids, ids.clone())
    assert "model.embed_tokens.weight" not in compiled.full_gradients()
    assert "model.embed_tokens.weight" in compiled.full_state_dict()


class Remembers(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.get_buffer("calls").add_(1)
        return self.inner(x)


class Noisy(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x + torch.rand_like(x))


@pytest.mark.parametrize(
    ("kind", "message"), [(Remembers, r"writes to .*calls"), (Noisy, r"layers\.0\.mlp draws random numbers")]
)
def test_state_and_randomness_are_refused(kind: Any, message: str) -> None:
    model: Any = ours(olmo_config())
    model.model.layers[0].mlp = kind(model.model.layers[0].mlp)
    with pytest.raises(optimus.CaptureError, match=message):
        captured(model)


def test_a_model_without_a_list_of_layers_is_one_function_and_says_so() -> None:
    model: Any = ours(olmoe_config())
    model.model.blocks, model.model.layers = model.model.layers, None
    model.model.forward = _over_blocks.__get__(model.model)
    compiled = optimus.compile(model, sequence_length=8, backend="eager")
    assert "the model is one function" in compiled.explain()
    ids = torch.arange(8)[None]
    expected = model(input_ids=ids, labels=ids.clone(), output_router_logits=True).loss
    torch.testing.assert_close(compiled(ids, ids.clone()).loss, expected)


def _over_blocks(self: Any, ids: Tensor, attention_mask: Any, position_ids: Any) -> Any:
    x = self.embed_tokens(ids)
    rope = self.rotary_emb(torch.arange(ids.shape[1])[None], x.dtype)
    router_logits = []
    for block in self.blocks:
        x, logits = block(x, rope, None)
        router_logits.append(logits)
    return self.norm(x), tuple(router_logits)


class Dropped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.dropout = inner, nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.inner(x))


def test_dropout_is_refused() -> None:
    model: Any = ours(olmo_config())
    model.model.layers[0].mlp = Dropped(model.model.layers[0].mlp)
    with pytest.raises(optimus.CaptureError, match=r"model.layers.0.mlp.dropout has dropout 0.1"):
        captured(model)
