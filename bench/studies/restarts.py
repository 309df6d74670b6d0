"""What restarts do to a run: none, ten injected failures, and one restart from weights alone (fresh moments).

Two nodes of one process (dp = 2) under `optimus launch`, with a spare for every failure. A killed, stopped or
NaN-producing node is replaced and the run goes on from its last full checkpoint: its curve must be the undisturbed
one's, bit by bit. From a model-only checkpoint in the middle the moments start from zero: the curve may differ, and
must come back.

Example:
  python -m bench.studies.restarts --corpus corpus
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes

from bench.studies.options import Options, parse_options
from bench.studies.results import Curve, keep_study
from bench.studies.trainings import Training, configuration, train_all
from bench.tables import machine
from optimus_compiler.runtime.metrics import EVALUATIONS, METRICS, StepMetrics, read_metrics

STEPS, FAILURES = 220, 10
KINDS = ("kill", "nan", "exit")
MODEL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_experts": 16}
SMOOTH = 8


def study(options: Options) -> None:
    """Trains the three runs and overlays their losses."""
    steps = options.scaled(STEPS)
    half = steps // 2
    config = configuration(
        options,
        model=MODEL,
        steps=steps,
        mesh={"dp": 2},
        train={"micro_batch_size": 4, "backend": "aot_eager"},
        checkpoint={"every": max(1, steps // 22), "persistent_every": half},
        eval={"every": steps},
    )
    folder = options.work / "restarts"
    nodes = ("--nodes", "2", "--procs-per-node", "1")
    undisturbed = Training(folder / "undisturbed", config, nodes)
    faults = injections(steps)
    spares = ("--spares", str(len(faults)), *(word for fault in faults for word in ("--inject", fault)))
    disturbed = Training(folder / "failures", config, (*nodes, *spares))
    train_all([undisturbed, disturbed], at_once=1)
    from_weights = folder / "from-weights"
    if not from_weights.is_dir():
        _copy_until(undisturbed.directory, from_weights, half)
    train_all([Training(from_weights, config)])

    runs = {
        "undisturbed": read_metrics(undisturbed.directory),
        f"{len(faults)} failures": read_metrics(disturbed.directory),
        "from weights alone": read_metrics(from_weights),
    }
    base = runs["undisturbed"]
    incidents = [json.loads(line) for line in (disturbed.directory / "incidents.jsonl").read_text().splitlines()]
    rows = []
    for name, metrics in runs.items():
        differing = [a.step for a, b in zip(metrics, base, strict=True) if a.loss != b.loss]
        largest = max(abs(a.loss - b.loss) for a, b in zip(metrics, base, strict=True))
        end = mean(each.loss for each in metrics[-SMOOTH:])
        restarts = {"undisturbed": 0, "from weights alone": 1}.get(name, len(incidents))
        rows.append(
            [
                name,
                f"{restarts}",
                f"{steps}",
                "none" if not differing else f"{len(differing)}",
                f"{largest:.4f}",
                f"{end:.4f}",
            ]
        )
    curves = {name: _smoothed(metrics) for name, metrics in runs.items()}
    keep_study(
        "study-restarts",
        f"Restarts: {steps} steps at dp=2, losses beside the undisturbed run's",
        machine(),
        ["run", "restarts", "steps", "steps with another loss", "largest difference", f"loss, last {SMOOTH} steps"],
        rows,
        curves=curves,
        draw=[lambda axes: _draw(axes, curves, half, incidents), lambda axes: _draw_differences(axes, runs)],
        folder=options.results,
    )


def _copy_until(run: Path, copy: Path, step: int) -> None:
    """A run as if it had stopped after this step, and its full checkpoints were lost."""
    partial = copy.with_name(f".{copy.name}")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(run, partial, ignore=shutil.ignore_patterns("checkpoints", "logs", "compile_cache"))
    shutil.copytree(run / "checkpoints" / f"model-{step}", partial / "checkpoints" / f"model-{step}")
    for name in (METRICS, EVALUATIONS):
        lines = (run / name).read_text().splitlines(keepends=True) if (run / name).is_file() else []
        (partial / name).write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
    partial.rename(copy)


def injections(steps: int) -> list[str]:
    """The failures, evenly spread, of each kind and each node in turn; fewer where there are few steps."""
    at = sorted({max(2, (number + 1) * steps // (FAILURES + 1)) for number in range(FAILURES)})
    return [f"step={step},rank={number % 2},kind={KINDS[number % len(KINDS)]}" for number, step in enumerate(at)]


def _smoothed(metrics: list[StepMetrics]) -> Curve:
    """(step, mean loss of the last steps) every few steps, and in the end."""
    ends = [*range(SMOOTH, len(metrics), SMOOTH), len(metrics)]
    return [(metrics[end - 1].step, mean(each.loss for each in metrics[max(0, end - SMOOTH) : end])) for end in ends]


def _draw(axes: Axes, curves: dict[str, Curve], half: int, incidents: list[dict[str, object]]) -> None:
    styles = {"undisturbed": "-", "from weights alone": ":"}
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), styles.get(name, "--"), label=name)
    for number, incident in enumerate(incidents):
        axes.axvline(float(str(incident["step"])), color="grey", alpha=0.4, label=None if number else "failure")
    axes.axvline(half, color="black", linestyle=":", label="restart from weights")
    axes.set_xlabel("step")
    axes.set_ylabel(f"training loss, mean of {SMOOTH}")
    axes.legend()


def _draw_differences(axes: Axes, runs: dict[str, list[StepMetrics]]) -> None:
    base = runs["undisturbed"]
    for name, metrics in list(runs.items())[1:]:
        axes.plot([a.step for a in metrics], [a.loss - b.loss for a, b in zip(metrics, base, strict=True)], label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss minus the undisturbed run's")
    axes.legend()


if __name__ == "__main__":
    study(parse_options(__doc__ or ""))
