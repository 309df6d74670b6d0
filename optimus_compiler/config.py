"""The configuration of a run: a typed schema, loading from TOML with overrides, resolving defaults, writing back."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the source and the key."""


class Section(BaseModel):
    """A table of the file: unknown keys are errors, values are never coerced from another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelSection(Section):
    name: str  # a bundled variant, an Intel tag string, or a Hugging Face folder
    overrides: dict[str, Any] = {}
    init: str = "random"


class DataSection(Section):
    path: str | None = None  # a folder written by `optimus prepare`
    validation_path: str | None = None  # a folder of held-out text: its loss is measured every eval.every steps
    document_mask: bool = False


class MeshSection(Section):
    pp: Size = 1
    dp: Size = 1
    ep: Size = 1
    tp: Size = 1
    dispatch: Literal["allgather", "alltoall"] = "allgather"
    expert_rows: Annotated[float, Field(gt=0)] | Literal["exact"] = 2.0
    sequence_parallel: bool = False


class TrainSection(Section):
    steps: Size
    sequence_length: Size | None = None  # default: the context length of the prepared data
    micro_batch_size: Size = 1  # sequences
    global_batch_size: Size | None = None  # sequences; default: micro_batch_size * dp * ep * pp
    seed: Count = 0
    precision: Literal["bf16", "fp32"] = "bf16"  # bf16: weights in bf16, master copy and moments in fp32
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    force_uniform_routing: bool = False


class OptimizerSection(Section):
    lr: Annotated[float, Field(ge=0)] = 4e-4
    min_lr: Annotated[float, Field(ge=0)] = 4e-5
    warmup_steps: Count | None = None  # default: min(2500, steps / 10)
    decay_steps: Size | None = None  # default: steps
    betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.99)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    clip_after_warmup: bool = True
    sharding: Literal["epso", "so", "none"] = "epso"
    zero: Literal[1, 2] = 1
    reduce_dtype: Literal["bf16", "fp32"] = "bf16"


class PipelineSection(Section):
    schedule: Literal["gpipe", "1f1b", "interleaved-1f1b"] = "1f1b"
    virtual_stages: Size = 1
    stage_boundaries: list[Size] | None = None


class ActivationCheckpointingSection(Section):
    blocks: list[Literal["norm", "attention", "moe"]] = []
    budget: str | None = None  # for example "20 GiB"
    keep_gathered: bool = False


class KeepPersistent(Section):
    """Which checkpoints of weights alone stay: the `last` ones (0: all), and all of steps that `every` divides."""

    last: Count = 0
    every: Count = 0  # 0: none beyond the last


class CheckpointSection(Section):
    every: Count = 1000  # steps between full checkpoints; 0: none
    persistent_every: Count = 0  # steps between checkpoints of weights alone; 0: none
    keep_persistent: Count | KeepPersistent = 0  # n: the last n (0: all); {last = n, every = k}
    asynchronous: bool = Field(default=False, alias="async")
    scattered: bool = False  # model-parallel shard m is written by dp index m mod dp, not always by 0
    transfer: Literal["broadcast", "all_reduce"] = "broadcast"  # how weights reach the replicas when one has read them

    def retention(self) -> KeepPersistent:
        """Which checkpoints of weights alone stay."""
        keep = self.keep_persistent
        return KeepPersistent(last=keep) if isinstance(keep, int) else keep


class ResilienceSection(Section):
    heartbeat_timeout: Annotated[float, Field(gt=0)] | None = None  # seconds
    max_restarts: Count | None = None
    loss_spike_sigma: Annotated[float, Field(gt=0)] | None = None
    on_divergence: Literal["stop", "rollback"] = "stop"


class LogSection(Section):
    every: Size = 1  # steps between two printed progress lines where the output is not a terminal
    tensorboard: bool = False
    wandb: bool = False


class EvalSection(Section):
    every: Count = 0  # steps between two evaluations, of which one follows the last step; 0: none
    tasks: list[str] = []  # names of `optimus evaluate --tasks`, beside the loss on data.validation_path
    limit: Count = 0  # of each task the first so many documents; 0: all


class Config(Section):
    """A run. The defaults are the paper's (arXiv 2604.00785, training set-up) where it names a value."""

    model: ModelSection
    data: DataSection = DataSection()
    mesh: MeshSection = MeshSection()
    train: TrainSection
    optimizer: OptimizerSection = OptimizerSection()
    pipeline: PipelineSection = PipelineSection()
    activation_checkpointing: ActivationCheckpointingSection = ActivationCheckpointingSection()
    checkpoint: CheckpointSection = CheckpointSection()
    resilience: ResilienceSection = ResilienceSection()
    log: LogSection = LogSection()
    eval: EvalSection = EvalSection()

    def global_batch_size(self) -> int:
        """Sequences a step: what train.global_batch_size says, else one micro-batch a (dp, ep) rank and stage."""
        ranks = self.mesh.dp * self.mesh.ep * self.mesh.pp
        return self.train.global_batch_size or self.train.micro_batch_size * ranks


