"""Whether a configuration's layout is possible for its model: asked before any process is connected."""

from collections.abc import Callable
from itertools import pairwise

from optimus_compiler.activation_memory import parse_bytes
from optimus_compiler.config import Config, ConfigError
from optimus_compiler.models import ModelConfig
from optimus_compiler.passes import PassError
from optimus_compiler.passes.pipeline_schedule import check_schedule


def micro_batches(config: Config) -> int:
    """How many micro-batches one (dp, ep) rank takes in a step."""
    sizes = config.mesh
    return config.global_batch_size() // (config.train.micro_batch_size * sizes.dp * sizes.ep)


def check_layout(config: Config, model: ModelConfig) -> None:
    """Raises ConfigError, one sentence with key and numbers, for sizes of [mesh] and [pipeline] that cannot be."""
    mesh, experts = config.mesh, getattr(model, "num_experts", 0)
    _check_divides("ep", mesh.ep, experts, "experts")
    _check_divides("tp", mesh.tp, model.num_attention_heads, "attention heads")
    _check_divides("tp", mesh.tp, model.num_key_value_heads, "key-value heads")
    _check_divides("tp", mesh.tp, model.intermediate_size, "columns of an expert" if experts else "columns of the MLP")
    _check_divides("tp", mesh.tp, model.vocab_size, "words of the vocabulary")
    if mesh.sequence_parallel and mesh.tp == 1:
        raise ConfigError("mesh.sequence_parallel needs mesh.tp = 2 or more: raise tp, or remove the key")
    if config.activation_checkpointing.budget is not None:
        _as_config_error("activation_checkpointing.budget", parse_bytes, config.activation_checkpointing.budget)
    if mesh.pp > 1:
        _check_pipeline(config, model.num_hidden_layers)


def _check_divides(dimension: str, ranks: int, number: int, what: str) -> None:
    if number % ranks:
        raise ConfigError(f"mesh.{dimension} = {ranks} does not divide the model's {number} {what}: change one of them")


def _as_config_error(where: str, check: Callable[..., object], *arguments: object) -> None:
    try:
        check(*arguments)
    except (PassError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_pipeline(config: Config, layers: int) -> None:
    mesh, pipeline = config.mesh, config.pipeline
    _as_config_error(
        "[pipeline]", check_schedule, pipeline.schedule, mesh.pp, pipeline.virtual_stages, micro_batches(config)
    )
    stages, boundaries = mesh.pp * pipeline.virtual_stages, pipeline.stage_boundaries
    if stages > layers + 2:
        raise ConfigError(f"mesh.pp * pipeline.virtual_stages = {stages} stages are more than the embedding, {layers} "
                          "layers and the head: lower one of them")  # fmt: skip
    if boundaries is not None and (
        len(boundaries) != stages - 1 or any(a >= b for a, b in pairwise([*boundaries, layers + 1]))
    ):
        raise ConfigError(f"pipeline.stage_boundaries = {boundaries} must be {stages - 1} rising layer numbers from 1 "
                          f"to {layers}")  # fmt: skip
