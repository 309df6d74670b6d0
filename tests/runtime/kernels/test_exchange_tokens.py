"""plan_exchange, send_tokens, return_tokens: ranks that exchange rows compute what one process computes, bit by bit.

Four processes run every case once, as one group of 4 and as a group of 2; the tests compare their results with the
fused block on all tokens and all experts.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode

from optimus_compiler.runtime.kernels import (
    grouped_mlp,
    index_tokens,
    moe,
    plan_exchange,
    reduce_outputs,
    return_tokens,
    send_tokens,
)
from tests.ranks import Ranks
from tests.runtime.kernels.naive import NAMES, Block, gradients, make_block, output_gradient, poisoned, relative_error

K, N, H, WIDTH = 3, 8, 16, 8


class Case(NamedTuple):
    tokens: tuple[int, ...] = (9, 9, 9, 9)  # of each rank; the first two for a group of 2
    routing: str = "random"
    num_rows: int | None = None  # None: as many as can arrive
    dtype: torch.dtype = torch.float32
    weights_dtype: torch.dtype = torch.float32
    compiled: bool = False  # by aot_eager


CASES = {
    "random": Case(),
    "random, compiled": Case(compiled=True),
    "random, fp64 weights": Case(weights_dtype=torch.float64),
    "random, bf16": Case(dtype=torch.bfloat16, weights_dtype=torch.bfloat16),
    "random, bf16, fp32 weights": Case(dtype=torch.bfloat16),
    "one rank gets everything": Case(routing="first experts"),
    "a rank without tokens": Case(tokens=(7, 0, 5, 9)),
    "a rank whose tokens choose nobody": Case(routing="rank 1 nobody"),
    "nobody sends": Case(routing="nobody"),
    "some choices are no expert": Case(routing="some nobody"),
    "rows overflow": Case(num_rows=20),
    "rows overflow, bf16, compiled": Case(num_rows=20, dtype=torch.bfloat16, compiled=True),
    "rows overflow on one rank": Case(routing="first experts", num_rows=30),
    "no room for any row": Case(num_rows=0),
}


def whole_block(case: Case, ep: int) -> Block:
    """All ranks' tokens and all experts."""
    tokens = case.tokens[:ep]
    block = make_block(sum(tokens), K, N, H, WIDTH, dtype=case.dtype, weights_dtype=case.weights_dtype)
    indices_TK = block.indices_TK
    rank_T1 = torch.repeat_interleave(torch.arange(ep), torch.tensor(tokens))[:, None]
    match case.routing:
        case "first experts":
            indices_TK = indices_TK % 2
        case "rank 1 nobody":
            indices_TK = indices_TK.where(rank_T1 != 1, -1)
        case "nobody":
            indices_TK = indices_TK + N
        case "some nobody":
            indices_TK = indices_TK.masked_fill(indices_TK % 3 == 0, -1).masked_fill(indices_TK == 5, N)
    return block._replace(indices_TK=indices_TK)


