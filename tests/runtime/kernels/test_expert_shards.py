"""Experts divided over ranks: the ranks' partial outputs and gradients add up to those of one rank (case 4).

What expert parallelism relies on: each rank sees all tokens, owns a slice of the experts, and sums with the others.
"""

import pytest
import torch
from torch import Tensor

from optimus_compiler.runtime.kernels import Kernels, grouped_mlp, index_tokens, reduce_outputs, use_kernels

T, H, WIDTH, E, K = 13, 10, 6, 8, 3


def one_rank(x: Tensor, weights: Tensor, indices: Tensor, gate_up: Tensor, down: Tensor, first: int) -> Tensor:
    token_R, row_TK, offsets_E, _ = index_tokens(indices, torch.tensor(first), len(down))
    y_RH, _ = grouped_mlp(x, weights, gate_up, down, token_R, row_TK, offsets_E)
    return reduce_outputs(y_RH, row_TK, token_R)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_partial_results_of_all_ranks_add_up(ranks: int, kernels: Kernels) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((T, H), (T, K), (E, 2, WIDTH, H), (E, H, WIDTH))
    x, weights, gate_up, down = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    indices = torch.rand(T, E, generator=generator)
    indices[:, : E // ranks] = -1  # the first rank's experts are chosen by nobody
    indices = indices.topk(K if ranks < 8 else 2, dim=-1).indices
    indices = torch.nn.functional.pad(indices, (0, K - indices.shape[1]), value=E)  # a choice that is no expert
    dout = torch.randn(T, H, generator=generator)
    with use_kernels(kernels):
        whole = one_rank(x, weights, indices, gate_up, down, 0)
        expected = torch.autograd.grad(whole, (x, weights, gate_up, down), dout)
        own = E // ranks
        parts = []
        for rank in range(ranks):
            mine = slice(rank * own, (rank + 1) * own)
            out = one_rank(x, weights, indices, gate_up[mine], down[mine], rank * own)
            parts.append((out, *torch.autograd.grad(out, (x, weights, gate_up, down), dout)))
    assert not parts[0][0].any()  # a rank without a token takes part, with zeros
    for found, wanted in zip(map(sum, zip(*parts, strict=True)), (whole, *expected), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
