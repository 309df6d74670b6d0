"""Counting, numbering and summing rows on Triton: bit for bit the reference."""

import pytest
import torch

from optimus_compiler.runtime.kernels import index_tokens, reduce_outputs, use_kernels
from tests.runtime.kernels.naive import poisoned, relative_error
from tests.runtime.kernels.triton.device import DEVICE

# tokens, choices, experts in all
SIZES = [(1, 1, 1), (7, 2, 5), (8, 1, 4), (9, 3, 3), (33, 8, 64), (40, 5, 16), (16, 2, 300)]


def routing(tokens: int, choices: int, experts: int, skewed: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, experts, generator=generator)
    if skewed:
        scores += torch.arange(experts) * 0.5
    return scores.topk(choices).indices.to(DEVICE)


@pytest.mark.parametrize("skewed", [False, True], ids=["balanced", "skewed"])
@pytest.mark.parametrize(("tokens", "choices", "experts"), SIZES)
def test_index_tokens(tokens: int, choices: int, experts: int, skewed: bool) -> None:
    """All experts, the second half of them, and row buffers that are too small."""
    indices_TK = routing(tokens, choices, experts, skewed)
    half, rows = experts // 2, tokens * choices
    cases = [(None, experts, rows), (half, experts - half, rows), (None, experts, rows * 2 // 3), (half, 1, 0)]
    for first, local, R in cases:
        first_expert = None if first is None else torch.tensor(first, device=DEVICE)
        with poisoned():
            found = index_tokens(indices_TK, first_expert, local, R)
        with use_kernels("reference"):
            expected = index_tokens(indices_TK, first_expert, local, R)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


def test_indices_of_any_integer_type_layout_and_value() -> None:
    wild_TK = torch.tensor([[-1, 3], [7, 2], [2**40, 0], [1, -(2**40)]], device=DEVICE)
    for indices_TK in (wild_TK, wild_TK[:2].int(), wild_TK.T, wild_TK[:0]):
        found = index_tokens(indices_TK, None, 4)
        with use_kernels("reference"):
            expected = index_tokens(indices_TK, None, 4)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("width", [1, 30, 64, 2500])
def test_sum_rows(width: int, dtype: torch.dtype) -> None:
    """In the order of k, rounded once, rows of -1 skipped, rows that no token has not read."""
    generator = torch.Generator().manual_seed(0)
    y_RH = torch.randn(60, width, generator=generator) * torch.logspace(-6, 3, 60)[:, None]
    row_TK = torch.randperm(60, generator=generator)[:32].view(8, 4)
    y_RH[~torch.isin(torch.arange(60), row_TK)] = float("nan")
    row_TK = row_TK.masked_fill(torch.arange(32).view(8, 4) % 5 == 0, -1).to(DEVICE)
    y_RH = y_RH.to(DEVICE, dtype)
    token_R = torch.zeros(60, dtype=torch.int64, device=DEVICE)
    found = reduce_outputs(y_RH, row_TK, token_R)
    with use_kernels("reference"):
        expected = reduce_outputs(y_RH.nan_to_num(), row_TK, token_R)
    assert found.dtype == dtype
    assert torch.equal(found, expected)
    assert relative_error(found, expected) == 0


def test_rows_past_two_to_the_31_elements_are_summed() -> None:
    """The pages of a huge empty tensor take no memory until they are touched."""
    y_RH = torch.empty(2**20 + 2, 2048, dtype=torch.float16, device=DEVICE)
    y_RH[-2:] = torch.tensor([[1.0], [2.0]])
    row_TK = torch.tensor([[2**20, 2**20 + 1], [2**20 + 1, -1]], device=DEVICE)
    out_TH = reduce_outputs(y_RH, row_TK, torch.zeros(1, dtype=torch.int64, device=DEVICE))
    assert torch.equal(out_TH.cpu(), torch.tensor([[3.0], [2.0]]).expand(2, 2048).half())
