"""Metrics: the lines that are read back, and the FLOPs of a token."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from optimus_compiler.models import from_name
from optimus_compiler.runtime.metrics import StepMetrics, flops_per_token, peak_flops, peak_memory, read_metrics

STEP = StepMetrics(
    step=1,
    tokens=64,
    loss=5.5,
    ce_loss=5.25,
    aux_loss=1.0,
    grad_norm=2.0,
    lr=1e-4,
    tokens_per_second=640.0,
    tflops=0.5,
    mfu=None,
    peak_memory=1024,
    data_wait=0.0,
    expert_load_max_over_mean=1.5,
    seconds=0.1,
)


def write(run: Path, text: str) -> None:
    run.mkdir()
    (run / "metrics.jsonl").write_text(text)


def lines(*steps: StepMetrics) -> str:
    return "".join(step.to_json() + "\n" for step in steps)


def test_keys_of_a_line() -> None:
    # fmt: off
    assert list(json.loads(STEP.to_json())) == [
        "step", "tokens", "loss", "ce_loss", "aux_loss", "grad_norm", "lr", "tokens_per_second", "tflops", "mfu",
        "peak_memory", "data_wait", "expert_load_max_over_mean", "seconds", "checkpoint_stall",
    ]
    # fmt: on
    assert json.loads(STEP.to_json()) == asdict(STEP)


def test_step_written_twice_counts_once_and_the_later_line_wins(tmp_path: Path) -> None:
    first, second, again = STEP, replace(STEP, step=2, loss=5.0), replace(STEP, step=2, loss=4.0)
    write(tmp_path / "run", lines(first, second, again))
    assert read_metrics(tmp_path / "run") == [first, again]


def test_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "run", lines(STEP) + replace(STEP, step=2).to_json()[:40])
    assert read_metrics(tmp_path / "run") == [STEP]


@pytest.mark.parametrize("bad", ["{", "[]", "", '{"step": 2}', '{"step": 2, "other": 1}'])
def test_broken_line_is_named(tmp_path: Path, bad: str) -> None:
    write(tmp_path / "run", lines(STEP) + bad + "\n" + lines(STEP))
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 is no record .*: delete that line"):
        read_metrics(tmp_path / "run")


def test_folder_without_metrics_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a run directory: it has no metrics.jsonl"):
        read_metrics(tmp_path)
    write(tmp_path / "run", "")
    with pytest.raises(ValueError, match="holds no complete step yet"):
        read_metrics(tmp_path / "run")


def test_flops_of_a_token_of_a_moe_counted_by_hand() -> None:
    size = {"vocab_size": 100, "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = from_name("olmoe-tiny", **size, num_experts=4, num_experts_per_tok=2, intermediate_size=5)
    layer = 4 * 8 * 8 + 4 * 8 + 4 * 8 + 2 * 3 * 8 * 5  # q k v o, four norms, router, two of four experts
    active = 100 * 8 + 3 * layer + 8  # the head, the layers, the last norm; the embedding is only looked up
    assert flops_per_token(config, 16) == 6 * active + 12 * 3 * 8 * 16


def test_tied_embedding_multiplies_as_the_head() -> None:
    size = {"vocab_size": 100, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    tied = from_name("olmo-tiny", **size, intermediate_size=16, tie_word_embeddings=True)
    untied = from_name("olmo-tiny", **size, intermediate_size=16, tie_word_embeddings=False)
    assert flops_per_token(tied, 4) == flops_per_token(untied, 4) == 6 * (100 * 8 + 4 * 64 + 3 * 8 * 16) + 12 * 8 * 4


def test_cpu_has_no_known_peak_and_a_resident_size() -> None:
    assert peak_flops(torch.device("cpu"), "bf16") is None
    assert 50 * 2**20 < peak_memory(torch.device("cpu")) < 2**40
