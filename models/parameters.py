"""Building a model from its configuration, and counting parameters without allocating them."""

import torch
from torch import nn

from optimus_compiler.models.config import ModelConfig, OlmoeConfig
from optimus_compiler.models.olmo import OlmoForCausalLM
from optimus_compiler.models.olmoe import OlmoeExperts, OlmoeForCausalLM


def build(config: ModelConfig) -> OlmoForCausalLM | OlmoeForCausalLM:
    """The model of a configuration, with random weights; under `torch.device("meta")` it has shapes only."""
    return OlmoeForCausalLM(config) if isinstance(config, OlmoeConfig) else OlmoForCausalLM(config)


def parameter_count(source: ModelConfig | OlmoForCausalLM | OlmoeForCausalLM) -> tuple[int, int]:
    """(total, active): all parameters, and those that one token meets, which of the experts are K of E.

    A tied embedding counts once. Nothing is allocated for a configuration, whatever its size.
    """
    if isinstance(source, nn.Module):
        model = source
    else:
        with torch.device("meta"):
            model = build(source)
    total = _count(model)
    if not isinstance(model, OlmoeForCausalLM):
        return total, total
    experts = sum(_count(module) for module in model.modules() if isinstance(module, OlmoeExperts))
    return total, total - experts + experts // model.num_experts * model.num_experts_per_tok


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
