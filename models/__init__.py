"""Plain OLMo and OLMoE as Hugging Face defines them, and the named variants of the Mula family."""

from optimus_compiler.models.config import ModelConfig, OlmoConfig, OlmoeConfig, from_hf
from optimus_compiler.models.layers import CausalLMOutput
from optimus_compiler.models.olmo import OlmoForCausalLM
from optimus_compiler.models.olmoe import OlmoeForCausalLM
from optimus_compiler.models.parameters import build, parameter_count
from optimus_compiler.models.variants import VARIANTS, from_name

__all__ = [
    "VARIANTS",
    "CausalLMOutput",
    "ModelConfig",
    "OlmoConfig",
    "OlmoForCausalLM",
    "OlmoeConfig",
    "OlmoeForCausalLM",
    "build",
    "from_hf",
    "from_name",
    "parameter_count",
]
