"""WidenProducts: bf16 products run in fp32 where the machine has none of its own, and only there."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from optimus_compiler.passes import PassPipeline, WidenProducts, widen_products
from tests.passes.small import operations, rand, run, small_program

PIPELINE = PassPipeline((WidenProducts(smallest=0),))
X, W, B = (
    rand(6, 8, dtype=torch.bfloat16),
    rand(5, 8, seed=1, dtype=torch.bfloat16),
    rand(5, seed=2, dtype=torch.bfloat16),
)


@pytest.fixture
def no_bf16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that multiplies bf16 in fp32, whatever this one does."""
    monkeypatch.setattr(
        widen_products, "matmul_dtype", lambda x: torch.float32 if x.dtype == torch.bfloat16 else x.dtype
    )


def test_a_product_is_computed_in_fp32_and_rounded_once(no_bf16_products: None) -> None:
    program = small_program(lambda x, w, b: F.linear(x, w, b).relu(), X, W, B)
    assert PIPELINE.run(program)[0].matches == 1
    assert operations(program) == ["to.dtype"] * 3 + ["linear.default", "to.dtype", "relu.default"]
    expected = F.linear(X.float(), W.float(), B.float()).bfloat16().relu()
    assert torch.equal(run(program, X, W, B)[0], expected)


def test_gradients_are_bf16_and_no_further_from_fp32(no_bf16_products: None) -> None:
    program = small_program(lambda x, w: F.linear(x, w), X, W)
    PIPELINE.run(program)
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    gradients = torch.autograd.grad(program.segments[0].graph(x, w)[0].float().square().sum(), (x, w))
    exact_x, exact_w = X.float().requires_grad_(), W.float().requires_grad_()
    exact = torch.autograd.grad(F.linear(exact_x, exact_w).square().sum(), (exact_x, exact_w))
    for found, expected in zip(gradients, exact, strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


def test_attention_keeps_its_options(no_bf16_products: None) -> None:
    q = rand(1, 2, 4, 8, dtype=torch.bfloat16)

    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.5)

    program = small_program(attend, q)
    assert PIPELINE.run(program)[0].matches == 1
    assert torch.equal(run(program, q)[0], attend(q.float()).bfloat16())


def test_small_products_are_left_alone(no_bf16_products: None) -> None:
    products = [
        (F.linear, X, W, 6 * 8 * 5),
        (torch.matmul, X, W.t().contiguous(), 6 * 8 * 5),
        (lambda q, k: F.scaled_dot_product_attention(q, k, k), X.view(1, 1, 6, 8), W.view(1, 1, 5, 8), 6 * 8 * 5),
    ]
    for function, a, b, count in products:
        for smallest, matches in ((count, 1), (count + 1, 0)):
            program = small_program(function, a, b)
            assert PassPipeline((WidenProducts(smallest=smallest),)).run(program)[0].matches == matches


def test_fp32_and_machines_with_bf16_products_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widen_products, "matmul_dtype", lambda x: x.dtype)
    for dtype in (torch.bfloat16, torch.float32):
        program = small_program(F.linear, X.to(dtype), W.to(dtype))
        key = program.segments[0].key
        assert PIPELINE.run(program)[0].matches == 0
        assert program.segments[0].key == key
