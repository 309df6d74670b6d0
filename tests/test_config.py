"""Configuration: values, defaults, overrides, round trip, the bundled runs, and the sentence of every refusal."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from optimus_compiler.config import (
    ConfigError,
    bundled_configs,
    load_config,
    resolve,
    to_toml,
)

MINIMAL = '[model]\nname = "olmoe-tiny"\n[train]\nsteps = 100\n'


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def test_defaults_are_the_papers(minimal: Path) -> None:
    config = load_config(minimal)
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.min_lr, optimizer.betas, optimizer.eps) == (4e-4, 4e-5, (0.9, 0.99), 1e-8)
    assert (optimizer.weight_decay, optimizer.clip_norm, optimizer.clip_after_warmup) == (0.1, 1.0, True)
    assert (optimizer.sharding, optimizer.zero, optimizer.reduce_dtype) == ("epso", 1, "bf16")
    assert (config.train.precision, config.train.backend, config.train.micro_batch_size) == ("bf16", "inductor", 1)
    assert (config.mesh.dispatch, config.mesh.expert_rows, config.pipeline.schedule) == ("allgather", 2.0, "1f1b")


@pytest.mark.parametrize(("steps", "warmup"), [(5, 0), (100, 10), (25_000, 2500), (600_000, 2500)])
def test_resolve_fills_in_what_depends_on_other_keys(minimal: Path, steps: int, warmup: int) -> None:
    config = load_config(minimal, [f"train.steps={steps}", "train.micro_batch_size=3"])
    resolved = resolve(config, context_length=512)
    assert (resolved.optimizer.warmup_steps, resolved.optimizer.decay_steps) == (warmup, steps)
    assert (resolved.train.sequence_length, resolved.train.global_batch_size) == (512, 3)


def test_resolve_keeps_what_is_given(minimal: Path) -> None:
    overrides = ["train.sequence_length=64", "train.global_batch_size=6", "optimizer.warmup_steps=0"]
    resolved = resolve(load_config(minimal, [*overrides, "optimizer.decay_steps=7"]), context_length=512)
    assert (resolved.train.sequence_length, resolved.train.global_batch_size) == (64, 6)
    assert (resolved.optimizer.warmup_steps, resolved.optimizer.decay_steps) == (0, 7)


def test_default_batch_covers_every_data_rank_and_pipeline_stage(minimal: Path) -> None:
    config = load_config(minimal, ["mesh.pp=4", "mesh.dp=2", "mesh.ep=3", "train.micro_batch_size=5"])
    assert resolve(config, context_length=8).train.global_batch_size == 5 * 2 * 3 * 4


def test_toml_round_trip(minimal: Path, tmp_path: Path) -> None:
    overrides = [
        'data.path=a "quoted" \\ path ü\x7f',
        "model.overrides={num_hidden_layers=4, rope_theta=1e6, tie_word_embeddings=true, hidden_act='silu'}",
        "optimizer.clip_norm=inf",
        "mesh.expert_rows=exact",
        'activation_checkpointing.blocks=["norm", "moe"]',
        "checkpoint.async=true",
    ]
    config = resolve(load_config(minimal, overrides), context_length=256)
    written = tmp_path / "config.toml"
    written.write_text(to_toml(config), encoding="utf-8")
    read = load_config(written)
    assert read.model_dump() == config.model_dump()
    assert read.optimizer.clip_norm == math.inf
    assert read.model.overrides["rope_theta"] == 1e6


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.path=/some/dir", "/some/dir"),
        ("data.path = spaced", "spaced"),
        ("data.path='1'", "1"),
        ("data.path=a=b", "a=b"),
        ("data.path=", ""),
        ("data.path=x\ny = 1", "x\ny = 1"),
    ],
)
def test_override_values(minimal: Path, override: str, expected: str) -> None:
    assert load_config(minimal, [override]).data.path == expected


def test_overrides_apply_in_order_and_reach_nested_tables(minimal: Path) -> None:
    config = load_config(minimal, ["train.steps=1", "train.steps=1_000", "model.overrides.num_experts=4"])
    assert config.train.steps == 1000
    assert config.model.overrides == {"num_experts": 4}


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["train.stepz=1"], "train.stepz is not a known key: did you mean train.steps?"),
        (["train.lr=1"], "train.lr is not a known key: did you mean optimizer.lr?"),
        (["optimiser.lr=1"], "optimiser is not a known key: did you mean optimizer?"),
        (["checkpoint.asinc=true"], "checkpoint.asinc is not a known key: did you mean checkpoint.async?"),
        (["zzz=1"], "--set zzz=1: write section.key=value"),
        (["data.qqqq=1"], "data.qqqq is not a known key: [data] has document_mask, path, validation_path"),
        (["train.steps"], "--set train.steps: write section.key=value"),
        (["train.steps.x=1"], "--set train.steps.x=1: train.steps is not a table"),
        (["train.steps=ten"], "train.steps = 'ten': input should be a valid integer"),
        (["train.steps=0"], "train.steps = 0: input should be greater than or equal to 1"),
        (["train.steps=1.5"], "train.steps = 1.5: input should be a valid integer"),
        (["train.steps=true"], "train.steps = True: input should be a valid integer"),
        (["optimizer.lr='4e-4'"], "optimizer.lr = '4e-4': input should be a valid number"),
        (["optimizer.betas=[0.9]"], "optimizer.betas"),
        (["train.precision=fp16"], "train.precision = 'fp16': input should be 'bf16' or 'fp32'"),
        (["mesh.expert_rows=many"], "mesh.expert_rows = 'many'"),
        (["activation_checkpointing.blocks=[1"], "the value is not valid TOML"),
        (["activation_checkpointing.blocks=['mlp']"], "activation_checkpointing.blocks"),
        (["model.overrides=3"], "model.overrides = 3: input should be a valid dictionary"),
    ],
)
def test_refusals_are_one_sentence_that_names_the_key(minimal: Path, overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, overrides)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_key_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\nname = "olmoe-tiny"\n[train]\nseed = 1\n')
    with pytest.raises(ConfigError, match=r"run.toml: train.steps is missing: add it, or pass --set train.steps="):
        load_config(path)


def test_broken_toml_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[model\n")
    with pytest.raises(ConfigError, match=r"run.toml is not valid TOML"):
        load_config(path)


def test_unknown_source_names_the_nearest_bundled_one() -> None:
    with pytest.raises(ConfigError, match=r"mula-7b-a1 is neither a file nor .* did you mean mula-7b-a1b"):
        load_config("mula-7b-a1")
    with pytest.raises(ConfigError, match=r"give a TOML file, or one of mula-100b-a7b, mula-1b"):
        load_config("nowhere.toml")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["train.micro_batch_size=4", "train.global_batch_size=6"], "global_batch_size = 6 is not a multiple of"),
        (["optimizer.warmup_steps=101"], "warmup_steps = 101 is more than decay_steps = 100"),
        (["optimizer.lr=1e-5"], "min_lr = 4e-05 is more than lr = 1e-05"),
        (["eval.every=10"], "eval.every = 10 with nothing to evaluate: set data.validation_path or eval.tasks"),
        (['eval.tasks=["piqa"]'], "eval.tasks is set and eval.every is 0"),
        (["data.validation_path=held-out"], "data.validation_path is set and eval.every is 0"),
    ],
)
def test_contradictions_are_refused(minimal: Path, overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(load_config(minimal, overrides), context_length=8)


PAPER = {
    "mula-1b": {"dp": 3072},
    "mula-7b-a1b": {"dp": 3072},
    "mula-20b-a2b": {"dp": 256, "ep": 12},
    "mula-100b-a7b": {"pp": 4, "dp": 64, "ep": 12},
    "mula-220b-a10b": {"pp": 8, "dp": 32, "ep": 12},
}


def test_the_five_runs_of_the_paper_are_bundled() -> None:
    assert bundled_configs() == sorted(PAPER)


@pytest.mark.parametrize(("name", "layout"), PAPER.items())
def test_run_of_the_paper(name: str, layout: dict[str, int]) -> None:
    config = resolve(load_config(name), context_length=2048)
    train, mesh, optimizer = config.train, config.mesh, config.optimizer
    assert config.model.name == name
    assert (mesh.pp, mesh.dp, mesh.ep, mesh.tp) == (layout.get("pp", 1), layout["dp"], layout.get("ep", 1), 1)
    assert mesh.pp * mesh.dp * mesh.ep * mesh.tp == 256 * 12
    assert train.global_batch_size * train.sequence_length == 6_291_456  # 6.3 M tokens
    micro_batches = train.global_batch_size // (train.micro_batch_size * mesh.dp * mesh.ep)
    assert micro_batches == {"mula-100b-a7b": 4, "mula-220b-a10b": 8}.get(name, 1)
    assert 0 <= 4e12 - train.steps * 6_291_456 < 6_291_456  # 4 T tokens, once
    assert (optimizer.lr, optimizer.min_lr, optimizer.warmup_steps) == (4e-4, 4e-5, 2500)
    assert optimizer.decay_steps == train.steps
    assert (optimizer.clip_norm, optimizer.clip_after_warmup, optimizer.reduce_dtype) == (1.0, True, "bf16")
    assert optimizer.sharding == ("so" if name in ("mula-1b", "mula-7b-a1b") else "epso")
    blocks = {"mula-100b-a7b": ["moe"], "mula-220b-a10b": ["norm", "attention", "moe"]}.get(name, [])
    assert config.activation_checkpointing.blocks == blocks
