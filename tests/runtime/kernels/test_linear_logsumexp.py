"""linear_logsumexp against plain cross entropy: values, gradients, pieces of every size, sharded vocabulary, bf16."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from optimus_compiler.runtime.kernels import linear_logsumexp, linear_logsumexp_backward
from tests.runtime.kernels.naive import relative_error

module = importlib.import_module("optimus_compiler.runtime.kernels.linear_logsumexp")


def make_head(
    T: int = 13, H: int = 10, V: int = 37, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(T + V)
    x_TH, w_VH = (torch.randn(n, H, generator=generator, dtype=torch.float64).to(dtype) for n in (T, V))
    return x_TH.requires_grad_(), w_VH.requires_grad_(), torch.randint(0, V, (T,), generator=generator)


def cross_entropy(x_TH: Tensor, w_VH: Tensor, target_T: Tensor) -> Tensor:
    """Mean over the targets that are not -100, as F.cross_entropy."""
    lse_T, logit_T = linear_logsumexp(x_TH, w_VH, target_T)
    return (lse_T - logit_T).where(target_T >= 0, 0).sum() / (target_T >= 0).sum()


@pytest.mark.parametrize("piece", [1, 37, 50, 481, 2**24], ids=lambda piece: f"piece of {piece}")
@pytest.mark.parametrize("ignored", [0, 4])
def test_equals_cross_entropy(piece: int, ignored: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One logit at a time, one token, a piece that divides nothing, all at once."""
    monkeypatch.setattr(module, "PIECE", piece)
    x_TH, w_VH, target_T = make_head()
    target_T[:ignored] = -100
    loss = cross_entropy(x_TH, w_VH, target_T)
    expected = F.cross_entropy(x_TH.double() @ w_VH.double().T, target_T)
    assert relative_error(loss, expected) < 1e-6
    computed = torch.autograd.grad(loss, (x_TH, w_VH))
    for a, b in zip(computed, torch.autograd.grad(expected, (x_TH, w_VH)), strict=True):
        assert relative_error(a, b) < 1e-6


def test_large_logits_do_not_overflow() -> None:
    x_TH, w_VH, target_T = make_head()
    lse_T, _ = linear_logsumexp(1e4 * x_TH, w_VH, target_T)
    assert relative_error(lse_T, (1e4 * x_TH.double() @ w_VH.double().T).logsumexp(1)) < 1e-6
    assert torch.autograd.grad(lse_T.sum(), w_VH)[0].isfinite().all()


def test_a_target_outside_has_logit_zero_and_only_the_lse_gradient() -> None:
    x_TH, w_VH, _ = make_head(T=3)
    lse_T, logit_T = linear_logsumexp(x_TH, w_VH, torch.tensor([-100, 37, 5]))
    assert logit_T[:2].tolist() == [0, 0]
    assert relative_error(logit_T[2], x_TH[2].double() @ w_VH[5].double()) < 1e-6
    dx_TH, _ = torch.autograd.grad((3 * lse_T + 100 * logit_T).sum(), (x_TH, w_VH))
    expected_TH = 3 * (x_TH @ w_VH.T).softmax(1) @ w_VH
    assert relative_error(dx_TH[:2], expected_TH[:2]) < 1e-6
    assert relative_error(dx_TH[2], expected_TH[2] + 100 * w_VH[5]) < 1e-6


@pytest.mark.parametrize("output", [0, 1], ids=["lse", "logit"])
def test_one_output_alone_can_be_differentiated(output: int) -> None:
    x_TH, w_VH, target_T = make_head()
    z_TV = x_TH @ w_VH.T
    expected_T = (z_TV.logsumexp(1), z_TV.gather(1, target_T[:, None])[:, 0])[output]
    computed = torch.autograd.grad(linear_logsumexp(x_TH, w_VH, target_T)[output].sum(), (x_TH, w_VH))
    for a, b in zip(computed, torch.autograd.grad(expected_T.sum(), (x_TH, w_VH)), strict=True):
        assert relative_error(a, b) < 1e-6


def test_vocabulary_shards_combine_outside() -> None:
    x_TH, w_VH, target_T = make_head()
    lses, logits = zip(*(linear_logsumexp(x_TH, w_VH[a:b], target_T - a) for a, b in ((0, 20), (20, 37))), strict=True)
    loss = (torch.stack(lses).logsumexp(0) - sum(logits)).mean()
    expected = F.cross_entropy(x_TH @ w_VH.T, target_T)
    assert relative_error(loss, expected) < 1e-6
    computed = torch.autograd.grad(loss, (x_TH, w_VH))
    for a, b in zip(computed, torch.autograd.grad(expected, (x_TH, w_VH)), strict=True):
        assert relative_error(a, b) < 1e-6


def test_bf16_is_at_least_as_exact_as_plain_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 64 * 100)  # several pieces, so that the sums between them are seen
    x_TH, w_VH, target_T = make_head(T=300, H=64, V=500, dtype=torch.bfloat16)
    x_TH, w_VH = (0.3 * x_TH).detach().requires_grad_(), w_VH
    exact = F.cross_entropy(x_TH.double() @ w_VH.double().T, target_T)
    plain = F.cross_entropy((x_TH @ w_VH.T).float(), target_T)
    ours = cross_entropy(x_TH, w_VH, target_T)
    assert ours.dtype == torch.float32
    expected = (exact, *torch.autograd.grad(exact, (x_TH, w_VH)))
    theirs = (plain, *torch.autograd.grad(plain, (x_TH, w_VH)))
    computed = (ours, *torch.autograd.grad(ours, (x_TH, w_VH)))
    for a, b, right in zip(computed, theirs, expected, strict=True):
        assert relative_error(a, right) <= 1.25 * relative_error(b, right)


def test_gradcheck_opcheck_and_compile() -> None:
    x_TH, w_VH, target_T = make_head(T=4, H=3, V=5, dtype=torch.float64)
    torch.autograd.gradcheck(lambda x, w: linear_logsumexp(x, w, target_T), (x_TH, w_VH))
    x_TH, w_VH, target_T = make_head()
    torch.library.opcheck(linear_logsumexp, (x_TH, w_VH, target_T))
    lse_T = linear_logsumexp(x_TH, w_VH, target_T)[0].detach()
    torch.library.opcheck(linear_logsumexp_backward, (lse_T, lse_T, x_TH.detach(), w_VH.detach(), target_T, lse_T))
    compiled = torch.compile(cross_entropy, backend="aot_eager", fullgraph=True)
    loss, eager = compiled(x_TH, w_VH, target_T), cross_entropy(x_TH, w_VH, target_T)
    assert torch.equal(loss, eager)
    for a, b in zip(torch.autograd.grad(loss, (x_TH, w_VH)), torch.autograd.grad(eager, (x_TH, w_VH)), strict=True):
        assert torch.equal(a, b)


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    x_TH, w_VH, target_T = make_head()
    with pytest.raises(ValueError, match=r"w \(37, 10\) torch\.bfloat16"):
        linear_logsumexp(x_TH, w_VH.bfloat16(), target_T)
    with pytest.raises(ValueError, match=r"target \(12,\)"):
        linear_logsumexp(x_TH, w_VH, target_T[1:])
