"""index_tokens -> grouped_mlp -> reduce_outputs: values and gradients, undefined memory, determinism, compile."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses import FakeTensorMode

from optimus_compiler.runtime.kernels import (
    Kernels,
    dispatch,
    grouped_mlp,
    index_tokens,
    moe,
    reduce_outputs,
    set_kernels,
    use_kernels,
)
from optimus_compiler.runtime.kernels.dispatch import require
from optimus_compiler.runtime.kernels.triton import probe
from tests.runtime.kernels.naive import (
    NAMES,
    Block,
    gradients,
    make_block,
    naive_moe,
    output_gradient,
    poisoned,
    relative_error,
    run_moe,
)

both = pytest.mark.parametrize("kernels", ["reference", "cpu"])

one_expert = torch.zeros(11, 1, dtype=torch.int64)
skewed = torch.tensor([[4, 0]] * 9 + [[4, 2]] * 8)  # experts 1 and 3 have no token
SHAPES: dict[str, dict[str, Any]] = {
    "odd widths": {"T": 17, "K": 3, "E": 5, "H": 30, "width": 13},
    "K=1": {"T": 16, "K": 1, "E": 4, "H": 8, "width": 4},
    "K=N": {"T": 9, "K": 4, "E": 4, "H": 8, "width": 4},
    "N=1": {"T": 7, "K": 1, "E": 1, "H": 8, "width": 4},
    "T=1": {"T": 1, "K": 2, "E": 4, "H": 8, "width": 4},
    "H=I=1": {"T": 5, "K": 2, "E": 3, "H": 1, "width": 1},
    "one expert takes all": {"T": 11, "K": 1, "E": 3, "H": 8, "width": 4, "indices_TK": one_expert},
    "skewed": {"T": 17, "K": 2, "E": 5, "H": 8, "width": 6, "indices_TK": skewed},
    "wide": {"T": 17, "K": 2, "E": 5, "H": 96, "width": 48, "indices_TK": skewed},  # wide enough for bf16_products.h
}


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    with poisoned():
        yield


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_naive(shape: str, dtype: torch.dtype, kernels: Kernels) -> None:
    bound = 1e-6 if dtype == torch.float32 else 1e-14
    block, exact = make_block(**SHAPES[shape], dtype=dtype), make_block(**SHAPES[shape], dtype=torch.float64)
    expected_TH = naive_moe(exact)
    with use_kernels(kernels):
        y_TH = moe(block.x_TH, block.weights_TK, block.indices_TK, block.gate_up_E2IH, block.down_EHI)
        assert y_TH.dtype == dtype
        assert relative_error(y_TH, expected_TH) < bound
        pairs = zip(NAMES, gradients(y_TH, block), gradients(expected_TH, exact), strict=True)
        for name, gradient, expected in pairs:
            assert relative_error(gradient, expected) < bound, name


@both
def test_experts_without_tokens_have_exactly_zero_gradients(kernels: Kernels, poisoned_memory: None) -> None:
    block = make_block(**SHAPES["skewed"])
    with use_kernels(kernels):
        _, _, dgate_up_E2IH, ddown_EHI = gradients(run_moe(block), block)
    for expert in (1, 3):
        assert torch.equal(dgate_up_E2IH[expert], torch.zeros_like(dgate_up_E2IH[expert]))
        assert torch.equal(ddown_EHI[expert], torch.zeros_like(ddown_EHI[expert]))
    assert all(bool(dgate_up_E2IH[expert].any()) for expert in (0, 2, 4))


@pytest.mark.parametrize("backward", ["reference", "cpu"], ids=lambda kernels: f"backward {kernels}")
@pytest.mark.parametrize("forward", ["reference", "cpu"], ids=lambda kernels: f"forward {kernels}")
@pytest.mark.parametrize("first", [0, 3, 6, 9], ids=lambda first: f"experts from {first}")
def test_foreign_experts_in_poisoned_memory(
    first: int, forward: Kernels, backward: Kernels, poisoned_memory: None
) -> None:
    """Experts 6.. to 9 get few or no tokens; rows past the last offset hold NaN; nothing of it may come out."""
    indices_TK = torch.tensor([[0, 5], [4, 3], [2, 4], [5, 1], [3, 4], [7, 3], [5, 4], [0, 2], [1, 5]])
    block = make_block(T=9, K=2, E=3, H=12, width=5, indices_TK=indices_TK)
    expected_TH = naive_moe(block, first)
    expected = gradients(expected_TH, block)
    foreign_TK = (indices_TK < first) | (indices_TK >= first + 3)
    for _ in range(2):
        with use_kernels(forward):
            y_TH = run_moe(block, torch.tensor(first))
        with use_kernels(backward):
            computed = gradients(y_TH, block)
        assert relative_error(y_TH, expected_TH) < 1e-6
        for name, a, b in zip(NAMES, computed, expected, strict=True):
            assert a.isfinite().all(), name
            assert relative_error(a, b) < 1e-6, name
        assert not computed[1][foreign_TK].any()


@pytest.mark.parametrize("native", [True, False], ids=["bf16 products", "fp32 products"])
@both
def test_weights_may_have_another_dtype(kernels: Kernels, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3's and DeepSeek's routers return fp32 weights beside a bf16 model."""
    monkeypatch.setattr("optimus_compiler.runtime.kernels.matmul._cpu_multiplies_bf16", lambda: native)
    block = make_block(T=40, K=3, E=5, H=24, width=16, dtype=torch.bfloat16, weights_dtype=torch.float32)
    expected_TH = naive_moe(block)
    with use_kernels(kernels):
        y_TH = run_moe(block)
        computed = gradients(y_TH, block)
    assert (y_TH.dtype, computed[1].dtype) == (torch.bfloat16, torch.float32)
    assert relative_error(y_TH, expected_TH) < 5e-3
    for name, a, b in zip(NAMES, computed, gradients(expected_TH, block), strict=True):
        assert relative_error(a, b) < 1e-2, name


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_forty_repeats_are_bitwise_equal(dtype: torch.dtype, kernels: Kernels) -> None:
    block = make_block(T=33, K=4, E=6, H=16, width=8, dtype=dtype)
    with use_kernels(kernels):
        first = [run_moe(block), *gradients(run_moe(block), block)]
        for _ in range(40):
            again = [run_moe(block), *gradients(run_moe(block), block)]
            assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_cpu_sums_rows_in_the_order_of_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    y_RH = torch.randn(60, 30, generator=generator) * torch.logspace(-6, 6, 60)[:, None]
    row_TK = torch.randperm(60, generator=generator).view(15, 4).masked_fill(torch.arange(60).view(15, 4) % 5 == 0, -1)
    token_R = torch.zeros(60, dtype=torch.int64)
    with use_kernels("reference"):
        expected = reduce_outputs(y_RH, row_TK, token_R)
    with use_kernels("cpu"):
        assert torch.equal(reduce_outputs(y_RH, row_TK, token_R), expected)
        assert relative_error(reduce_outputs(y_RH.bfloat16(), row_TK, token_R), expected) < 4e-3


