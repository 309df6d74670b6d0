"""Row buffers of fewer than T * K rows: exact where the local rows fit, safe where they do not."""

import pytest
import torch
from torch import Tensor

from optimus_compiler.runtime.kernels import Kernels, grouped_mlp, index_tokens, reduce_outputs, use_kernels
from tests.runtime.kernels.naive import NAMES, Block, gradients, make_block, naive_moe, poisoned, relative_error

both = pytest.mark.parametrize("kernels", ["reference", "cpu"])
T, K, E, N = 17, 3, 4, 8  # this rank owns experts 2 to 5 of 8


def run(block: Block, num_rows: int | None) -> tuple[Tensor, Tensor]:
    """(y_TH, needed)."""
    token_R, row_TK, offsets_E, needed = index_tokens(block.indices_TK, torch.tensor(2), E, num_rows)
    y_RH, _ = grouped_mlp(*block.differentiable, token_R, row_TK, offsets_E)
    assert len(y_RH) == len(token_R) == (T * K if num_rows is None else num_rows)
    return reduce_outputs(y_RH, row_TK, token_R), needed


def routed_block(dtype: torch.dtype = torch.float32) -> Block:
    scores_TN = torch.rand(T, N, generator=torch.Generator().manual_seed(1))
    return make_block(T=T, K=K, E=E, H=12, width=5, dtype=dtype, indices_TK=scores_TN.topk(K).indices)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("spare", [0, 1, 7])
def test_bounded_equals_exact_where_the_rows_fit(spare: int, dtype: torch.dtype, kernels: Kernels) -> None:
    block = routed_block(dtype)
    with use_kernels(kernels), poisoned():
        exact, needed = run(block, None)
        assert needed + spare < T * K
        bounded, needed_again = run(block, int(needed) + spare)
        assert needed_again == needed
        assert torch.equal(bounded, exact)
        for name, a, b in zip(NAMES, gradients(bounded, block), gradients(exact, block), strict=True):
            assert torch.equal(a, b), name


@both
@pytest.mark.parametrize("num_rows", [0, 1, 9, 20])
def test_a_bound_below_need_keeps_the_first_rows(num_rows: int, kernels: Kernels) -> None:
    """As if the choices of the missing rows had named a foreign expert."""
    block = routed_block()
    _, row_TK, _, needed = index_tokens(block.indices_TK, torch.tensor(2), E)
    kept = block._replace(indices_TK=block.indices_TK.masked_fill(row_TK >= num_rows, -1))
    expected = naive_moe(kept, 2)
    with use_kernels(kernels), poisoned():
        y_TH, said = run(block, num_rows)
        assert said == needed > num_rows
        assert relative_error(y_TH, expected) < 1e-6
        for name, a, b in zip(NAMES, gradients(y_TH, block), gradients(expected, kept), strict=True):
            assert a.isfinite().all(), name
            assert relative_error(a, b) < 1e-6, name


@both
@pytest.mark.parametrize("num_rows", [0, 5, T * K])
def test_all_choices_foreign(num_rows: int, kernels: Kernels) -> None:
    block = routed_block()
    foreign = torch.arange(T * K).remainder(2).mul(N + 1).sub(1).view(T, K)  # -1 and N
    block = block._replace(indices_TK=foreign)
    with use_kernels(kernels), poisoned():
        y_TH, needed = run(block, num_rows)
        assert needed == 0
        assert not y_TH.any()
        assert not any(gradient.any() for gradient in gradients(y_TH, block))


@both
@pytest.mark.parametrize("num_rows", [4, T * K])
def test_one_expert_takes_everything(num_rows: int, kernels: Kernels) -> None:
    block = routed_block()._replace(indices_TK=torch.full((T, K), 3))
    kept = block._replace(indices_TK=block.indices_TK.where(torch.arange(T * K).view(T, K) < num_rows, -1))
    expected = naive_moe(kept, 2)
    with use_kernels(kernels), poisoned():
        y_TH, needed = run(block, num_rows)
        assert needed == T * K
        assert relative_error(y_TH, expected) < 1e-6
        for name, a, b in zip(NAMES, gradients(y_TH, block), gradients(expected, kept), strict=True):
            assert relative_error(a, b) < 1e-6, name


@both
def test_bounded_rows_compile_to_the_same(kernels: Kernels) -> None:
    block = routed_block()
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    with use_kernels(kernels):
        (y_TH, needed), (eager_TH, eager_needed) = compiled(block, 9), run(block, 9)
        assert needed == eager_needed > 9
        assert torch.equal(y_TH, eager_TH)
        for a, b in zip(gradients(y_TH, block), gradients(eager_TH, block), strict=True):
            assert torch.equal(a, b)
