"""The experts' gradients are added to the buckets by backward itself: values, memory, and that nothing goes missing."""

from typing import Any

import pytest
import torch
from torch import Tensor

import optimus_compiler as optimus
from optimus_compiler import executor
from optimus_compiler.lower import Backend
from optimus_compiler.models import build, from_name
from tests.models.twins import SIZES, olmoe_config, ours
from tests.parity import compile_for, random_ids
from tests.peak_memory import peak_of

V = SIZES["vocab_size"]
backends = pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_in_place_or_returned_the_gradients_are_the_same(backend: Backend, dtype: torch.dtype) -> None:
    ids, labels = random_ids(V, 2, 8)
    compiled = compile_for(ours(olmoe_config()).to(dtype), ids, backend=backend)
    compiled(ids, labels).loss.backward()
    experts = {name for name in dict(compiled.named_parameters()) if ".experts." in name}
    assert compiled.added_in_place() == experts
    in_place = {name: p.grad.clone() for name, p in compiled.named_parameters() if p.grad is not None}
    for parameter in compiled.parameters():
        parameter.grad = None
    compiled(ids, labels).loss.backward()
    assert compiled.added_in_place() == set()
    for name, parameter in compiled.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, in_place[name]), name


@backends
def test_backward_allocates_no_table_of_experts(backend: Backend) -> None:
    """64 experts of 96 KiB: the tables take 6 MiB a layer, all else far less; two layers, so a copy would be seen."""
    config = from_name("olmoe-tiny", vocab_size=64, num_hidden_layers=2, num_experts=64, hidden_size=64,
                       intermediate_size=128, num_attention_heads=2)  # fmt: skip
    compiled = optimus.compile(build(config), sequence_length=16, backend=backend, seed=0)
    ids = torch.randint(0, 64, (1, 16))
    compiled.train_step(ids, ids)
    table = 64 * 3 * 64 * 128 * 4
    assert peak_of(lambda: compiled.train_step(ids, ids)) < table / 4


def test_several_forwards_before_their_backwards() -> None:
    """As in a pipeline: another micro-batch writes to the buffers between this one's forward and backward."""
    ids, labels = random_ids(V, 4, 8)
    compiled = compile_for(ours(olmoe_config()), ids[:2], backend="aot_eager")
    losses = [compiled(ids[i : i + 2], labels[i : i + 2]).loss for i in (0, 2)]
    for loss in losses:
        loss.backward()
    together = [bucket.gradients.clone() for bucket in compiled.buckets]
    compiled.zero_grad()
    for i in (0, 2):
        compiled(ids[i : i + 2], labels[i : i + 2]).loss.backward()
    for one, other in zip(together, compiled.buckets, strict=True):
        assert torch.equal(one, other.gradients)


def test_a_gradient_that_is_never_written_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = executor.add_gradient_buffers

    def forgetful(segment: Any, buffers: dict[str, Tensor]) -> tuple[str, ...]:
        """Gives the buffers to the segment and not to the op."""
        names = real(segment, buffers)
        for node in segment.graph.graph.find_nodes(op="call_function", target=torch.ops.optimus.grouped_mlp.default):
            node.args = node.args[:7]
        segment.graph.recompile()
        return names

    monkeypatch.setattr(executor, "add_gradient_buffers", forgetful)
    ids, labels = random_ids(V, 2, 8)
    compiled = compile_for(ours(olmoe_config()), ids, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"parameters got no gradient, model.layers.0.mlp.experts"):
        compiled(ids, labels).loss.backward()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_no_activation_is_kept_twice(backend: Backend) -> None:
    """Between forward and backward no two storages hold the same values, those that are there anyway not counted.

    (The backend "eager" runs the model's graph as it was captured: router and auxiliary loss each take a softmax.)
    """
    ids, labels = random_ids(V, 3, 16)
    compiled = compile_for(ours(olmoe_config()), ids, backend=backend)
    compiled(ids, labels).loss.backward()
    there = {bucket.weights.untyped_storage().data_ptr() for bucket in compiled.buckets}
    there |= {bucket.gradients.untyped_storage().data_ptr() for bucket in compiled.buckets}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in there and tensor.numel() >= ids.numel():
            kept.setdefault(storage, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = compiled(ids, labels).loss
    tensors = list(kept.values())
    assert len(tensors) > 20
    for index, one in enumerate(tensors):
        for other in tensors[:index]:
            same = one.dtype == other.dtype and one.numel() == other.numel()
            if same and one.unique().numel() > 2:
                assert not torch.equal(one.flatten(), other.flatten()), (one.shape, other.shape)
    loss.backward()