@both
def test_gradcheck(kernels: Kernels) -> None:
    block = make_block(T=4, K=2, E=3, H=5, width=3, dtype=torch.float64)

    def run(x_TH: Tensor, weights_TK: Tensor, gate_up_E2IH: Tensor, down_EHI: Tensor) -> Tensor:
        return run_moe(Block(x_TH, weights_TK, gate_up_E2IH, down_EHI, block.indices_TK))

    with use_kernels(kernels):
        torch.autograd.gradcheck(run, block.differentiable)


@both
def test_opcheck(kernels: Kernels) -> None:
    block = make_block(T=6, K=2, E=3, H=6, width=4)
    token_R, row_TK, offsets_E, _ = index_tokens(block.indices_TK, None, 3)
    y_RH, gate_up_R2I = grouped_mlp(*block.differentiable, token_R, row_TK, offsets_E)
    y_RH = y_RH.detach()
    with use_kernels(kernels):
        torch.library.opcheck(grouped_mlp, (*block.differentiable, token_R, row_TK, offsets_E))
        torch.library.opcheck(reduce_outputs, (y_RH.clone().requires_grad_(), row_TK, token_R))
        arguments = (*(leaf.detach() for leaf in block.differentiable), token_R, row_TK, offsets_E, gate_up_R2I)
        torch.library.opcheck(torch.ops.optimus.grouped_mlp_backward, (y_RH, *arguments))


def test_an_unused_output_has_no_gradient() -> None:
    """The saved gate_up is not differentiable, and expanded (stride 0) gradients are accepted."""
    block = make_block(T=6, K=2, E=3, H=6, width=4)
    y_RH, gate_up_R2I = grouped_mlp(*block.differentiable, *index_tokens(block.indices_TK, None, 3)[:3])
    assert y_RH.requires_grad
    assert not gate_up_R2I.requires_grad
    expanded = torch.autograd.grad(run_moe(block).sum(), block.differentiable)
    y_TH = run_moe(block)
    dense = torch.autograd.grad(y_TH, block.differentiable, torch.ones_like(y_TH))
    assert all(torch.equal(a, b) for a, b in zip(expanded, dense, strict=True))


