"""`experts_implementation="optimus"`: the fused SparseMoE ops in an unmodified transformers model, without compile."""

from typing import Any

from torch import Tensor, nn

from optimus_compiler.runtime.kernels import moe


def register_experts() -> None:
    """Make transformers accept `experts_implementation="optimus"` (from_pretrained, config,
    set_experts_implementation).

    Raises ImportError when transformers is missing. A model whose experts the fused ops cannot run (bias, no gate,
    another activation or layout) raises ValueError at its first forward, naming its experts class.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError(
            f"register_experts needs transformers with an experts interface ({error}): "
            "pip install 'optimus-compiler[transformers]'"
        ) from error
    ALL_EXPERTS_FUNCTIONS.register("optimus", optimus_experts_forward)


def optimus_experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts forward: hidden_states [T, H], top_k_index and top_k_weights [T, K] -> [T, H].

    Under transformers' own expert parallelism, choices of another rank carry the index num_experts: they are no local
    expert here and contribute nothing, output and gradient.
    """
    _refuse_unsupported(self)
    num_experts, hidden, width = self.down_proj.shape
    gate_up_E2IH = self.gate_up_proj.view(num_experts, 2, width, hidden)
    return moe(hidden_states, top_k_weights, top_k_index, gate_up_E2IH, self.down_proj)


def _refuse_unsupported(experts: Any) -> None:
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import _default_apply_gate

    causes = {
        "they have no gate": not experts.has_gate,
        "they have biases": experts.has_bias,
        "their weights are stored transposed": experts.is_transposed,
        "gate and up are interleaved": not experts.is_concatenated,
        "a norm follows each expert": experts.has_post_expert_norm,
        "they use their own gating function": type(experts)._apply_gate is not _default_apply_gate,
        "their activation is not SiLU": not isinstance(getattr(experts, "act_fn", None), (nn.SiLU, SiLUActivation)),
    }
    cause = next((cause for cause, present in causes.items() if present), None)
    if cause is not None:
        raise ValueError(
            f'experts_implementation="optimus" cannot run {type(experts).__name__}: {cause}; '
            'choose "grouped_mm" or "eager"'
        )
