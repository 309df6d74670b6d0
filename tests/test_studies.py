"""The studies: what they compute from runs, how they start them, and (slow) each of them at a hundredth of its size."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import optimus_compiler as optimus
from bench.studies.corpus import Corpus, make_corpus
from bench.studies.dense_and_moe import tokens_to_reach
from bench.studies.options import Options
from bench.studies.restarts import FAILURES, injections
from bench.studies.routing import shares_of
from bench.studies.trainings import Training, configuration, train_all
from optimus_compiler.config import load_config
from optimus_compiler.models.olmoe import OlmoeTopKRouter
from optimus_compiler.runtime.data.dataset import PreparedData
from optimus_compiler.runtime.evaluate.open import open_model
from optimus_compiler.runtime.metrics import EVALUATIONS, METRICS, Evaluation, read_metrics
from optimus_compiler.runtime.resilience.inject import Injection
from optimus_compiler.runtime.run import open_run
from optimus_compiler.runtime.trainer import train

ROOT = Path(__file__).parent.parent


def test_a_loss_is_reached_between_two_points() -> None:
    curve = [(0.0, 8.0), (100.0, 6.0), (200.0, 5.0), (300.0, 5.0)]
    assert tokens_to_reach(curve, 6.5) == 75.0
    assert tokens_to_reach(curve, 5.0) == 200.0
    assert tokens_to_reach(curve, 4.9) is None
    assert tokens_to_reach(curve, 9.0) is None


def options(folder: Path, size: float = 1.0) -> Options:
    return Options(Corpus(folder / "training", folder / "validation"), folder, folder / "results", size)


def test_steps_are_scaled_but_never_too_few(tmp_path: Path) -> None:
    assert [options(tmp_path, size).scaled(1000) for size in (1.0, 0.1, 0.001)] == [1000, 100, 4]


def test_a_training_starts_as_its_mesh_and_launcher_say(tmp_path: Path) -> None:
    config = configuration(options(tmp_path), model={"hidden_size": 64}, steps=40, mesh={"dp": 2})
    dotted = Training(tmp_path / "runs" / "rate-0.01", config)
    command = dotted.command()
    file = tmp_path / "runs" / "rate-0.01.toml"
    assert command[1:8] == [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "optimus_compiler",
    ]
    assert command[8:] == ["pretrain", str(file), "--output", str(dotted.directory)]
    assert load_config(file) == config
    launched = Training(tmp_path / "launched", config, launch=("--nodes", "2")).command()
    assert launched[1:4] == ["-m", "optimus_compiler", "launch"]
    assert launched[-2:] == ["--nodes", "2"]


def test_a_training_is_done_when_its_last_step_is_whole_and_evaluated(tmp_path: Path) -> None:
    training = Training(tmp_path, configuration(options(tmp_path), model={}, steps=4))
    assert training.steps_done() == 0
    (tmp_path / METRICS).write_text('{"step": 3}\n{"step": 4')
    assert not training.is_done()
    (tmp_path / METRICS).write_text('{"step": 3}\n{"step": 4}\n')
    (tmp_path / EVALUATIONS).write_text(Evaluation(step=3, tokens=6).to_json() + "\n")
    assert not training.is_done()
    (tmp_path / EVALUATIONS).write_text(Evaluation(step=4, tokens=8).to_json() + "\n")
    assert training.is_done()
    training.command()
    assert training.is_done()
    other = Training(tmp_path, configuration(options(tmp_path), model={}, steps=3))
    with pytest.raises(RuntimeError, match=r"was trained with another configuration .*\.toml.: delete both"):
        other.is_done()


def test_a_training_that_fails_takes_the_others_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = [Training(tmp_path / name, configuration(options(tmp_path), model={}, steps=4)) for name in ("long", "bad")]
    seconds = {"long": 60, "bad": 0}
    monkeypatch.setattr(
        Training,
        "command",
        lambda self: [sys.executable, "-c", f"import time; time.sleep({seconds[self.directory.name]})"],
    )
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="bad stopped"):
        train_all(both)
    assert time.monotonic() - started < 50


def test_another_corpus_in_the_same_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.studies.corpus.HELD_OUT", 0.3)
    for name in ("one", "two"):
        words = " ".join(f"{name}{i % 89}" for i in range(30000))
        lines = [json.dumps({"text": words[start : start + 400]}) + "\n" for start in range(0, len(words), 400)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    corpus = make_corpus(tmp_path / "work", tmp_path / "one.jsonl")
    assert make_corpus(tmp_path / "work", tmp_path / "one.jsonl") == corpus
    assert len(PreparedData.open(corpus.validation)) > 0
    with pytest.raises(ValueError, match="exists and was prepared with"):
        make_corpus(tmp_path / "work", tmp_path / "two.jsonl")


def test_a_training_that_fails_is_named(tmp_path: Path) -> None:
    training = Training(tmp_path / "run", configuration(options(tmp_path), model={}, steps=4))
    with pytest.raises(RuntimeError, match=r"run stopped: .*training is not a prepared data folder.*run\.log"):
        train_all([training])


def test_failures_are_spread_over_steps_and_nodes() -> None:
    found = [Injection.parse(text) for text in injections(220)]
    assert [each.step for each in found] == [20 * number for number in range(1, FAILURES + 1)]
    assert [each.rank for each in found] == [0, 1] * (FAILURES // 2)
    assert [Injection.parse(text).step for text in injections(4)] == [2, 3]


def test_shares_are_counted_layer_by_layer(tiny: Path, tmp_path: Path) -> None:
    settings = [f"data.path={tiny / 'data'}", "train.steps=1"]
    train(open_run(load_config(tiny / "tiny.toml", settings), tmp_path / "run"))
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    ids = PreparedData.open(tiny / "data").read(torch.arange(3).numpy())
    shares_LE = shares_of(checkpoint, ids)

    module = open_model(checkpoint, optimus.Mesh()).model.module
    routers = [each for each in module.modules() if isinstance(each, OlmoeTopKRouter)]
    assert shares_LE.shape == (len(routers), 4)
    assert shares_LE.mean(dim=1).tolist() == pytest.approx([1.0] * len(routers))
    model: Any = module.model
    embedded = model.embed_tokens(ids)
    layer = model.layers[0]
    rope = model.rotary_emb(torch.arange(ids.shape[1])[None], embedded.dtype)
    attended = embedded + layer.self_attn(layer.input_layernorm(embedded), rope, None)
    chosen = layer.mlp.gate(layer.post_attention_layernorm(attended).flatten(0, 1))[2]
    counts = torch.bincount(chosen.flatten(), minlength=4)
    assert shares_LE[0].tolist() == pytest.approx((counts / counts.float().mean()).tolist())


STUDIES = {
    "dense_and_moe": ("study-dense-and-moe", 2),
    "model_scaling": ("study-model-scaling", 4),
    "batch_scaling": ("study-batch-scaling", 3),
    "components": ("study-components", 6),
    "restarts": ("study-restarts", 3),
    "routing": ("study-routing", 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES)
def test_a_study_runs(study: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "studies"
    corpus = folder / "corpus"
    if not corpus.is_dir():
        corpus.mkdir(parents=True)
        texts = [f"document {i}: " + " ".join(f"word{i * k % 997}" for k in range(400)) for i in range(900)]
        (corpus / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = [sys.executable, "-m", f"bench.studies.{study}", "--corpus", str(corpus), "--work", str(folder / "work")]
    command += ["--results", str(folder / "results"), "--size", "0.02"]
    for _ in range(2):  # the second time everything is there
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
        assert done.returncode == 0, done.stderr
    name, rows = STUDIES[study]
    result = json.loads((folder / "results" / f"{name}.json").read_text())
    assert len(result["rows"]) == rows
    assert all(len(row) == len(result["columns"]) for row in result["rows"])
    assert all(curve for curve in result["curves"].values())
    assert (folder / "results" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    if study == "restarts":
        failed = result["rows"][1]
        assert (failed[0], failed[1], failed[3]) == ("2 failures", "2", "none")
        runs = folder / "work" / "restarts"
        assert [each.loss for each in read_metrics(runs / "undisturbed")] == [
            each.loss for each in read_metrics(runs / "failures")
        ]
