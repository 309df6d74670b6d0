"""recycled_empty: memory comes back when the last holder lets go, and not before."""

import importlib
from collections import defaultdict

import pytest
import torch

from optimus_compiler.runtime.kernels.recycle import recycled_empty

module = importlib.import_module("optimus_compiler.runtime.kernels.recycle")


@pytest.fixture(autouse=True)
def recycle_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALLEST", 0)
    monkeypatch.setattr(module, "_free", defaultdict(list))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shape_dtype_and_layout(dtype: torch.dtype) -> None:
    tensor = recycled_empty((7, 5, 3), dtype)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((7, 5, 3), dtype, True)


def test_memory_returns_when_the_last_view_dies() -> None:
    tensor = recycled_empty((4, 6), torch.float32).fill_(1)
    address = tensor.data_ptr()
    view = tensor[2]
    del tensor
    other = recycled_empty((4, 6), torch.float32).fill_(2)
    assert other.data_ptr() != address
    assert view.tolist() == [1] * 6
    del view
    assert recycled_empty((4, 6), torch.float32).data_ptr() == address


def test_a_gradient_kept_by_autograd_is_not_overwritten() -> None:
    class Fill(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, w: torch.Tensor, value: float) -> torch.Tensor:
            ctx.value = value  # type: ignore[attr-defined]
            return w.sum()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
            return recycled_empty((8,), torch.float32).fill_(ctx.value), None  # type: ignore[attr-defined]

    a, b = torch.zeros(8, requires_grad=True), torch.zeros(8, requires_grad=True)
    for _ in range(3):
        Fill.apply(a, 1.0).backward()
        Fill.apply(b, 10.0).backward()
    assert (a.grad.tolist(), b.grad.tolist()) == ([3.0] * 8, [30.0] * 8)  # type: ignore[union-attr]


def test_only_a_few_free_blocks_are_kept() -> None:
    tensors = [recycled_empty((16,), torch.float32) for _ in range(5)]
    del tensors
    assert [len(blocks) for blocks in module._free.values()] == [2]
