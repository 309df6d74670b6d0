"""What a run is measured by: the records of metrics.jsonl and evaluations.jsonl, read back too; the FLOPs of a step."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from optimus_compiler.models import ModelConfig, parameter_count

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"

# Dense bf16 peak of one device, FLOP/s, by a part of the name that the driver reports.
_BF16_PEAK = {"A100": 312e12, "H100": 989e12, "H200": 989e12}


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl. `step` counts from 1 and `tokens` from the start of the run; times are in seconds."""

    step: int
    tokens: int
    loss: float
    ce_loss: float
    aux_loss: float
    grad_norm: float  # before clipping
    lr: float
    tokens_per_second: float
    tflops: float
    mfu: float | None  # share of the device's peak; None where the peak is not known
    peak_memory: int  # bytes since the process started: of the device, or resident on a CPU
    data_wait: float  # time the step waited for its batch
    expert_load_max_over_mean: float | None  # None for a dense model
    seconds: float  # wall time of the step
    checkpoint_stall: float = 0.0  # time that training waited for checkpoints before the step

    def to_json(self) -> str:
        """The line, without its newline."""
        return json.dumps(asdict(self), allow_nan=False)


@dataclass(frozen=True)
class Evaluation:
    """One line of evaluations.jsonl: what the model of `step` is worth on text that it was not trained on."""

    step: int
    tokens: int  # seen in training until then
    validation_loss: float | None = None  # cross entropy in nats a token; None where there is no validation data
    perplexity: float | None = None  # its exponential
    tasks: dict[str, float] = field(default_factory=dict)  # a task's primary accuracy, 0 to 1, and their "average"
    seconds: float = 0.0

    def to_json(self) -> str:
        """The line, without its newline."""
        return json.dumps(asdict(self), allow_nan=False)


Line = TypeVar("Line", StepMetrics, Evaluation)


def read_metrics(run: Path) -> list[StepMetrics]:
    """The steps of a run in order; of a step that was written twice (redone after a restart) the later line counts.

    A last line without its newline is a write that a crash cut short, and is left out. Raises ValueError naming the
    file, and the line where there is one.
    """
    path = run / METRICS
    if not path.is_file():
        raise ValueError(f"{run} is not a run directory: it has no {METRICS}")
    steps = _read_lines(path, StepMetrics)
    if not steps:
        raise ValueError(f"{path} holds no complete step yet: wait for the first one")
    return steps


def read_evaluations(run: Path) -> list[Evaluation]:
    """The evaluations of a run by step, as read_metrics reads steps; none where there were none."""
    path = run / EVALUATIONS
    return _read_lines(path, Evaluation) if path.is_file() else []


def _read_lines(path: Path, kind: type[Line]) -> list[Line]:
    *lines, _cut_short = path.read_text(encoding="utf-8").split("\n")
    found: dict[int, Line] = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = kind(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is no record ({error}): delete that line") from None
        found[record.step] = record
    return [found[step] for step in sorted(found)]


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs of forward and backward for one token: 6 * N + 12 * layers * hidden * S (PaLM, arXiv 2204.02311, app. B).

    N are the active parameters that multiply: an untied input embedding is only looked up. Attention is counted whole,
    the half that a causal kernel skips included, as is the custom; recomputation is not counted.
    """
    _, active = parameter_count(config)
    lookup = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    attention = 12 * config.num_hidden_layers * config.hidden_size * sequence_length
    return 6 * (active - lookup) + attention


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's dense peak in FLOP/s for "bf16"; None where it is not known (any CPU, any other precision)."""
    if device.type != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _BF16_PEAK.items() if part in name), None)


def peak_memory(device: torch.device) -> int:
    """Peak bytes so far: allocated on an accelerator, resident in this process on a CPU."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024  # Linux counts KiB