class ResolvedTrainSection(TrainSection):
    sequence_length: Size
    global_batch_size: Size


class ResolvedOptimizerSection(OptimizerSection):
    warmup_steps: Count
    decay_steps: Size


class ResolvedConfig(Config):
    """A run whose every default is filled in."""

    train: ResolvedTrainSection
    optimizer: ResolvedOptimizerSection


def load_config(source: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a TOML file, or the bundled file of that name ("mula-7b-a1b"), and apply `section.key=value` overrides.

    Values of overrides are TOML; a word that is not a TOML value is taken as a string. Raises ConfigError in one
    sentence for a missing file, a broken file, an unknown key (naming the nearest known one) and a bad value.
    """
    values = _read_toml(source)
    for override in overrides:
        _apply_override(values, override)
    return _validated(values, str(source))


def parse_config(text: str, source: str) -> Config:
    """The configuration in TOML text; `source` names it in the message of a ConfigError."""
    return _validated(_parse_toml(text, source), source)


def bundled_configs() -> list[str]:
    """Names of the configurations that come with the package."""
    return sorted(entry.name.removesuffix(".toml") for entry in _bundle().iterdir() if entry.name.endswith(".toml"))


def resolve(config: Config, *, context_length: int) -> ResolvedConfig:
    """Fill in every default that depends on another value; `context_length` is that of the prepared data.

    Raises ConfigError when values contradict each other.
    """
    train, optimizer, mesh = config.train, config.optimizer, config.mesh
    ranks = mesh.dp * mesh.ep
    global_batch_size = config.global_batch_size()
    warmup_steps = min(2500, train.steps // 10) if optimizer.warmup_steps is None else optimizer.warmup_steps
    decay_steps = optimizer.decay_steps or train.steps
    if global_batch_size % (train.micro_batch_size * ranks):
        raise ConfigError(
            f"train.global_batch_size = {global_batch_size} is not a multiple of micro_batch_size * dp * ep = "
            f"{train.micro_batch_size} * {mesh.dp} * {mesh.ep}: change one of them"
        )
    if warmup_steps > decay_steps:
        raise ConfigError(
            f"optimizer.warmup_steps = {warmup_steps} is more than decay_steps = {decay_steps}: change one of them"
        )
    if optimizer.min_lr > optimizer.lr:
        raise ConfigError(f"optimizer.min_lr = {optimizer.min_lr} is more than lr = {optimizer.lr}: change one of them")
    evaluated = bool(config.data.validation_path or config.eval.tasks)
    if config.eval.every and not evaluated:
        raise ConfigError(
            f"eval.every = {config.eval.every} with nothing to evaluate: set data.validation_path or eval.tasks"
        )
    if evaluated and not config.eval.every:
        given = "data.validation_path" if config.data.validation_path else "eval.tasks"
        raise ConfigError(
            f"{given} is set and eval.every is 0, which evaluates nothing: set eval.every to a step count"
        )
    resolved_train = {
        "sequence_length": train.sequence_length or context_length,
        "global_batch_size": global_batch_size,
    }
    resolved_optimizer = {"warmup_steps": warmup_steps, "decay_steps": decay_steps}
    return ResolvedConfig(
        **dict(config)
        | {
            "train": ResolvedTrainSection(**dict(train) | resolved_train),
            "optimizer": ResolvedOptimizerSection(**dict(optimizer) | resolved_optimizer),
        }
    )


def to_toml(config: Config) -> str:
    """The configuration as TOML text that `load_config` reads back to an equal one; unset keys are left out."""
    lines: list[str] = []
    for section, table in tables(config).items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_toml(value)}" for key, value in table.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def tables(config: Config) -> dict[str, dict[str, Any]]:
    """The configuration as plain tables of keys, by the names of the file."""
    return config.model_dump(by_alias=True)


def _validated(values: dict[str, Any], source: str) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_describe(error)}") from None


def _parse_toml(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from None


def _bundle() -> Any:
    return files("optimus_compiler") / "configs"


def _read_toml(source: str | Path) -> dict[str, Any]:
    path = Path(source)
    if path.is_file():
        text = path.read_text(encoding="utf-8")
    elif str(source) in bundled_configs():
        text = (_bundle() / f"{source}.toml").read_text(encoding="utf-8")
    else:
        nearest = get_close_matches(str(source), bundled_configs(), n=1)
        known = ", ".join(bundled_configs())
        hint = f"did you mean {nearest[0]}?" if nearest else f"give a TOML file, or one of {known}"
        raise ConfigError(f"{source} is neither a file nor a bundled configuration: {hint}")
    return _parse_toml(text, str(source))


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *tables, last = key.strip().split(".")
    if not equals or not tables or not last:
        raise ConfigError(f"--set {override}: write section.key=value, for example train.steps=100")
    for depth, table in enumerate(tables):
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise ConfigError(f"--set {override}: {'.'.join(tables[: depth + 1])} is not a table")
    values[last] = _parse_value(override, text.strip())


def _parse_value(override: str, text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[:1] in {'"', "'", "[", "{"}:  # meant as TOML: a typing mistake must not become a string
            raise ConfigError(f"--set {override}: the value is not valid TOML: {error}") from None
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _describe(error: ValidationError) -> str:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"][:2]]
    key = ".".join(path)
    if first["type"] == "missing":
        return f"{key} is missing: add it, or pass --set {key}=..."
    if first["type"] == "extra_forbidden":
        return f"{key} is not a known key{nearest_key(path)}"
    return f"{key} = {first['input']!r}: {first['msg'][:1].lower()}{first['msg'][1:]}"


def known_keys() -> list[str]:
    """Every key of a configuration, as section.key."""
    return [f"{name}.{key}" for name, info in Config.model_fields.items() for key in _aliases(info.annotation)]


def nearest_key(path: list[str]) -> str:
    """A hint: the closest name in the same table, or the same name in another table."""
    sections = {name: set(_aliases(info.annotation)) for name, info in Config.model_fields.items()}
    if len(path) == 1 or path[0] not in sections:
        nearest = get_close_matches(path[0], sections, n=1)
        return f": did you mean {nearest[0]}?" if nearest else f": the tables are {', '.join(sections)}"
    section, key = path
    elsewhere = [f"{name}.{key}" for name, keys in sections.items() if key in keys]
    same_table = [f"{section}.{name}" for name in get_close_matches(key, sections[section], n=1)]
    everywhere = [f"{name}.{k}" for name, keys in sections.items() for k in get_close_matches(key, keys, n=1)]
    hints = elsewhere or same_table or everywhere
    return f": did you mean {hints[0]}?" if hints else f": [{section}] has {', '.join(sorted(sections[section]))}"


def _aliases(section: Any) -> list[str]:
    return [info.alias or name for name, info in section.model_fields.items()]


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(_toml(item) for item in value)}]"
        case Mapping():
            return f"{{{', '.join(f'{_toml(key)} = {_toml(item)}' for key, item in value.items())}}}"
        case _:
            return str(value)  # integers and floats print as TOML reads them, inf and nan included
