"""FuseLoss: the chunked loss equals cross entropy, within the limit nothing changes, other losses are left alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from optimus_compiler.passes import FuseLoss, PassPipeline
from tests.passes.small import operations, rand, run, small_program

T, H, V = 11, 8, 40
X, W = rand(T, H), rand(V, H, seed=1)
TARGET = torch.randint(0, V, (T,), generator=torch.Generator().manual_seed(2))
TARGET[3:6] = -100


def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float().view(-1, V), target)


def test_loss_and_gradients_equal_cross_entropy() -> None:
    program = small_program(loss, X, W, TARGET)
    (report,) = PassPipeline((FuseLoss(logits_limit=0),)).run(program)
    assert report.matches == 1
    assert "linear.default" not in operations(program)
    assert "optimus.linear_logsumexp.default" in operations(program)
    results = []
    for function in (loss, lambda *a: program.segments[0].graph(*a)[0]):
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        value = function(x, w, TARGET)
        results.append((value, *torch.autograd.grad(value, (x, w))))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_logits_within_the_limit_are_left_alone() -> None:
    program = small_program(loss, X, W, TARGET)
    key = program.segments[0].key
    (report,) = PassPipeline((FuseLoss(logits_limit=4 * T * V),)).run(program)
    assert report.matches == 0
    assert "within the limit" in report.notes[0]
    assert program.segments[0].key == key
    program = small_program(loss, X, W, TARGET)
    assert PassPipeline((FuseLoss(logits_limit=4 * T * V - 1),)).run(program)[0].matches == 1


def test_logits_that_somebody_else_reads_stay() -> None:
    program = small_program(lambda x, w, t: (loss(x, w, t), F.linear(x, w)), X, W, TARGET)
    PassPipeline((FuseLoss(logits_limit=0),)).run(program)
    assert torch.equal(run(program, X, W, TARGET)[1], F.linear(X, W))


@pytest.mark.parametrize("options", [{"reduction": "sum"}, {"label_smoothing": 0.1}])
def test_other_losses_are_left_alone(options: dict[str, Any]) -> None:
    program = small_program(lambda x, w, t: F.cross_entropy(F.linear(x, w), t, **options), X, W, TARGET)
    before = run(program, X, W, TARGET)[0]
    (report,) = PassPipeline((FuseLoss(logits_limit=0),)).run(program)
    assert (report.matches, report.notes) == (0, ("the loss is not a plain mean over linear logits",))
    assert torch.equal(run(program, X, W, TARGET)[0], before)


def test_another_ignored_label() -> None:
    target = TARGET.clone()
    target[target == -100] = 7
    program = small_program(lambda x, w, t: F.cross_entropy(F.linear(x, w), t, ignore_index=7), X, W, target)
    before = run(program, X, W, target)[0]
    assert PassPipeline((FuseLoss(logits_limit=0),)).run(program)[0].matches == 1
    torch.testing.assert_close(run(program, X, W, target)[0], before)
