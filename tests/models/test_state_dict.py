"""Checkpoints: transformers 5's stacked experts, the published per-expert names, tied embeddings, initial weights."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from optimus_compiler.models import build
from tests.models.twins import batch, olmo_config, olmoe_config, ours, theirs, twins


def published(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict under the names of published checkpoints, in an order that is not the experts'."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in reversed(state.items()):
        if name.endswith("experts.gate_up_proj"):
            for i in reversed(range(len(tensor))):
                gate, up = tensor[i].chunk(2)
                stem = name.removesuffix("gate_up_proj")
                renamed |= {f"{stem}{i}.gate_proj.weight": gate, f"{stem}{i}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            renamed |= {f"{stem}{i}.down_proj.weight": tensor[i] for i in reversed(range(len(tensor)))}
        else:
            renamed[name] = tensor
    return renamed


@pytest.mark.parametrize("config", [olmoe_config(attention_bias=True), olmo_config(attention_bias=True)])
def test_names_shapes_and_order_are_transformers(config) -> None:  # type: ignore[no-untyped-def]
    model, reference = build(config), theirs(config)
    assert [(n, p.shape) for n, p in model.named_parameters()] == [
        (n, p.shape) for n, p in reference.named_parameters()
    ]
    assert model.state_dict().keys() == reference.state_dict().keys()


@pytest.mark.parametrize("config", [olmoe_config(), olmo_config(), olmoe_config(tie_word_embeddings=True)])
def test_weights_go_to_transformers_and_back(config) -> None:  # type: ignore[no-untyped-def]
    _, reference = twins(config)
    model = build(config)
    model.load_state_dict(reference.state_dict())
    ids, labels = batch()
    torch.testing.assert_close(
        model(ids, labels=labels).loss, reference(ids, labels=labels, use_cache=False).loss, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 16, "intermediate_size": 16, "num_experts": 16}])
def test_published_names_load(sizes: dict[str, int]) -> None:
    """Square sizes too: there a transposed matrix or a swapped gate and up would fit."""
    source = ours(olmoe_config(**sizes))
    names = published(source.state_dict())
    target = build(olmoe_config(**sizes))
    target.load_state_dict(names)
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name
    assert "model.layers.1.mlp.experts.5.up_proj.weight" in names, "the caller's dict is not consumed"


def test_published_names_load_as_transformers_loads_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    source = ours(olmoe_config())
    tensors = {name: tensor.contiguous() for name, tensor in published(source.state_dict()).items()}
    safetensors.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    hf_config = theirs(olmoe_config()).config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    reference = transformers.OlmoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(source.state_dict()[name], tensor), name


def test_published_names_load_onto_the_meta_device() -> None:
    source = ours(olmoe_config())
    with torch.device("meta"):
        target = build(olmoe_config())
    target.load_state_dict(published(source.state_dict()), assign=True)
    ids, _ = batch()
    assert torch.equal(target.train()(ids).logits, source(ids).logits)


@pytest.mark.parametrize("strict", [True, False])
def test_a_missing_expert_is_named(strict: bool) -> None:
    names = published(ours(olmoe_config()).state_dict())
    del names["model.layers.1.mlp.experts.4.up_proj.weight"]
    message = "lacks model.layers.1.mlp.experts.4.up_proj.weight (1 of the 18 matrices of model.layers.1.mlp.experts)"
    with pytest.raises(ValueError, match=re.escape(message)):
        build(olmoe_config()).load_state_dict(names, strict=strict)


def test_experts_beyond_the_configuration_are_refused() -> None:
    names = published(ours(olmoe_config(num_experts=7)).state_dict())
    for layer in range(2):
        gate = f"model.layers.{layer}.mlp.gate.weight"
        names[gate] = names[gate][:6]
    with pytest.raises(RuntimeError, match=r"Unexpected key.*experts\.6\.down_proj\.weight"):
        build(olmoe_config(num_experts=6)).load_state_dict(names)


@pytest.mark.parametrize("make_config", [olmo_config, olmoe_config])
def test_tied_embeddings(make_config) -> None:  # type: ignore[no-untyped-def]
    model = ours(make_config(tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    state = model.state_dict()
    del state["lm_head.weight"]  # as published: the shared tensor is stored once
    target = build(make_config(tie_word_embeddings=True))
    target.load_state_dict(state)
    assert torch.equal(target.lm_head.weight, model.lm_head.weight)
    assert target.lm_head.weight is target.model.embed_tokens.weight

    untied = ours(make_config()).state_dict()
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        build(make_config(tie_word_embeddings=True)).load_state_dict(untied)


def test_initial_weights_are_those_of_transformers() -> None:
    """Matrices, the router's too, are normal with the configured deviation; norms one, biases and padding zero."""
    config = olmoe_config(vocab_size=512, hidden_size=64, attention_bias=True, initializer_range=0.05)
    torch.manual_seed(0)
    model, reference = build(config), theirs(config)
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        if parameter.dim() == 1:
            assert torch.equal(parameter, expected), name
        else:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.12), name
            assert expected.std().item() == pytest.approx(0.05, rel=0.12), name
    assert (model.model.embed_tokens.weight[1] == 0).all()
    assert (model.model.embed_tokens.weight[2] != 0).all()
