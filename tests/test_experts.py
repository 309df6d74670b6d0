"""`experts_implementation="optimus"` on unmodified transformers models: loss and every gradient equal eager's."""

import builtins
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimus_compiler.experts import register_experts

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def olmoe() -> Any:
    config = transformers.OlmoeConfig(**SIZES, intermediate_size=24, num_experts=6, num_experts_per_tok=3)
    return transformers.OlmoeForCausalLM(config)


def qwen3_moe() -> Any:
    config = transformers.Qwen3MoeConfig(
        **SIZES, head_dim=8, intermediate_size=48, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=3
    )
    return transformers.Qwen3MoeForCausalLM(config)


def mixtral() -> Any:
    config = transformers.MixtralConfig(**SIZES, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def deepseek_v3() -> Any:
    """Dense first layer, shared expert, grouped sigmoid router."""
    config = transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        intermediate_size=48,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def loss_and_gradients(model: Any, implementation: str) -> dict[str, Tensor]:
    model.set_experts_implementation(implementation)
    ids = torch.randint(3, 64, (2, 13), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


@pytest.mark.parametrize("build", [olmoe, qwen3_moe, mixtral, deepseek_v3])
def test_equals_eager(build: Callable[[], Any]) -> None:
    register_experts()
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3 if "gate.weight" in name else 0.1)
    expected = loss_and_gradients(model, "eager")
    computed = [loss_and_gradients(model, "optimus") for _ in range(3)]
    assert expected.keys() == computed[0].keys()
    assert any(name.endswith("gate.weight") for name in expected)
    for name, right in expected.items():
        assert right.norm() > 0, name
        assert (computed[0][name] - right).norm() <= 1e-5 * right.norm(), name
        assert all(torch.equal(again[name], computed[0][name]) for again in computed[1:]), name


def olmoe_experts(**attributes: Any) -> Any:
    """The experts of one OLMoE layer, set to the fused ops, with some attributes overwritten."""
    register_experts()
    torch.manual_seed(0)
    model = olmoe()
    model.set_experts_implementation("optimus")
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(0, 0.2)
    for name, value in attributes.items():
        setattr(experts, name, value)
    return experts


def test_transformers_expert_parallelism_sentinels_contribute_nothing() -> None:
    """Under transformers' expert parallelism a choice of another rank has index num_experts and weight 0."""
    experts = olmoe_experts(_is_expert_parallel=True)
    generator = torch.Generator().manual_seed(2)
    x_TH = torch.randn(7, 32, generator=generator, requires_grad=True)
    indices_TK = torch.randint(0, 7, (7, 3), generator=generator)
    local_TK = indices_TK < 6
    assert not local_TK.all()
    weights_TK = torch.rand(7, 3, generator=generator).mul(local_TK).requires_grad_()
    leaves = (x_TH, weights_TK, *experts.parameters())

    def run(implementation: str) -> tuple[Tensor, ...]:
        experts.config._experts_implementation = implementation
        y_TH = experts(x_TH, indices_TK, weights_TK)
        return y_TH, *torch.autograd.grad(y_TH.square().sum(), leaves)

    for a, b in zip(run("optimus"), run("batched_mm"), strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()
    assert not run("optimus")[2][~local_TK].any()


@pytest.mark.parametrize(
    ("attributes", "cause"),
    [
        ({"has_gate": False}, "they have no gate"),
        ({"has_bias": True}, "they have biases"),
        ({"is_transposed": True}, "their weights are stored transposed"),
        ({"is_concatenated": False}, "gate and up are interleaved"),
        ({"has_post_expert_norm": True}, "a norm follows each expert"),
        ({"act_fn": nn.GELU()}, "their activation is not SiLU"),
    ],
)
def test_unsupported_experts_are_refused(attributes: dict[str, Any], cause: str) -> None:
    experts = olmoe_experts(**attributes)
    with pytest.raises(ValueError, match=f"cannot run OlmoeExperts: {cause}; choose"):
        experts(torch.randn(2, 32), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))


def test_experts_with_their_own_gating_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = olmoe_experts()
    monkeypatch.setattr(type(experts), "_apply_gate", lambda self, gate_up: gate_up.chunk(2, -1)[0])
    with pytest.raises(ValueError, match="they use their own gating function"):
        experts(torch.randn(2, 32), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))


def test_missing_transformers_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_transformers(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_transformers)
    with pytest.raises(ImportError, match=r"pip install 'optimus-compiler\[transformers\]'"):
        register_experts()


@pytest.mark.parametrize("native", [True, False], ids=["bf16 products", "fp32 products"])
def test_bf16_error_is_no_larger_than_transformers_own(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and all gradients, the routing weights' too: at most 1.25 times the larger error of eager, grouped_mm."""
    monkeypatch.setattr("optimus_compiler.runtime.kernels.matmul._cpu_multiplies_bf16", lambda: native)
    experts = olmoe_experts()
    generator = torch.Generator().manual_seed(3)
    x_TH, dy_TH = (torch.randn(96, 32, generator=generator) for _ in range(2))
    weights_TK, indices_TK = torch.rand(96, 6, generator=generator).topk(3)

    def run(implementation: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        experts.config._experts_implementation = implementation
        # bf16 values in both dtypes, so that only the arithmetic differs.
        leaves = [t.detach().bfloat16().to(dtype).requires_grad_() for t in (x_TH, weights_TK)]
        names = ("gate_up_proj", "down_proj")
        tables = {name: getattr(experts, name).detach().bfloat16().to(dtype).requires_grad_() for name in names}
        y_TH = torch.func.functional_call(experts, tables, (leaves[0], indices_TK, leaves[1]))
        return y_TH, *torch.autograd.grad(y_TH, (*leaves, *tables.values()), dy_TH.bfloat16().to(dtype))

    exact = run("eager", torch.float32)

    def errors(implementation: str) -> list[float]:
        pairs = zip(run(implementation, torch.bfloat16), exact, strict=True)
        return [float(((a.float() - b).norm() / b.norm()).detach()) for a, b in pairs]

    for ours, eager, grouped in zip(errors("optimus"), errors("eager"), errors("grouped_mm"), strict=True):
        assert ours <= 1.25 * max(eager, grouped)