def test_one_compile_for_twenty_skewed_routings() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(moe, backend=counter, fullgraph=True)
    block = make_block(T=24, K=2, E=6, H=8, width=4)
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        # From uniform to all tokens on two experts.
        scores = torch.rand(24, 6, generator=generator) + step * torch.arange(6) / 6
        routed = block._replace(indices_TK=scores.topk(2).indices)
        y_TH = compiled(block.x_TH, block.weights_TK, routed.indices_TK, block.gate_up_E2IH, block.down_EHI)
        eager_TH = run_moe(routed)
        assert torch.equal(y_TH, eager_TH)
        for a, b in zip(gradients(y_TH, routed), gradients(eager_TH, routed), strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count == 1


def test_backward_saves_x_the_routing_and_gate_up() -> None:
    """OLMoE-7B's layer with 4,096 tokens, on the meta device: less than a third of what transformers' experts save."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

    T, K, E, H, width = 4096, 8, 64, 2048, 1024
    config = transformers.OlmoeConfig(hidden_size=H, intermediate_size=width, num_experts=E, num_local_experts=E)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts: Any = OlmoeExperts(config).bfloat16()
        x_TH, weights_TK = (torch.empty(T, n, dtype=torch.bfloat16, requires_grad=True) for n in (H, K))
        indices_TK = torch.empty(T, K, dtype=torch.int64)
    experts.config = config
    tables = (experts.gate_up_proj.view(E, 2, width, H), experts.down_proj)

    def saved(run: Callable[[], Tensor]) -> int:
        kept: list[Tensor] = []  # alive, so that no two share an address
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
            run()
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept}
        for parameter in experts.parameters():
            storages.pop(parameter.untyped_storage()._cdata, None)
        return sum(storages.values())

    ours = saved(lambda: moe(x_TH, weights_TK, indices_TK, *tables))
    assert ours == 2 * T * H + 2 * T * K * (2 * width) + 2 * T * K + 2 * 8 * T * K + 4 * E
    assert ours < saved(lambda: experts(x_TH, indices_TK, weights_TK)) / 3


def test_shapes_beyond_two_to_the_31_elements() -> None:
    """Fake tensors: R * H and E * 2 * I * H past 2^31."""
    with FakeTensorMode():
        x_TH, weights_TK = torch.empty(2**18, 4096), torch.empty(2**18, 8)
        gate_up, down = torch.empty(512, 2, 1024, 4096), torch.empty(512, 4096, 1024)
        indexed = index_tokens(torch.empty(2**18, 8, dtype=torch.int64), None, 512)[:3]
        y_RH, gate_up_R2I = grouped_mlp(x_TH, weights_TK, gate_up, down, *indexed)
        assert (y_RH.shape, gate_up_R2I.shape) == ((2**21, 4096), (2**21, 2048))
        assert reduce_outputs(y_RH, indexed[1], indexed[0]).shape == (2**18, 4096)


@pytest.mark.parametrize("kernels", [pytest.param("reference", marks=pytest.mark.slow), "cpu"])
def test_rows_and_tables_past_two_to_the_31_elements_are_addressed(kernels: Kernels) -> None:
    """The pages of a huge empty tensor take no memory until they are touched: only the last rows and expert are."""
    block = make_block(T=3, K=1, E=2, H=32, width=16, dtype=torch.bfloat16, indices_TK=torch.tensor([[0], [1], [1]]))
    experts = 2**21 + 2  # 2 * 16 * 32 = 1024 elements each
    gate_up, down = (torch.empty(experts, *table.shape[1:], dtype=table.dtype) for table in block[2:4])
    gate_up[-2:], down[-2:] = block.gate_up_E2IH.detach(), block.down_EHI.detach()
    assert gate_up[-2].storage_offset() >= 2**31
    x_TH, weights_TK = block.x_TH.detach(), block.weights_TK.detach()
    y_RH = torch.empty(2**21 + 2, 1024, dtype=torch.bfloat16)
    y_RH[-2:] = torch.tensor([[1.0], [2.0]])
    row_TK = torch.tensor([[2**21, 2**21 + 1], [2**21 + 1, -1]])
    with use_kernels(kernels):
        expected = moe(x_TH, weights_TK, block.indices_TK, *block[2:4]).detach()
        assert torch.equal(moe(x_TH, weights_TK, block.indices_TK + experts - 2, gate_up, down), expected)
        out_TH = reduce_outputs(y_RH, row_TK, torch.zeros(1, dtype=torch.int64))
    assert torch.equal(out_TH, torch.tensor([[3.0], [2.0]]).expand(2, 1024).bfloat16())


def test_mixed_dtypes_and_wrong_layouts_are_refused() -> None:
    block = make_block(T=6, K=2, E=3, H=6, width=4)
    indexed = index_tokens(block.indices_TK, None, 3)[:3]
    x_TH, weights_TK, gate_up, down = block.differentiable
    with pytest.raises(ValueError, match=r"x is torch\.bfloat16, gate_up torch\.float32"):
        grouped_mlp(x_TH.bfloat16(), weights_TK, gate_up, down, *indexed)
    with pytest.raises(ValueError, match=r"wants gate_up \(3, 2, 4, 6\)"):
        grouped_mlp(x_TH, weights_TK, gate_up.flatten(1, 2), down, *indexed)
    with pytest.raises(ValueError, match=r"offsets \(2,\)"):
        grouped_mlp(x_TH, weights_TK, gate_up, down, *index_tokens(block.indices_TK, None, 2)[:3])


def test_a_choice_that_cannot_run_is_refused() -> None:
    block = make_block(T=6, K=2, E=3, H=6, width=4)
    refusal = r"kernels='triton' cannot run on cpu tensors \(on a CPU they are only interpreted: set TRITON_INTERPRET=1"
    with use_kernels("triton"), pytest.raises(RuntimeError, match=refusal):
        run_moe(block)
    with pytest.raises(RuntimeError, match=r"kernels='cpu' cannot run on xpu tensors \(the C\+\+ kernels are for CPUs"):
        require("cpu", torch.device("xpu"))
    with pytest.raises(ValueError, match="kernels='fast' is unknown: choose one of auto, reference, cpu, triton"):
        set_kernels("fast")  # type: ignore[arg-type]
    run_moe(block)  # the choice of the block above has been undone


def test_a_gpu_takes_triton_or_says_once_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice needs a device's name, not the device."""
    warnings: list[str] = []
    reasons = {"cuda": None, "xpu": "triton is not installed"}
    monkeypatch.setattr(dispatch, "problem", lambda device: reasons[device.type])
    monkeypatch.setattr(dispatch._log, "warning", lambda message, *arguments: warnings.append(message % arguments))
    choices = {"reference": lambda: "reference", "cpu": lambda: "cpu", "triton": lambda: "triton"}
    for name, dtype, expected in [
        ("cuda", torch.bfloat16, "triton"),
        ("cuda", torch.int64, "triton"),
        ("cuda", torch.float64, "reference"),
        ("xpu", torch.bfloat16, "reference"),
        ("xpu", torch.float32, "reference"),
    ]:
        like: Any = SimpleNamespace(device=torch.device(name), dtype=dtype)
        assert dispatch.select(like, **choices)() == expected
        with use_kernels("reference"):
            assert dispatch.select(like, **choices)() == "reference"
    assert warnings == ["experts run on the slow reference path on xpu: triton is not installed"]
    dispatch._triton_runs.cache_clear()


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (None, "triton is not installed: pip install 'optimus-compiler[triton]'"),
        ("3.5.1", "triton 3.5.1 is installed, 3.6 to 3.9 are supported"),
        ("3.10.0+git", "triton 3.10.0+git is installed, 3.6 to 3.9 are supported"),
        ("3.6.0", "on a CPU they are only interpreted: set TRITON_INTERPRET=1 before Python starts"),
    ],
)
def test_the_probe_names_what_is_missing(found: str | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if found:
        monkeypatch.setattr("triton.__version__", found)
    else:
        monkeypatch.setattr(probe, "find_spec", lambda name: None)
    assert probe.problem.__wrapped__(torch.device("cpu")) == reason


BALANCED = torch.stack([(torch.arange(4) + t) % 8 for t in range(64)])
ONE_EXPERT = torch.zeros(64, 1, dtype=torch.int64)


@pytest.mark.parametrize("indices_TK", [BALANCED, ONE_EXPERT], ids=["experts in parallel", "one expert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_two_threads_compute_what_one_does(dtype: torch.dtype, indices_TK: Tensor) -> None:
    """Experts are shared out to threads only where none has more than a thread's share of the rows."""
    block = make_block(T=64, K=indices_TK.shape[1], E=8, H=32, width=24, dtype=dtype, indices_TK=indices_TK)
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with use_kernels("cpu"):
            y_TH = run_moe(block)
            found.append([y_TH.detach(), *gradients(y_TH, block)])
    torch.set_num_threads(before)
    for name, one, two in zip(("y", *NAMES), *found, strict=True):
        assert relative_error(two, one) < (1e-6 if dtype == torch.float32 else 1e-2), name


@both
@pytest.mark.parametrize("native", [True, False], ids=["bf16 products", "fp32 products"])
@pytest.mark.parametrize("shape", ["skewed", "wide"])
@pytest.mark.parametrize(
    ("dtype", "buffer_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=["fp32", "bf16", "bf16 weights, fp32 gradients"],
)
def test_gradients_are_added_to_buffers(
    shape: str,
    dtype: torch.dtype,
    buffer_dtype: torch.dtype,
    native: bool,
    kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice, onto what was there; autograd gets none, its hooks run; experts without rows stay as they were."""
    monkeypatch.setattr("optimus_compiler.runtime.kernels.matmul._cpu_multiplies_bf16", lambda: native)
    block = make_block(**SHAPES[shape], dtype=dtype)
    expected = gradients(naive_moe(block), block)
    tables = (block.gate_up_E2IH, block.down_EHI)
    buffers = [torch.full_like(table, 0.5, dtype=buffer_dtype) for table in tables]
    heard: list[str] = []
    for name, table in zip(("gate_up", "down"), tables, strict=True):
        table.register_post_accumulate_grad_hook(lambda _, name=name: heard.append(name))
    block.x_TH.grad = None
    with use_kernels(kernels):
        for _ in range(2):
            y_TH = moe(block.x_TH, block.weights_TK, block.indices_TK, *tables, *buffers)
            y_TH.backward(output_gradient(y_TH.shape).to(dtype))
    assert sorted(heard) == ["down", "down", "gate_up", "gate_up"]
    assert block.gate_up_E2IH.grad is None
    assert block.x_TH.grad is not None
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    assert relative_error(block.x_TH.grad, 2 * expected[0]) < bound
    for buffer, gradient in zip(buffers, expected[2:], strict=True):
        assert relative_error(buffer, 0.5 + 2 * gradient) < bound
        assert (buffer[[1, 3]] == 0.5).all()


def test_unfit_gradient_buffers_are_refused() -> None:
    block = make_block(T=6, K=2, E=3, H=8, width=4)
    arguments = (*block.differentiable, *index_tokens(block.indices_TK, None, 3)[:3])
    gate_up, down = torch.zeros_like(block.gate_up_E2IH), torch.zeros_like(block.down_EHI)
    with pytest.raises(ValueError, match="both gate_up and down, or none"):
        grouped_mlp(*arguments, gate_up, None)
    with pytest.raises(ValueError, match="the gradient buffer of down must be contiguous, "):
        grouped_mlp(*arguments, gate_up, down.mT.contiguous().mT)
    with pytest.raises(ValueError, match=r"float32 or torch.float32, got .*bfloat16"):
        grouped_mlp(*arguments, gate_up, down.bfloat16())


def test_without_a_compiler_the_reference_runs_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.exc import InvalidCxxCompiler

    from optimus_compiler.runtime.kernels import cpu

    def fail(source: str) -> None:
        raise InvalidCxxCompiler()

    warnings: list[str] = []
    cpu.load.cache_clear()
    monkeypatch.setattr(CppCodeCache, "load", fail)
    monkeypatch.setattr(cpu._log, "warning", lambda message, *arguments: warnings.append(message % arguments))
    block = make_block(T=6, K=2, E=3, H=8, width=4)
    for _ in range(2):
        y_TH = run_moe(block)
        assert relative_error(y_TH, naive_moe(block)) < 1e-6
    cpu.load.cache_clear()
    assert len(warnings) == 1
    assert "install g++" in warnings[0]


def test_the_reference_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from optimus_compiler.runtime.kernels import cpu

    def fail() -> None:
        raise AssertionError("the C++ kernels were asked for")

    monkeypatch.setattr(cpu, "load", fail)
    block = make_block(T=6, K=2, E=3, H=8, width=4)
    with use_kernels("reference"):
        y_TH = run_moe(block)
        assert all(gradient.isfinite().all() for gradient in gradients(y_TH, block))
