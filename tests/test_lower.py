"""lower: how torch's private compilers behave where we rely on them."""

import pytest
import torch

import optimus_compiler as optimus
from optimus_compiler.lower import Backend, gradient_marks, lower
from optimus_compiler.program import Program
from tests.models.twins import olmoe_config, ours
from tests.parity import random_ids
from tests.passes.small import rand, small_program

X, W = rand(5, 4), rand(6, 4, seed=1)


def linear_program() -> Program:
    return small_program(lambda w, x: torch.nn.functional.linear(x, w).relu(), W, X)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_lowered_segment_computes_and_differentiates_as_the_graph(backend: Backend) -> None:
    program = linear_program()
    function = lower(program.segments[0], (True, True), backend)
    for seed in (2, 3):  # twice: the second call finds what the first compiled
        w, x = rand(6, 4, seed=seed).requires_grad_(), rand(5, 4, seed=seed + 9).requires_grad_()
        (found,), expected = function(w, x), torch.nn.functional.linear(x, w).relu()
        torch.testing.assert_close(found, expected)
        gradients = torch.autograd.grad(found.square().sum(), (w, x))
        for a, b in zip(gradients, torch.autograd.grad(expected.square().sum(), (w, x)), strict=True):
            torch.testing.assert_close(a, b)


def test_a_missing_mark_loses_a_gradient_silently() -> None:
    """The behaviour of AOTAutograd that makes gradient_marks and the first-call check necessary."""
    function = lower(linear_program().segments[0], (True, False), "aot_eager")
    w, x = W.clone().requires_grad_(), X.clone().requires_grad_()
    function(w, x)[0].sum().backward()
    assert w.grad is not None
    assert x.grad is None or not x.grad.any()


def test_the_first_call_refuses_a_missing_mark() -> None:
    ids, labels = random_ids(97, 1, 8)
    compiled = optimus.compile(ours(olmoe_config()), sequence_length=8, backend="eager")
    executor = compiled._executor
    executor._marks = {graph: (False,) * len(marks) for graph, marks in executor._marks.items()}
    with pytest.raises(
        RuntimeError, match=r"model.embed_tokens.weight needs a gradient, and the embed was compiled without"
    ):
        compiled(ids, labels)


def test_marks_follow_what_autograd_does() -> None:
    program = optimus.compile(ours(olmoe_config()), sequence_length=8, backend="eager").program
    marks = gradient_marks(program)
    by_kind = {segment.kind: segment for segment in program.segments}
    layer, head = by_kind["layer"], by_kind["head"]
    values = dict(zip((*layer.parameters, *layer.inputs), marks[id(layer.graph)], strict=True))
    assert all(values[name] for name in layer.parameters)
    # hidden states and the sum of probabilities carry gradients; rope tables, counts and validity do not
    assert sum(values[name] for name in layer.inputs) == 2
    reads = dict(zip((*head.parameters, *head.inputs), marks[id(head.graph)], strict=True))
    assert not reads["labels"]
    assert sum(reads[name] for name in head.inputs) == 2


def test_functions_do_not_grow_with_depth() -> None:
    counts = set()
    for layers in (1, 4):
        ids, labels = random_ids(97, 1, 8)
        compiled = optimus.compile(ours(olmoe_config(num_hidden_layers=layers)), sequence_length=8, backend="aot_eager")
        compiled.train_step(ids, labels)
        counts.add(len(compiled._executor._functions))
    assert counts == {3}  # embed, layer, head


def test_gradients_arrive_layer_by_layer() -> None:
    """A parameter's accumulate hook fires when its own layer's backward ends, last layer first."""
    ids, labels = random_ids(97, 1, 8)
    compiled = optimus.compile(ours(olmoe_config(num_hidden_layers=4)), sequence_length=8, backend="aot_eager")
    order: list[str] = []
    for bucket in compiled.buckets:
        for entry in bucket.entries:
            entry.parameter.register_post_accumulate_grad_hook(lambda _, name=bucket.name: order.append(name))
    compiled.train_step(ids, labels)
    first = list(dict.fromkeys(name.split(".")[0] for name in order))
    assert first == ["head", "layer3", "layer2", "layer1", "embed+layer0"]
