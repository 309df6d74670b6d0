"""Evaluation of a run: it changes no bit of the training, its loss is the plain model's, and a resumed run goes on."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import optimus_compiler as optimus
from optimus_compiler.config import load_config
from optimus_compiler.runtime.data.dataset import PreparedData
from optimus_compiler.runtime.data.labels import labels_of
from optimus_compiler.runtime.evaluate.accuracy import evaluate
from optimus_compiler.runtime.evaluate.encode import encode_tasks
from optimus_compiler.runtime.evaluate.open import open_model
from optimus_compiler.runtime.evaluate.tasks import load_tasks
from optimus_compiler.runtime.evaluate.validation import validation_loss
from optimus_compiler.runtime.metrics import read_evaluations, read_metrics
from optimus_compiler.runtime.run import Run, open_run
from optimus_compiler.runtime.trainer import RunFailedError, train
from tests.task_wheel import QUESTIONS, installed, write_wheel
from tests.tiny_run import write_data

HELD_OUT = "def g(y):\n    return y * 7\n" * 29


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("held-out"), HELD_OUT)


def opened(tiny: Path, output: Path, *settings: str) -> Run:
    return open_run(load_config(tiny / "tiny.toml", [f"data.path={tiny / 'data'}", "train.steps=5", *settings]), output)


def test_evaluations_are_the_plain_models_and_change_no_bit(tiny: Path, held_out: Path, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "wheel")
    settings = [f"data.validation_path={held_out}", "eval.every=3", 'eval.tasks=["arc_easy", "piqa"]', "eval.limit=1"]
    said: list[str] = []
    shown: list[tuple[str, int, int]] = []
    with installed(wheel):
        evaluated = train(
            opened(tiny, tmp_path / "evaluated", *settings),
            say=said.append,
            on_evaluating=lambda *each: shown.append(each),
        )
        tasks = load_tasks(["arc_easy", "piqa"], limit=1)
    alone = train(opened(tiny, tmp_path / "alone"))
    for name, weight in alone.full_state_dict().items():
        assert torch.equal(weight, evaluated.full_state_dict()[name]), name
    assert [each.loss for each in read_metrics(tmp_path / "evaluated")] == [
        each.loss for each in read_metrics(tmp_path / "alone")
    ]

    first, last = read_evaluations(tmp_path / "evaluated")
    assert (first.step, last.step) == (3, 5)
    assert [first.tokens, last.tokens] == [read_metrics(tmp_path / "alone")[step - 1].tokens for step in (3, 5)]
    subject = open_model(tmp_path / "evaluated", optimus.Mesh())
    data = PreparedData.open(held_out)
    ids = data.read(torch.arange(len(data)).numpy())
    assert len(ids) % 4  # the last step's rows are not full
    with torch.no_grad():
        logits = subject.model.module(ids).logits[:, :-1]
    labels = labels_of(ids, data.manifest.eos_id)[:, 1:]
    wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    assert last.validation_loss == pytest.approx(wanted, rel=1e-5)
    assert last.perplexity == pytest.approx(math.exp(wanted), rel=1e-5)
    encoded = encode_tasks(tasks, subject.tokenize, eos_id=subject.eos_id, max_length=16)
    results = evaluate(subject.model, encoded)
    assert last.tasks == {each.task: each.score for each in results} | {
        "average": sum(each.score for each in results) / 2
    }
    assert [line for line in said if line.startswith("step 5: validation loss ")]
    assert {name for name, _, _ in shown} == {"validation", "reading questions", "arc_easy", "piqa"}


def test_a_resumed_run_evaluates_what_is_left(tiny: Path, held_out: Path, tmp_path: Path) -> None:
    settings = [f"data.validation_path={held_out}", "eval.every=2"]
    train(opened(tiny, tmp_path / "run", "train.steps=3", "optimizer.decay_steps=5", *settings))
    train(opened(tiny, tmp_path / "run", *settings))
    train(opened(tiny, tmp_path / "whole", "optimizer.decay_steps=5", *settings))
    resumed, whole = read_evaluations(tmp_path / "run"), read_evaluations(tmp_path / "whole")
    assert [each.step for each in resumed] == [2, 3, 4, 5]
    assert {each.step: each.validation_loss for each in whole}.items() <= {
        each.step: each.validation_loss for each in resumed
    }.items()


def test_what_cannot_be_evaluated_is_refused_before_the_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optimus_compiler.runtime.data.prepare import prepare
    from tests.tiny_run import write_corpus, write_tokenizer

    corpus, tokenizer = write_corpus(tmp_path / "corpus.jsonl"), write_tokenizer(tmp_path / "tokenizer.json")
    prepare([corpus], tokenizer=tokenizer, context_length=8, output=tmp_path / "short")
    with pytest.raises(ValueError, match=r"was prepared with context length 8 and .* with 16: prepare it again"):
        opened(tiny, tmp_path / "run", f"data.validation_path={tmp_path / 'short'}", "eval.every=2")
    tokenizer.write_text(tokenizer.read_text() + " ")
    prepare([corpus], tokenizer=tokenizer, context_length=16, output=tmp_path / "other")
    with pytest.raises(ValueError, match=r"was prepared with another tokenizer than"):
        opened(tiny, tmp_path / "run", f"data.validation_path={tmp_path / 'other'}", "eval.every=2")
    with pytest.raises(ValueError, match=r"'piqua' is not a task: did you mean piqa"):
        opened(tiny, tmp_path / "run", 'eval.tasks=["piqua"]', "eval.every=2")
    monkeypatch.setitem(QUESTIONS, "piqa", [(["x"] * 2, [" 1", " return x + 1234567890" * 2], 0)])
    with installed(write_wheel(tmp_path / "wheel")), pytest.raises(ValueError, match="the model takes 1 to 16"):
        opened(tiny, tmp_path / "run", 'eval.tasks=["piqa"]', "eval.every=2")
    assert not (tmp_path / "run").exists()


def test_an_evaluation_that_was_not_done_comes_first(
    tiny: Path, held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM leaves little time, and an evaluation may fail: neither loses a step, nor an evaluation, nor the last."""
    settings = (f"data.validation_path={held_out}", "eval.every=1", "checkpoint.every=1")
    run = opened(tiny, tmp_path / "run", *settings)
    train(run, lambda metrics: os.kill(os.getpid(), signal.SIGTERM) if metrics.step == 1 else None)
    assert [each.step for each in read_evaluations(run.directory)] == [1]
    assert [path.name for path in (run.directory / "checkpoints").iterdir()] == ["step-1", "step-2"]

    def fail(*_: object, **__: object) -> float:
        raise ValueError("the loss on held-out text is nan")

    with monkeypatch.context() as broken:
        validation = "optimus_compiler.runtime.evaluate.while_training.validation_loss"
        with pytest.raises(RunFailedError, match="stopped after step 5: ValueError: the loss on held-out text is nan"):
            train(
                opened(tiny, tmp_path / "run", *settings),
                lambda metrics: broken.setattr(validation, fail) if metrics.step == 5 else None,
            )
    assert [each.step for each in read_evaluations(run.directory)] == [1, 2, 3, 4]

    lacking = opened(tiny, tmp_path / "run", *settings)
    assert lacking.steps_done == 5
    assert not lacking.is_done
    train(lacking)
    assert opened(tiny, tmp_path / "run", *settings).is_done
    train(opened(tiny, tmp_path / "whole", *settings))
    resumed, whole = read_evaluations(tmp_path / "run"), read_evaluations(tmp_path / "whole")
    assert [(each.step, each.validation_loss) for each in resumed] == [
        (each.step, each.validation_loss) for each in whole
    ]


def test_a_loss_that_is_no_number_is_named(tiny: Path, held_out: Path, tmp_path: Path) -> None:
    run = opened(tiny, tmp_path / "run", "train.steps=1")
    compiled = train(run)
    with torch.no_grad():
        compiled.get_parameter("lm_head.weight").fill_(float("nan"))
    with pytest.raises(ValueError, match=f"the loss on {held_out} is nan: the model's weights"):
        validation_loss(compiled, PreparedData.open(held_out))