def rows_needed(case: Case, ep: int) -> tuple[list[int], Tensor]:
    """How many rows each rank receives, and the mask [T, K] of the choices whose row has no room there."""
    indices_TK = whole_block(case, ep).indices_TK
    source = [rank for rank in range(ep) for _ in range(case.tokens[rank])]
    arriving: list[list[tuple[int, ...]]] = [[] for _ in range(ep)]
    for t, experts in enumerate(indices_TK.tolist()):
        for k, expert in enumerate(experts):
            if 0 <= expert < N:
                arriving[expert * ep // N].append((source[t], expert, t, k))
    dropped_TK = torch.zeros(indices_TK.shape, dtype=torch.bool)
    for rows in arriving:
        for *_, t, k in sorted(rows)[case.num_rows :] if case.num_rows is not None else []:
            dropped_TK[t, k] = True
    return [len(rows) for rows in arriving], dropped_TK


def exchanged_moe(
    block: Block, first_expert: Tensor, num_rows: int, ep: int, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(y_SH, x_RH, needed) of one rank: its tokens, its experts, all ranks' numbering."""
    x_SH, weights_SK, gate_up_E2IH, down_EHI, indices_SK = block
    token_P, row_SK, counts, indices_R1, needed = plan_exchange(indices_SK, N, num_rows, ep, group)
    x_RH, weights_R1 = send_tokens(x_SH, weights_SK, token_P, row_SK, counts, num_rows, group)
    token_R, row_R1, offsets_E, _ = index_tokens(indices_R1, first_expert, N // ep, num_rows)
    y_RH, _ = grouped_mlp(x_RH, weights_R1, gate_up_E2IH, down_EHI, token_R, row_R1, offsets_E)
    y_SH = return_tokens(reduce_outputs(y_RH, row_R1, token_R), token_P, row_SK, counts, group)
    return y_SH, x_RH, needed


def run_rank(case: Case, rank: int, ep: int, group: str) -> dict[str, Any]:
    block = whole_block(case, ep)
    start = sum(case.tokens[:rank])
    own_T, own_N = slice(start, start + case.tokens[rank]), slice(rank * N // ep, (rank + 1) * N // ep)
    parts = (block.x_TH[own_T], block.weights_TK[own_T], block.gate_up_E2IH[own_N], block.down_EHI[own_N])
    x_SH, weights_SK, gate_up_E2IH, down_EHI = (part.detach().clone().requires_grad_() for part in parts)
    local = Block(x_SH, weights_SK, gate_up_E2IH, down_EHI, block.indices_TK[own_T])
    num_rows = sum(case.tokens[:ep]) * K if case.num_rows is None else case.num_rows
    run = torch.compile(exchanged_moe, backend="aot_eager", fullgraph=True) if case.compiled else exchanged_moe
    with poisoned():
        y_SH, x_RH, needed = run(local, torch.tensor(own_N.start), num_rows, ep, group)
        dy_SH = output_gradient(block.x_TH.shape)[own_T].to(y_SH.dtype)
        gradients = torch.autograd.grad(y_SH, local.differentiable, dy_SH)
    return {
        "y": y_SH.detach(),
        "needed": int(needed),
        "spare rows": x_RH[int(needed) :].detach(),
        **dict(zip(NAMES, gradients, strict=True)),
    }


def run_all_cases() -> dict[tuple[int, str], dict[str, Any]]:
    """On each of four ranks."""
    rank, pair = dist.get_rank(), dist.new_group([0, 1])
    assert dist.group.WORLD is not None
    groups = {4: dist.group.WORLD} | ({2: pair} if rank < 2 else {})
    return {
        (ep, name): run_rank(case, rank, ep, group.group_name)
        for ep, group in groups.items()
        for name, case in CASES.items()
    }


@pytest.fixture(scope="module")
def results(ranks: Ranks) -> list[dict[tuple[int, str], dict[str, Any]]]:
    """By rank, then by (ranks in the group, case): what run_rank found there."""
    return ranks.run(4, run_all_cases)


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_ranks_together_equal_one_process(results: list[Any], name: str, ep: int) -> None:
    """fp32: bitwise. bf16: gradients of x are rounded a row at a time, before they travel."""
    case, found = CASES[name], [results[rank][ep, name] for rank in range(ep)]
    needed, dropped_TK = rows_needed(case, ep)
    assert [rank["needed"] for rank in found] == needed
    block = whole_block(case, ep)
    block = block._replace(indices_TK=block.indices_TK.masked_fill(dropped_TK, -1))
    y_TH = moe(block.x_TH, block.weights_TK, block.indices_TK, block.gate_up_E2IH, block.down_EHI)
    assert bool(y_TH.any()) == (case.routing != "nobody" and case.num_rows != 0)
    expected = dict(zip(("y", *NAMES), (y_TH.detach(), *gradients(y_TH, block)), strict=True))
    for key, wanted in expected.items():
        together = torch.cat([rank[key] for rank in found])
        assert together.dtype == wanted.dtype
        if key == "x" and case.dtype == torch.bfloat16:
            assert relative_error(together, wanted) < 5e-3
        else:
            assert torch.equal(together, wanted), (key, relative_error(together, wanted))
    for rank in found:
        assert not rank["spare rows"].any()


def test_the_cases_overflow_as_they_say() -> None:
    for ep in (2, 4):
        for name, case in CASES.items():
            needed, dropped_TK = rows_needed(case, ep)
            assert bool(dropped_TK.any()) == (case.num_rows is not None), (name, needed)
    assert rows_needed(CASES["one rank gets everything"], 4)[0] == [4 * 9 * K, 0, 0, 0]


@pytest.fixture(scope="module")
def alone() -> Iterator[str]:
    """The name of a group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


@pytest.mark.parametrize("num_rows", [5 * K, 4 * K])
def test_opcheck(num_rows: int, alone: str) -> None:
    """Contracts of the six ops with autograd, aliasing and symbolic shapes; with room for all rows and without."""
    x_SH, weights_SK, _, _, indices_SK = make_block(5, K, N, H, WIDTH, weights_dtype=torch.float64)
    torch.library.opcheck(plan_exchange, (indices_SK, N, num_rows, 1, alone))
    token_P, row_SK, counts, _, _ = plan_exchange(indices_SK, N, num_rows, 1, alone)
    torch.library.opcheck(send_tokens, (x_SH, weights_SK, token_P, row_SK, counts, num_rows, alone))
    x_RH, weights_R1 = (rows.detach() for rows in (x_SH[:1].expand(num_rows, H), weights_SK.view(-1, 1)[:num_rows]))
    torch.library.opcheck(return_tokens, (x_RH.clone().requires_grad_(), token_P, row_SK, counts, alone))
    ops = torch.ops.optimus
    torch.library.opcheck(ops.send_tokens_backward, (x_RH.clone(), weights_R1.clone(), row_SK, counts, alone))
    torch.library.opcheck(ops.return_tokens_backward, (x_SH.detach(), token_P, counts, num_rows, alone))


def test_gradcheck(alone: str) -> None:
    block = make_block(4, 2, N, 5, 3, dtype=torch.float64)

    def run(x_TH: Tensor, weights_TK: Tensor, gate_up_E2IH: Tensor, down_EHI: Tensor) -> Tensor:
        rank = Block(x_TH, weights_TK, gate_up_E2IH, down_EHI, block.indices_TK)
        return exchanged_moe(rank, torch.tensor(0), 8, 1, alone)[0]

    torch.autograd.gradcheck(run, block.differentiable)


def test_fake_kernels_need_no_group() -> None:
    with FakeTensorMode():
        x_SH, weights_SK = torch.empty(6, H, dtype=torch.bfloat16), torch.empty(6, K)
        plan = plan_exchange(torch.empty(6, K, dtype=torch.int32), N, 10, 4, "nowhere")
        assert [tuple(t.shape) for t in plan] == [(6 * K,), (6, K), (2, 4), (10, 1), ()]
        assert {t.dtype for t in plan} == {torch.int64}
        token_P, row_SK, counts, _, _ = plan
        x_RH, weights_R1 = send_tokens(x_SH, weights_SK, token_P, row_SK, counts, 10, "nowhere")
        assert (x_RH.shape, x_RH.dtype) == ((10, H), torch.bfloat16)
        assert (weights_R1.shape, weights_R1.dtype) == ((10, 1), torch.float32)
        assert return_tokens(x_RH, token_P, row_SK, counts, "nowhere").shape == (6, H)


def test_wrong_arguments_are_refused(alone: str) -> None:
    indices_SK = torch.zeros(6, K, dtype=torch.int64)
    with pytest.raises(ValueError, match="8 experts cannot be divided over ep=3 ranks"):
        plan_exchange(indices_SK, N, 10, 3, alone)
    with pytest.raises(ValueError, match="has 1 ranks, but ep is 2"):
        plan_exchange(indices_SK, N, 10, 2, alone)
    with pytest.raises(ValueError, match=r"indices must be \[tokens, choices\], got shape \(18,\)"):
        plan_exchange(indices_SK.flatten(), N, 10, 1, alone)
