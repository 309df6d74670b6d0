"""index_tokens: the worked example, a naive loop on random routings, bounded rows, adversarial shapes, limits."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from optimus_compiler.runtime.kernels import index_tokens, use_kernels
from optimus_compiler.runtime.kernels.index_tokens import Tables, index_tokens_cpu, index_tokens_reference

Index = Callable[[Tensor, Tensor | None, int, int], Tables]
both = pytest.mark.parametrize("index", [index_tokens_reference, index_tokens_cpu], ids=["reference", "cpu"])

# Tokens 0..3 of a model with 4 experts choose 2 each. Written out by hand, expert by expert:
#   expert 0: tokens 1, 2      expert 1: tokens 0, 1, 3      expert 2: token 3      expert 3: tokens 0, 2
CHOICES = torch.tensor([[1, 3], [0, 1], [3, 0], [1, 2]])


def naive_index(
    indices_TK: Tensor, first: int, num_experts: int, num_rows: int
) -> tuple[list[int], list[list[int]], list[int], int]:
    token_R: list[int] = []
    offsets_E: list[int] = []
    needed = 0
    row_TK = [[-1] * indices_TK.shape[1] for _ in indices_TK]
    for expert in range(first, first + num_experts):
        for t, experts in enumerate(indices_TK.tolist()):
            for k, chosen in enumerate(experts):
                needed += chosen == expert
                if chosen == expert and len(token_R) < num_rows:
                    row_TK[t][k] = len(token_R)
                    token_R.append(t)
        offsets_E.append(len(token_R))
    return token_R + [0] * (num_rows - len(token_R)), row_TK, offsets_E, needed


def lists(tables: Tables) -> tuple[list[int], list[list[int]], list[int], int]:
    token_R, row_TK, offsets_E, needed = tables
    return token_R.tolist(), row_TK.tolist(), offsets_E.tolist(), int(needed)


@both
def test_worked_example_on_one_rank(index: Index) -> None:
    tables = index(CHOICES, None, 4, 8)
    assert lists(tables) == ([1, 2, 0, 1, 3, 3, 0, 2], [[2, 6], [0, 3], [7, 1], [4, 5]], [2, 5, 6, 8], 8)
    assert [table.dtype for table in tables] == [torch.int64, torch.int64, torch.int32, torch.int64]


@both
def test_worked_example_on_two_expert_parallel_ranks(index: Index) -> None:
    token_R, row_TK, offsets_E, needed = lists(index(CHOICES, torch.tensor(0), 2, 8))
    assert token_R == [1, 2, 0, 1, 3, 0, 0, 0]
    assert row_TK == [[2, -1], [0, 3], [-1, 1], [4, -1]]
    assert (offsets_E, needed) == ([2, 5], 5)
    token_R, row_TK, offsets_E, needed = lists(index(CHOICES, torch.tensor(2), 2, 8))
    assert token_R == [3, 0, 2, 0, 0, 0, 0, 0]
    assert row_TK == [[-1, 1], [-1, -1], [2, -1], [-1, 0]]
    assert (offsets_E, needed) == ([1, 3], 3)


@both
def test_worked_example_with_fewer_rows_than_needed(index: Index) -> None:
    """Rows 4 (token 3 at expert 1) and up do not exist."""
    token_R, row_TK, offsets_E, needed = lists(index(CHOICES, None, 4, 4))
    assert token_R == [1, 2, 0, 1]
    assert row_TK == [[2, -1], [0, 3], [-1, 1], [-1, -1]]
    assert (offsets_E, needed) == ([2, 4, 4, 4], 8)


@both
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_equals_a_naive_loop(index: Index, data: st.DataObject) -> None:
    """Any T (8 divides it or not), K and number of rows, one expert chosen twice by a token, experts nobody chose,
    foreign experts, -1."""
    T, K, total = data.draw(st.integers(0, 19)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7))
    choices = data.draw(st.lists(st.integers(-1, total - 1), min_size=T * K, max_size=T * K))
    first, num_experts = data.draw(st.integers(0, total)), data.draw(st.integers(1, total))
    num_rows = data.draw(st.integers(0, T * K))
    indices_TK = torch.tensor(choices, dtype=torch.int64).view(T, K)
    found = lists(index(indices_TK, torch.tensor(first), num_experts, num_rows))
    assert found == naive_index(indices_TK, first, num_experts, num_rows)


@both
@pytest.mark.parametrize("num_rows", [5003 * 8, 5000])
def test_large_inputs_keep_the_order(num_rows: int, index: Index) -> None:
    """Past 32,768 elements torch sorts integers by another algorithm."""
    indices_TK = torch.randint(0, 64, (5003, 8), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    found = lists(index(indices_TK, torch.tensor(16), 32, num_rows))
    assert found == naive_index(indices_TK, 16, 32, num_rows)


def test_the_operator_dispatches_and_passes_opcheck() -> None:
    for choice in ("reference", "cpu"):
        with use_kernels(choice):
            assert index_tokens(CHOICES, None, 4)[0].tolist() == [1, 2, 0, 1, 3, 3, 0, 2]
            torch.library.opcheck(index_tokens, (CHOICES, None, 4))
            torch.library.opcheck(index_tokens, (CHOICES, torch.tensor(2), 2, 3))


def test_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"indices must be \[tokens, choices\], got shape \(8,\)"):
        index_tokens(torch.zeros(8, dtype=torch.int64), None, 4)


@pytest.mark.parametrize("num_rows", [-1, 9])
def test_an_impossible_number_of_rows_is_refused(num_rows: int) -> None:
    with pytest.raises(ValueError, match=f"num_rows is {num_rows}: must be between 0 and 8"):
        index_tokens(CHOICES, None, 4, num_rows)


def test_rows_beyond_int32_offsets_are_refused_without_allocating() -> None:
    with FakeTensorMode():
        token_R, row_TK, _, _ = index_tokens(torch.empty(2**28 - 1, 8, dtype=torch.int64), None, 4)
        assert (token_R.shape, row_TK.shape) == ((2**31 - 8,), (2**28 - 1, 8))
        with pytest.raises(ValueError, match="2147483648 rows do not fit int32 offsets"):
            index_tokens(torch.empty(2**28, 8, dtype=torch.int64), None, 4)
        assert index_tokens(torch.empty(2**28, 8, dtype=torch.int64), None, 4, 2**20)[0].shape == (2**20,)
