"""index_tokens -> grouped_mlp -> reduce_outputs on Triton: values and gradients against the block in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from optimus_compiler.runtime.kernels import Kernels, moe, use_kernels
from optimus_compiler.runtime.kernels.triton import device, launch, products
from optimus_compiler.runtime.kernels.triton.tiles import Tile
from tests.runtime.kernels.naive import NAMES, Block, gradients, naive_moe, poisoned, relative_error, run_moe
from tests.runtime.kernels.triton.device import DEVICE, block_on_device

one_expert = torch.zeros(40, 1, dtype=torch.int64)
skewed = torch.tensor([[4, 0]] * 24 + [[4, 2]] * 8)  # experts 1 and 3 have no token
# Tiles of 16 rows and 32 columns in steps of 32 where Triton interprets. Rows of 16-byte multiples are read through
# descriptors, others through pointers.
SHAPES: dict[str, dict[str, Any]] = {
    "odd widths": {"T": 17, "K": 3, "E": 5, "H": 30, "width": 13},
    "K=1": {"T": 16, "K": 1, "E": 4, "H": 8, "width": 4},
    "K=N": {"T": 9, "K": 4, "E": 4, "H": 16, "width": 8},
    "T=N=1": {"T": 1, "K": 1, "E": 1, "H": 8, "width": 4},
    "H=I=1": {"T": 5, "K": 2, "E": 3, "H": 1, "width": 1},
    "one expert takes all": {"T": 40, "K": 1, "E": 3, "H": 40, "width": 40, "indices_TK": one_expert},
    "skewed": {"T": 32, "K": 2, "E": 5, "H": 64, "width": 48, "indices_TK": skewed},
    "gate beside up within a tile": {"T": 12, "K": 2, "E": 3, "H": 33, "width": 48},
    "more experts than rows": {"T": 3, "K": 2, "E": 70, "H": 32, "width": 16},
}


def assert_exact(y_TH: Tensor, computed: tuple[Tensor, ...], block: Block, bound: float, first: int = 0) -> None:
    """Output and every gradient are the fp64 block's, up to a relative error."""
    leaves = [leaf.detach().double().cpu().requires_grad_() for leaf in block[:4]]
    exact = Block._make([*leaves, block.indices_TK.cpu()])
    expected_TH = naive_moe(exact, first)
    assert relative_error(y_TH.cpu(), expected_TH) < bound
    for name, leaf, a, b in zip(NAMES, block[:4], computed, gradients(expected_TH, exact), strict=True):
        assert a.dtype == leaf.dtype, name
        assert relative_error(a.cpu(), b) < bound, name


