"""Trainings of a study: each a run directory of `optimus pretrain` in a process of its own, some at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.studies.corpus import CONTEXT_LENGTH, VOCABULARY
from bench.studies.options import Options
from optimus_compiler.cli.stages import StageProgress
from optimus_compiler.config import Config, load_config, to_toml
from optimus_compiler.models import ModelConfig
from optimus_compiler.runtime.metrics import METRICS, read_evaluations, read_metrics
from optimus_compiler.runtime.run import load_model_config

AT_ONCE = 2  # trainings of one thread each
MICRO_BATCH = 16  # sequences; with those of CONTEXT_LENGTH a step of one micro-batch has 4,096 tokens


@dataclass(frozen=True)
class Training:
    """A run directory and its configuration. Started by torchrun for several processes, or by `optimus launch`."""

    directory: Path
    config: Config
    launch: tuple[str, ...] = ()  # arguments of `optimus launch`, if it starts the run

    @property
    def model(self) -> ModelConfig:
        """The model that is trained."""
        return load_model_config(self.config.model)

    def beside(self, ending: str) -> Path:
        """The file of this name and ending beside the directory."""
        return self.directory.with_name(f"{self.directory.name}.{ending}")

    def steps_done(self) -> int:
        """Steps in the metrics so far."""
        path = self.directory / METRICS
        lines = path.read_bytes().splitlines() if path.is_file() else []
        return json.loads(lines[-1])["step"] if lines and lines[-1].endswith(b"}") else 0

    def is_done(self) -> bool:
        """Whether the last step was taken and evaluated; raises RuntimeError where it was another training's."""
        file = self.beside("toml")
        if file.is_file() and load_config(file) != self.config:
            raise RuntimeError(
                f"{self.directory} was trained with another configuration ({file}): delete both, or give another --work"
            )
        steps = self.config.train.steps
        evaluated = [each.step for each in read_evaluations(self.directory)]
        return self.steps_done() >= steps and (steps in evaluated or not self.config.eval.every)

    def command(self) -> list[str]:
        """The command line that begins it, or goes on with it."""
        file = self.beside("toml")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(to_toml(self.config), encoding="utf-8")
        what = [str(file), "--output", str(self.directory)]
        if self.launch:
            return [sys.executable, "-m", "optimus_compiler", "launch", *what, *self.launch]
        mesh = self.config.mesh
        ranks = mesh.pp * mesh.dp * mesh.ep * mesh.tp
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        return [sys.executable, *torchrun, "-m", "optimus_compiler", "pretrain", *what]


def configuration(options: Options, *, model: dict[str, Any], steps: int, **sections: dict[str, Any]) -> Config:
    """A run of the studies: `model` are the overrides of olmoe-tiny, or of the "name" given among them.

    sections: keys beyond the common ones, by table.
    """
    overrides = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT_LENGTH} | model
    name = overrides.pop("name", "olmoe-tiny")
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": name, "overrides": overrides},
        "data": {"path": str(options.corpus.training), "validation_path": str(options.corpus.validation)},
        "train": {"steps": steps, "micro_batch_size": MICRO_BATCH, "precision": "fp32"},
        "optimizer": {"lr": 2e-3, "min_lr": 2e-4, "warmup_steps": max(1, steps // 20)},
        "checkpoint": {"every": max(1, min(100, steps // 4)), "async": True},
        "log": {"every": 100},
        "eval": {"every": max(1, steps // 10)},
    }
    for section, values in sections.items():
        tables[section] = tables.get(section, {}) | values
    return Config.model_validate(tables)


def train_all(trainings: Sequence[Training], at_once: int = AT_ONCE) -> None:
    """Finishes the trainings that are not done, `at_once` at a time.

    Raises RuntimeError where one fails, or was done with another configuration; the others are stopped then.
    """
    waiting = [training for training in trainings if not training.is_done()]
    running: list[tuple[Training, subprocess.Popen[bytes]]] = []
    steps = sum(training.config.train.steps for training in trainings)
    try:
        with StageProgress() as progress:
            while waiting or running:
                while waiting and len(running) < at_once:
                    training = waiting.pop(0)
                    running.append((training, _start(training)))
                for training, process in list(running):
                    if process.poll() is not None:
                        running.remove((training, process))
                        _check(training, process)
                progress.show("training", sum(training.steps_done() for training in trainings), steps)
                time.sleep(1)
    finally:
        for _, process in running:
            process.terminate()
        for _, process in running:
            process.wait()


def _start(training: Training) -> subprocess.Popen[bytes]:
    command = training.command()
    with open(training.beside("log"), "ab") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def _check(training: Training, process: subprocess.Popen[bytes]) -> None:
    if process.returncode or not training.is_done():
        log = training.beside("log")
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"{training.directory} stopped: {''.join(last)} (all of it: {log})")


def tokens_per_second(directory: Path) -> float:
    """Of the steps after the first three: tokens over time, whatever the steps' number."""
    steps = read_metrics(directory)[3:]
    return sum(each.tokens_per_second * each.seconds for each in steps) / sum(each.seconds for each in steps)
