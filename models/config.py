"""Model configurations: Hugging Face's field names and defaults for OLMo and OLMoE, checked when built."""

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self, get_args, get_origin

# Keys of a config.json that describe the file, the library or generation, and do not change the model's function.
BOOKKEEPING = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "experts_implementation",
        "id2label",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
ROPE_KEYS = frozenset({"rope_type", "type", "rope_theta"})


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error sentence: the known name closest to `word`, or all of them where none is close."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), names, n=1)
    return f"did you mean {names[close[0]]!r}?" if close else f"known: {', '.join(sorted(names.values()))}"


@dataclass(kw_only=True)
class DecoderConfig:
    """What OLMo and OLMoE have in common. Every ValueError it raises names the field, its value and what is allowed."""

    model_type: ClassVar[str]
    SIZES: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    )

    vocab_size: int = 50304
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = None  # type: ignore[assignment]  # None: as many as attention heads
    hidden_act: str = "silu"
    max_position_embeddings: int
    initializer_range: float = 0.02
    pad_token_id: int | None = 1
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 50279
    tie_word_embeddings: bool = False
    rope_theta: float = 10000.0
    attention_bias: bool = False
    attention_dropout: float = 0.0
    clip_qkv: float | None = None

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        for field in fields(self):  # transformers refuses a whole number in a field of floats
            value = getattr(self, field.name)
            if type(value) is int and float in _allowed_types(field.type):
                setattr(self, field.name, float(value))
        self.validate()

    def validate(self) -> None:
        """Raises ValueError for the first field whose value no model can be built from."""
        for field in fields(self):
            matches = type(getattr(self, field.name)) in _allowed_types(field.type)  # exactly: a bool is no int
            self.require(matches, field.name, f"of type {_type_name(field.type)}")
        for name in self.SIZES:
            self.require(getattr(self, name) > 0, name, "positive")
        heads = self.num_attention_heads
        self.require(self.hidden_size % heads == 0, "hidden_size", f"divisible by num_attention_heads = {heads}")
        self.require(
            self.head_dim % 2 == 0, "hidden_size", f"an even multiple of num_attention_heads = {heads}, as RoPE needs"
        )
        self.require(
            heads % self.num_key_value_heads == 0, "num_key_value_heads", f"a divisor of num_attention_heads = {heads}"
        )
        self.require(self.hidden_act == "silu", "hidden_act", "'silu', the only activation implemented")
        self.require(self.attention_dropout == 0, "attention_dropout", "0, as dropout is not implemented")
        self.require(self.clip_qkv is None or self.clip_qkv > 0, "clip_qkv", "positive or None")
        self.require(self.initializer_range > 0, "initializer_range", "positive")
        self.require(self.rope_theta > 0, "rope_theta", "positive")
        self.require(
            self.pad_token_id is None or 0 <= self.pad_token_id < self.vocab_size,
            "pad_token_id",
            f"None or a token id below vocab_size = {self.vocab_size}",
        )

    def require(self, condition: bool, name: str, allowed: str) -> None:
        """Raises ValueError "<class>: <name> = <value> must be <allowed>." unless the condition holds."""
        if not condition:
            raise ValueError(f"{type(self).__name__}: {name} = {getattr(self, name)!r} must be {allowed}.")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def to_hf(self) -> dict[str, Any]:
        """The content of a Hugging Face config.json, which transformers 4 and 5 and `from_dict` read."""
        name = type(self).__name__.replace("Config", "ForCausalLM")
        return {"architectures": [name], "model_type": self.model_type, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The configuration of a Hugging Face config.json's content, of transformers 4 or 5.

        Bookkeeping keys are ignored. A key or a RoPE variant that this model does not implement is a ValueError: the
        model would load and compute something else.
        """
        model_type = values.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ValueError(f"model_type {model_type!r} is not {cls.model_type!r}, which {cls.__name__} describes.")
        known = {field.name for field in fields(cls)}
        settings = {name: value for name, value in values.items() if name not in BOOKKEEPING}
        for key in ("rope_parameters", "rope_scaling"):  # transformers 5 and 4
            settings |= _default_rope(key, settings.pop(key, None))
        for name in settings:
            if name not in known:
                raise ValueError(f"{cls.__name__} does not implement the setting {name!r}; {nearest(name, known)}")
        return cls(**settings)


def _allowed_types(annotation: Any) -> list[type]:
    return [get_origin(kind) or kind for kind in get_args(annotation) or (annotation,)]


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _default_rope(key: str, rope: Mapping[str, Any] | None) -> dict[str, float]:
    """The fields that a `rope_parameters` or `rope_scaling` table sets; ValueError for anything but plain RoPE."""
    if rope is None:
        return {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"{key} asks for RoPE of type {kind!r}; only 'default' is implemented.")
    if unknown := sorted(rope.keys() - ROPE_KEYS):
        raise ValueError(f"{key} sets {unknown[0]!r}, which is not implemented; plain RoPE has only rope_theta.")
    return {"rope_theta": rope["rope_theta"]} if rope.get("rope_theta") is not None else {}


@dataclass(kw_only=True)
class OlmoConfig(DecoderConfig):
    """Dense OLMo; the defaults are transformers' (the 7B model)."""

    model_type: ClassVar[str] = "olmo"

    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    max_position_embeddings: int = 2048


@dataclass(kw_only=True)
class OlmoeConfig(DecoderConfig):
    """Sparse OLMoE; the defaults are transformers'. `intermediate_size` is the width of one expert."""

    model_type: ClassVar[str] = "olmoe"
    SIZES: ClassVar[tuple[str, ...]] = (*DecoderConfig.SIZES, "num_experts", "num_experts_per_tok")

    hidden_size: int = 2048
    intermediate_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.01

    def validate(self) -> None:
        super().validate()
        self.require(
            self.num_experts_per_tok <= self.num_experts,
            "num_experts_per_tok",
            f"at most num_experts = {self.num_experts}",
        )
        self.require(self.rms_norm_eps > 0, "rms_norm_eps", "positive")
        self.require(self.router_aux_loss_coef >= 0, "router_aux_loss_coef", "zero or positive")


ModelConfig = OlmoConfig | OlmoeConfig


def from_hf(source: str | Path | Mapping[str, Any]) -> ModelConfig:
    """The configuration of a Hugging Face model folder (its config.json) or of that file's content.

    Raises ValueError where the file is missing or is not JSON, and for a model_type other than olmo or olmoe.
    """
    values = source if isinstance(source, Mapping) else read_config(Path(source))
    match values.get("model_type"):
        case "olmo":
            return OlmoConfig.from_dict(values)
        case "olmoe":
            return OlmoeConfig.from_dict(values)
        case other:
            raise ValueError(f"model_type {other!r} is not implemented; known: 'olmo', 'olmoe'.")


def read_config(folder: Path) -> dict[str, Any]:
    """The settings in a Hugging Face folder's config.json; raises ValueError where it is missing or holds others."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give a Hugging Face model folder, which holds a config.json.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): write or download it again.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, not an object of settings: write it again.")
    return values
