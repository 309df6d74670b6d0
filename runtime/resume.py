"""What a resumed run keeps of its first start, and which changed settings it refuses."""

from collections.abc import Iterable
from pathlib import Path

from optimus_compiler.config import Config, ConfigError, known_keys, nearest_key, tables

# Where and how a run computes, not what: these may change between two starts.
FREE_SECTIONS = ("mesh", "pipeline", "activation_checkpointing", "checkpoint", "resilience", "log", "eval")
FREE_KEYS = ("train.steps", "optimizer.sharding", "optimizer.zero", "data.validation_path")
BY_CONTENTS = ("model.name", "model.overrides", "data.path")  # what they lead to must be the same


def keep_first_values(config: Config, first: Config) -> Config:
    """`config` with the defaults that depend on other keys, and that it leaves open, as they were at the first start.

    A run that is given more steps, or another mesh, keeps its schedule and its batches.
    """
    train = config.train
    if train.global_batch_size is None:
        train = train.model_copy(update={"global_batch_size": first.train.global_batch_size})
    open_keys = [key for key in ("warmup_steps", "decay_steps") if getattr(config.optimizer, key) is None]
    kept = {key: getattr(first.optimizer, key) for key in open_keys}
    return config.model_copy(update={"train": train, "optimizer": config.optimizer.model_copy(update=kept)})


def refuse_changes(
    run: Path, before: Config, now: Config, *, same_model: bool, same_data: bool, allowed: Iterable[str]
) -> None:
    """Raises ConfigError, naming the keys, when settings that alter training differ and are not `allowed` to.

    same_model, same_data: whether the model's configuration and the prepared data are those of before, wherever they
    now lie.
    """
    for key in allowed:
        if key not in known_keys():
            raise ConfigError(f"--allow-changed {key}: there is no such key{nearest_key(key.split('.', 1))}")
    old, new = tables(before), tables(now)
    changed = [key for key in known_keys() if _value(old, key) != _value(new, key) and not _is_free(key)]
    if not same_model:
        differing = [key for key in ("model.name", "model.overrides") if _value(old, key) != _value(new, key)]
        changed = (differing or ["model.name"]) + changed
    if not same_data:
        changed.append("data.path")
    refused = [key for key in changed if key not in allowed]
    if refused:
        what = ", ".join(_difference(key, _value(old, key), _value(new, key)) for key in refused)
        flags = " ".join(f"--allow-changed {key}" for key in refused)
        raise ConfigError(f"{run} was trained with other settings: {what}: set them back, or pass {flags}")


def _is_free(key: str) -> bool:
    return key in (*FREE_KEYS, *BY_CONTENTS) or key.partition(".")[0] in FREE_SECTIONS


def _value(table: dict[str, dict[str, object]], key: str) -> object:
    section, _, name = key.partition(".")
    return table[section][name]


def _difference(key: str, before: object, now: object) -> str:
    return f"{key} (was {before!r}, now {now!r})" if before != now else f"{key} (the same name, other contents)"
