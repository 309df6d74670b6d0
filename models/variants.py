"""Named models: the paper's Mula family, the models it scales, small ones for CPUs, and Intel's scaling tags.

A tag scales a named model: `OLMoE-1B-7B-0924--SE1.5-L32` has 1.5 times its experts and 32 layers.
"""

import re
from dataclasses import asdict, fields, replace
from fractions import Fraction
from typing import Any

from optimus_compiler.models.config import ModelConfig, OlmoConfig, OlmoeConfig, nearest

_OLMO_1B = OlmoConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=16,
    tie_word_embeddings=True,
)
_OLMOE_7B = OlmoeConfig(intermediate_size=1024)  # everything else is the default

VARIANTS: dict[str, ModelConfig] = {
    "OLMo-1B-hf": _OLMO_1B,
    "OLMoE-1B-7B-0924": _OLMOE_7B,
    # The paper's table of models (arXiv 2604.00785).
    "mula-1b": _OLMO_1B,
    "mula-7b-a1b": _OLMOE_7B,
    "mula-20b-a2b": replace(_OLMOE_7B, num_hidden_layers=32, num_experts=96),
    "mula-100b-a7b": OlmoeConfig(
        hidden_size=3072, intermediate_size=1536, num_hidden_layers=48, num_attention_heads=24, num_experts=144
    ),
    "mula-220b-a10b": OlmoeConfig(
        hidden_size=3072, intermediate_size=1536, num_hidden_layers=64, num_attention_heads=24, num_experts=240
    ),
    "olmoe-tiny": OlmoeConfig(
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_experts=8,
        num_experts_per_tok=2,
    ),
    "olmo-tiny": OlmoConfig(hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4),
}

# Which fields a tag scales; L sets the number of layers instead.
SCALES: dict[str, tuple[str, ...]] = {
    "SA": ("num_attention_heads", "num_key_value_heads"),
    "SH": ("hidden_size",),
    "SE": ("num_experts",),
    "SI": ("intermediate_size",),
    "SC": ("num_experts_per_tok",),
}


def from_name(name: str, **overrides: Any) -> ModelConfig:
    """The configuration of a named model, in any case, with or without `allenai/`, with or without tags.

    overrides: fields of the configuration to replace. A vocabulary of another size belongs to another tokenizer, so
    the special token ids then default to None. Unknown names, tags and fields, malformed tags and values that no model
    can have are ValueErrors.
    """
    base, separator, tags = name.lower().removeprefix("allenai/").partition("--")
    variants = {variant.lower(): config for variant, config in VARIANTS.items()}
    if base not in variants:
        raise ValueError(f"unknown model {name!r}; {nearest(base, VARIANTS)}")
    config = variants[base]
    if separator:
        config = _apply_tags(config, name, tags)
    known = [field.name for field in fields(config)]
    for field in overrides:
        if field not in known:
            raise ValueError(f"{name} has no setting {field!r}; {nearest(field, known)}")
    if overrides.get("vocab_size", config.vocab_size) != config.vocab_size:
        overrides = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None} | overrides
    if "num_attention_heads" in overrides and config.num_key_value_heads == config.num_attention_heads:
        overrides = {"num_key_value_heads": None} | overrides
    return replace(config, **overrides)


def _apply_tags(config: ModelConfig, name: str, tags: str) -> ModelConfig:
    """The configuration with `tags` (`SE1.5-L32`) applied; ValueErrors quote the tag and the model's full name."""
    values = asdict(config)
    known = ["L", *(tag for tag, scaled in SCALES.items() if scaled[0] in values)]
    changes: dict[str, Any] = {}
    for tag in tags.upper().split("-"):
        parts = re.fullmatch(r"([A-Z]+)([0-9]+(?:\.[0-9]+)?)", tag)
        if parts is None or (letters := parts[1]) not in known:
            raise ValueError(f"{name}: {tag!r} is no tag of this model; give {', '.join(known)}, each with a number.")
        factor = Fraction(parts[2])
        for field in SCALES.get(letters, ("num_hidden_layers",)):
            scaled = factor if letters == "L" else factor * values[field]
            if scaled.denominator != 1 or scaled < 1:
                raise ValueError(f"{name}: {tag!r} makes {field} {float(scaled):g}, not a positive whole number.")
            if field in changes:
                raise ValueError(f"{name}: {tag!r} sets {field} a second time; give each tag once.")
            changes[field] = int(scaled)
    return replace(config, **changes)