@pytest.fixture(params=["CUDA's grid", "XPU's grid"])
def grid(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to lay out the grid and to read rows, whatever the device; compiled, a GPU takes its own."""
    if launch.interpreted() and request.param == "XPU's grid":
        monkeypatch.setattr(device, "per_expert", lambda _: True)
    elif not launch.interpreted() and (DEVICE.type == "xpu") != (request.param == "XPU's grid"):
        pytest.skip("the other device's grid")
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_equals_naive(shape: str, grid: str) -> None:
    block = block_on_device(**SHAPES[shape])
    with poisoned():
        y_TH = run_moe(block)
        assert_exact(y_TH, gradients(y_TH, block), block, 1e-6)


@pytest.mark.parametrize("weights_dtype", [None, torch.float32], ids=["same weights", "fp32 weights"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_two_byte_dtypes_equal_naive(dtype: torch.dtype, weights_dtype: torch.dtype | None) -> None:
    """Qwen3's and DeepSeek's routers return fp32 weights beside a bf16 model."""
    block = block_on_device(**SHAPES["skewed"], dtype=dtype, weights_dtype=weights_dtype)
    y_TH = run_moe(block)
    assert_exact(y_TH, gradients(y_TH, block), block, 8e-3 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("first", [0, 3, 9], ids=lambda first: f"experts from {first}")
def test_foreign_experts_in_poisoned_memory(first: int, grid: str) -> None:
    """Of experts 3 to 5 one, of 9 to 11 none gets a token; rows past the last offset hold NaN, and none comes out."""
    indices_TK = torch.tensor([[0, 4], [4, 1], [2, 4], [1, 0], [7, 4], [7, 2], [1, 4], [0, 2], [1, 0]])
    block = block_on_device(T=9, K=2, E=3, H=16, width=8, indices_TK=indices_TK)
    with poisoned():
        y_TH = run_moe(block, torch.tensor(first, device=DEVICE))
        computed = gradients(y_TH, block)
    assert_exact(y_TH, computed, block, 1e-6, first)
    foreign_TK = (block.indices_TK < first) | (block.indices_TK >= first + 3)
    assert not computed[1][foreign_TK].any()
    for expert in range(3):
        if not (indices_TK == first + expert).any():
            assert not computed[2][expert].any()
            assert not computed[3][expert].any()


@pytest.mark.parametrize(("forward", "backward"), [("triton", "reference"), ("reference", "triton")])
def test_saves_what_the_reference_saves(forward: Kernels, backward: Kernels) -> None:
    block = block_on_device(**SHAPES["skewed"])
    with use_kernels(forward):
        y_TH = run_moe(block)
    with use_kernels(backward):
        computed = gradients(y_TH, block)
    assert_exact(y_TH, computed, block, 1e-6)


@pytest.mark.parametrize(
    ("shape", "dtype", "buffer_dtype"),
    [
        ("skewed", torch.float32, torch.float32),
        ("skewed", torch.bfloat16, torch.bfloat16),
        ("skewed", torch.bfloat16, torch.float32),
        ("gate beside up within a tile", torch.float32, torch.float32),
    ],
    ids=["fp32", "bf16", "bf16 weights, fp32 gradients", "gate beside up within a tile"],
)
def test_gradients_are_added_to_buffers(shape: str, dtype: torch.dtype, buffer_dtype: torch.dtype, grid: str) -> None:
    """Twice, onto what was there; a table without rows stays as it was."""
    block = block_on_device(**SHAPES[shape], dtype=dtype)
    tables = (block.gate_up_E2IH, block.down_EHI)
    buffers = [torch.full_like(table, 0.5, dtype=buffer_dtype) for table in tables]
    expected = gradients(naive_moe(Block._make(t.cpu() for t in block)), block)
    for _ in range(2):
        y_TH = moe(*block[:2], block.indices_TK, *tables, *buffers)
        y_TH.backward(torch.randn(y_TH.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(y_TH))
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    assert block.x_TH.grad is not None
    assert relative_error(block.x_TH.grad.cpu(), 2 * expected[0].cpu()) < bound
    for buffer, gradient in zip(buffers, expected[2:], strict=True):
        assert relative_error(buffer.cpu(), 0.5 + 2 * gradient.cpu()) < bound
        if shape == "skewed":
            assert (buffer[[1, 3]] == 0.5).all()


def test_repeats_are_bitwise_equal() -> None:
    block = block_on_device(**SHAPES["skewed"], dtype=torch.bfloat16)
    y_TH = run_moe(block)
    first = [y_TH, *gradients(y_TH, block)]
    for _ in range(1 if launch.interpreted() else 200):
        y_TH = run_moe(block)
        again = [y_TH, *gradients(y_TH, block)]
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="only CUDA can watch for it")
def test_nothing_waits_for_the_device() -> None:
    block = block_on_device(**SHAPES["skewed"], dtype=torch.bfloat16)
    gradients(run_moe(block), block)  # compiles
    dy_TH = torch.ones_like(block.x_TH)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_moe(block).backward(dy_TH)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_token_at_all() -> None:
    block = block_on_device(T=0, K=2, E=3, H=16, width=8, indices_TK=torch.zeros(0, 2, dtype=torch.int64))
    with poisoned():
        y_TH = run_moe(block)
        dx_TH, dweights_TK, dgate_up_E2IH, ddown_EHI = gradients(y_TH, block)
    assert (y_TH.shape, dx_TH.shape, dweights_TK.shape) == ((0, 16), (0, 16), (0, 2))
    assert not dgate_up_E2IH.any()
    assert not ddown_EHI.any()


@pytest.mark.parametrize("tile", [Tile(32, 16, 16, 4, 2, group=1), Tile(64, 64, 64, 4, 2, group=3)], ids=str)
def test_any_tile_gives_the_product(tile: Tile) -> None:
    a_RC = torch.randn(50, 48, device=DEVICE)
    offsets_E = torch.tensor([0, 33, 33, 46], dtype=torch.int32, device=DEVICE)
    table_ECN = torch.randn(4, 48, 80, device=DEVICE)
    expected = torch.cat([a_RC[:33].double() @ table_ECN[1].double(), a_RC[33:46].double() @ table_ECN[3].double()])
    for transposed in (False, True):
        table = table_ECN.mT.contiguous() if transposed else table_ECN
        out_RN = products.multiply(a_RC, table, offsets_E, transposed=transposed, product="down", tile=tile)
        assert relative_error(out_RN[:46], expected) < 1e-6


def test_tables_and_tokens_past_two_to_the_31_elements_are_addressed() -> None:
    """The pages of a huge empty tensor take no memory until they are touched: the last experts and tokens are."""
    H, width = 128, 32
    indices_TK = torch.tensor([[0], [1], [1]])
    block = block_on_device(T=3, K=1, E=2, H=H, width=width, dtype=torch.float16, indices_TK=indices_TK)
    experts, tokens = 2**19 + 2, 2**24 + 3
    gate_up, down = (torch.empty(experts, *table.shape[1:], dtype=table.dtype, device=DEVICE) for table in block[2:4])
    gate_up[-2:], down[-2:] = block.gate_up_E2IH.detach(), block.down_EHI.detach()
    x_TH = torch.empty(tokens, H, dtype=torch.float16, device=DEVICE)
    x_TH[-3:] = block.x_TH.detach()
    assert min(gate_up[-2].storage_offset(), down[-2].storage_offset(), x_TH[-3].storage_offset()) >= 2**31

    token_R = torch.arange(tokens - 3, tokens, device=DEVICE)
    offsets_E = torch.tensor([0] * (experts - 2) + [1, 3], dtype=torch.int32, device=DEVICE)
    weight_R = block.weights_TK.detach().flatten().float()
    _, h_RI = products.multiply_gate_up(x_TH, token_R, weight_R, gate_up, offsets_E)
    y_RH = products.multiply(h_RI, down, offsets_E, transposed=True, product="down")
    assert torch.equal(y_RH, run_moe(block))


def test_fp32_is_multiplied_exactly_unless_asked_otherwise() -> None:
    assert device.precision() == "ieee"
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert device.precision() == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


def test_fp64_takes_the_reference() -> None:
    block = block_on_device(**SHAPES["odd widths"], dtype=torch.float64)
    y_TH = run_moe(block)
    assert_exact(y_TH, gradients(y_TH, block), block, 1e-14)
