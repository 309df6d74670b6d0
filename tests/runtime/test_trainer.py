"""Training end to end on a tiny model: the numbers, the files, reproducibility, and every refusal."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from optimus_compiler.compiled import CompiledModel
from optimus_compiler.config import ConfigError, load_config
from optimus_compiler.models import build
from optimus_compiler.runtime import trainer
from optimus_compiler.runtime.data.dataset import PreparedData
from optimus_compiler.runtime.metrics import StepMetrics, read_metrics
from optimus_compiler.runtime.optimizer import ShardedAdamW
from optimus_compiler.runtime.run import load_model_config, open_run
from optimus_compiler.runtime.schedule import learning_rate
from optimus_compiler.runtime.trainer import RunFailedError, train
from tests.tiny_run import CONTEXT_LENGTH


@pytest.fixture(scope="module")
def baseline(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run of tiny.toml."""
    run = tmp_path_factory.mktemp("baseline") / "run"
    run_once(tiny, run)
    return run


def run_once(tiny: Path, output: Path, *overrides: str) -> list[StepMetrics]:
    config = load_config(tiny / "tiny.toml", [f"data.path={tiny / 'data'}", *overrides])
    train(open_run(config, output))
    return read_metrics(output)


def test_run_equals_a_loop_written_by_hand(tiny: Path, tmp_path: Path) -> None:
    overrides = [f"data.path={tiny / 'data'}", "train.steps=6", "optimizer.lr=3e-3", "optimizer.warmup_steps=2"]
    run = open_run(load_config(tiny / "tiny.toml", overrides), tmp_path / "run")
    model = build(run.model_config)
    model.load_state_dict(trainer.compile_model(run.config, run.model_config, run.mesh).full_state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    train(run)

    data = PreparedData.open(tiny / "data")
    for step, metrics in enumerate(read_metrics(tmp_path / "run")):
        batch = data.read(np.arange(step * 4, step * 4 + 4))
        losses, auxiliary = [], []
        for ids in batch.split(2):
            out = model(ids, labels=ids, output_router_logits=True)
            (out.loss / 2).backward()
            losses.append(out.loss.item())
            auxiliary.append(out.aux_loss.item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf if step < 2 else 1.0)
        rate = learning_rate(step, peak=3e-3, minimum=4e-5, warmup_steps=2, decay_steps=6)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        assert (metrics.step, metrics.tokens, metrics.lr) == (step + 1, (step + 1) * 4 * CONTEXT_LENGTH, rate)
        assert metrics.loss == pytest.approx(sum(losses) / 2, rel=1e-5)
        assert metrics.aux_loss == pytest.approx(sum(auxiliary) / 2, rel=1e-5)
        assert metrics.loss == pytest.approx(metrics.ce_loss + 0.01 * metrics.aux_loss, rel=1e-6)
        assert metrics.grad_norm == pytest.approx(float(norm), rel=1e-4)


def test_loss_falls_and_every_step_has_a_line(tiny: Path, tmp_path: Path) -> None:
    metrics = run_once(tiny, tmp_path / "run", "train.steps=40", "optimizer.lr=1e-2", "optimizer.min_lr=1e-3")
    assert [m.step for m in metrics] == list(range(1, 41))
    assert metrics[0].loss == pytest.approx(math.log(300), abs=0.3)
    assert metrics[-1].loss < metrics[0].loss - 2
    for m in metrics:
        assert m.mfu is None
        assert m.expert_load_max_over_mean is not None
        assert 1 <= m.expert_load_max_over_mean <= 4
        assert m.seconds >= m.data_wait >= 0
        assert m.tokens_per_second == pytest.approx(4 * CONTEXT_LENGTH / m.seconds)


def test_one_seed_gives_identical_metrics(tiny: Path, baseline: Path, tmp_path: Path) -> None:
    first, second, other = (
        [(m.loss, m.ce_loss, m.aux_loss, m.grad_norm, m.expert_load_max_over_mean) for m in metrics]
        for metrics in (
            read_metrics(baseline),
            run_once(tiny, tmp_path / "second"),
            run_once(tiny, tmp_path / "other", "train.seed=1"),
        )
    )
    assert first == second
    assert first[0] != other[0]


def test_bf16_follows_fp32(tiny: Path, baseline: Path, tmp_path: Path) -> None:
    bf16 = run_once(tiny, tmp_path / "bf16", "train.precision=bf16")
    for exact, rounded in zip(read_metrics(baseline), bf16, strict=True):
        assert rounded.loss == pytest.approx(exact.loss, rel=0.02)
        assert rounded.loss != exact.loss


def test_dense_model_has_no_expert_load(tiny: Path, tmp_path: Path) -> None:
    size = "{vocab_size=300, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2}"
    metrics = run_once(tiny, tmp_path / "run", "model.name=olmo-tiny", f"model.overrides={size}", "train.steps=1")
    assert (metrics[0].aux_loss, metrics[0].expert_load_max_over_mean) == (0.0, None)
    assert metrics[0].loss == metrics[0].ce_loss


def test_run_directory_holds_the_resolved_configuration(tiny: Path, tmp_path: Path) -> None:
    config = load_config(tiny / "tiny.toml", [f"data.path={tiny / 'data'}"])
    run = open_run(config, tmp_path / "deep" / "run")
    written = load_config(tmp_path / "deep" / "run" / "config.toml")
    assert written.model_dump() == run.config.model_dump()
    assert (written.train.sequence_length, written.optimizer.decay_steps) == (CONTEXT_LENGTH, 4)
    assert sorted(path.name for path in run.directory.iterdir()) == ["config.toml"]


def test_model_from_a_hugging_face_folder(tiny: Path, tmp_path: Path) -> None:
    size = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "olmoe", **size, **heads}))
    base = ["model.overrides={num_experts = 8}", f"model.name={tmp_path}"]
    run = open_run(load_config(tiny / "tiny.toml", [*base, f"data.path={tiny / 'data'}"]), tmp_path / "run")
    assert (run.model_config.hidden_size, run.model_config.num_experts) == (32, 8)  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="has no setting 'num_expert'"):
        load_model_config(load_config(tiny / "tiny.toml", [*base, "model.overrides.num_expert=3"]).model)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["data.path=nowhere"], "nowhere is not a prepared data folder"),
        (["train.sequence_length=32"], "train.sequence_length is 32 and .* was prepared with context length 16"),
        (["model.overrides.vocab_size=299"], "has a vocabulary of 299 and .* one of 300"),
        (["model.overrides.vocab=1"], "vocab"),
        (["model.name=olmoe-tinny"], "olmoe-tiny"),
        (["mesh.ep=2"], "the mesh pp=1 x dp=1 x ep=2 x tp=1 needs 2 processes and this job has 1"),
        (["eval.every=10"], "eval.every = 10 with nothing to evaluate"),
        (["model.init=nowhere"], "model.init: nowhere is neither a checkpoint nor a Hugging Face folder"),
        (["train.global_batch_size=3"], "global_batch_size = 3 is not a multiple"),
    ],
)
def test_refused_run_leaves_nothing_behind(tiny: Path, tmp_path: Path, overrides: list[str], sentence: str) -> None:
    config = load_config(tiny / "tiny.toml", [f"data.path={tiny / 'data'}", *overrides])
    with pytest.raises(ValueError, match=sentence) as caught:
        open_run(config, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_missing_data_path_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.path is missing: add it, or pass --set data.path=DIR"):
        open_run(load_config(tiny / "tiny.toml"), tmp_path / "run")


class Watched:
    """Keeps the model that a run compiles, and its first weights, for a look after the run failed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, head_weight: float | None = None) -> None:
        compile_model = trainer.compile_model

        def keep(*arguments: Any) -> CompiledModel:
            self.compiled = compile_model(*arguments)
            if head_weight is not None:
                self.compiled.buckets[-1].weights[0] = head_weight
            self.drawn = self.weights()
            return self.compiled

        monkeypatch.setattr(trainer, "compile_model", keep)

    def weights(self) -> Tensor:
        return torch.cat([bucket.weights for bucket in self.compiled.buckets]).clone()


def test_non_finite_loss_stops_before_the_weights_change(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch, head_weight=math.nan)
    with pytest.raises(RunFailedError, match=r"step 1: the loss is nan.*stopped before the weights changed") as caught:
        run_once(tiny, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert torch.equal(watched.weights().nan_to_num(), watched.drawn.nan_to_num())
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""
    config = load_config(tiny / "tiny.toml", [f"data.path={tiny / 'data'}"])
    open_run(config, tmp_path / "run")  # nothing is lost by starting again there


def test_non_finite_gradient_stops_before_the_weights_change(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    norm = ShardedAdamW.gradient_norm

    def poisoned(optimizer: ShardedAdamW) -> Tensor:
        if optimizer.steps_taken == 2:
            watched.compiled.buckets[0].gradients[0] = math.inf
            watched.drawn = watched.weights()
        return norm(optimizer)

    monkeypatch.setattr(ShardedAdamW, "gradient_norm", poisoned)
    with pytest.raises(RunFailedError, match=r"step 3: .* the gradient norm inf"):
        run_once(tiny, tmp_path / "run")
    assert torch.equal(watched.weights(), watched.drawn)
    assert [m.step for m in read_metrics(tmp_path / "run")] == [1, 2]


def test_failure_in_the_middle_names_the_step_and_the_cause(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = PreparedData.read

    def torn(data: PreparedData, stored_B: NDArray[np.int64]) -> Tensor:
        if stored_B.max() >= 8:
            raise OSError("disk gone")
        return read(data, stored_B)

    monkeypatch.setattr(PreparedData, "read", torn)
    with pytest.raises(RunFailedError, match=r"stopped after step 2: OSError: disk gone"):
        run_once(tiny, tmp_path / "run")


def test_compile_cache_lies_in_the_run_unless_the_user_named_one(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []
    config = load_config(tiny / "tiny.toml", [f"data.path={tiny / 'data'}", "train.steps=1"])
    for name, given in (("own", None), ("given", str(tmp_path / "cache"))):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if given:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given)
        run = open_run(config, tmp_path / name)
        train(run, lambda metrics: seen.append(os.environ.get("TORCHINDUCTOR_CACHE_DIR")))
        assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == given
    assert seen == [str(tmp_path / "own" / "compile_cache"), str(tmp_path / "cache")]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_inductor_gives_identical_metrics_twice_and_follows_eager(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    setting = f"train.precision={precision}"
    eager = run_once(tiny, tmp_path / "eager", setting)
    first, second = (run_once(tiny, tmp_path / name, setting, "train.backend=inductor") for name in ("first", "second"))
    assert [(m.loss, m.grad_norm) for m in first] == [(m.loss, m.grad_norm) for m in second]
    for ours, plain in zip(first, eager, strict=True):
        assert ours.loss == pytest.approx(plain.loss, rel=1e-5 if precision == "fp32" else 1e-2)
