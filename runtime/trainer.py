"""Pretraining: check what the run needs, compile the model, then step through the data and write metrics."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor, nn

from optimus_compiler.compile import compile
from optimus_compiler.compiled import CompiledModel, StepOutput
from optimus_compiler.config import (
    Config,
    ConfigError,
    ModelSection,
    ResolvedConfig,
    refuse_unsupported,
    resolve,
    to_toml,
)
from optimus_compiler.layout import check_layout, micro_batches
from optimus_compiler.mesh import Mesh
from optimus_compiler.models import ModelConfig, build, from_hf, from_name
from optimus_compiler.passes import PassOptions
from optimus_compiler.runtime.collectives import together
from optimus_compiler.runtime.data.dataset import PreparedData
from optimus_compiler.runtime.data.loader import DataLoader
from optimus_compiler.runtime.metrics import METRICS, StepMetrics, flops_per_token, peak_flops, peak_memory
from optimus_compiler.runtime.optimizer import ShardedAdamW
from optimus_compiler.runtime.schedule import learning_rate

CONFIG = "config.toml"
PROFILED_STEP = 3  # the first compiles, the second still fills caches
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class RunFailedError(RuntimeError):
    """A run that was in order when it started and could not go on; the message names the step."""


@dataclass(frozen=True)
class Run:
    """A run that may start: everything has been checked, every default filled in, the directory written."""

    config: ResolvedConfig
    model_config: ModelConfig
    data: PreparedData
    directory: Path
    mesh: Mesh


def open_run(config: Config, directory: Path) -> Run:
    """Check that `config` can run here and create `directory` with the resolved config.toml; every rank calls it.

    Raises ValueError (one sentence) for anything the user has to change; nothing has been written then.
    """
    refuse_unsupported(config)
    model_config = load_model_config(config.model)
    check_layout(config, model_config)
    mesh = open_mesh(config)
    with together(mesh):
        if config.data.path is None:
            raise ConfigError(
                "data.path is missing: add it, or pass --set data.path=DIR, a folder of `optimus prepare`"
            )
        data = PreparedData.open(config.data.path, rank=mesh.rank, ranks=mesh.size)
        resolved = resolve(config, context_length=data.context_length)
        _check_data(resolved, model_config, data)
        if (directory / METRICS).exists() and (directory / METRICS).stat().st_size > 0:
            raise ConfigError(
                f"{directory} already holds a run: give another --output (resuming needs checkpoints, "
                "which this version does not write)"
            )
    with together(mesh):
        if mesh.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / CONFIG).write_text(to_toml(resolved), encoding="utf-8")
    return Run(resolved, model_config, data, directory, mesh)


def open_mesh(config: Config) -> Mesh:
    """The mesh of the run, its processes connected; raises ValueError when it does not fit the processes of the job."""
    return Mesh(pp=config.mesh.pp, dp=config.mesh.dp, ep=config.mesh.ep, tp=config.mesh.tp)


def load_model_config(section: ModelSection) -> ModelConfig:
    """The model that [model] describes: a Hugging Face folder, or a named variant, with the overrides applied."""
    if not Path(section.name).is_dir():
        return from_name(section.name, **section.overrides)
    config = from_hf(section.name)
    unknown = section.overrides.keys() - {field.name for field in fields(config)}
    if unknown:
        raise ConfigError(f"model.overrides: {section.name} has no setting {min(unknown)!r}")
    return replace(config, **section.overrides)


def plain_model(config: Config, model_config: ModelConfig) -> nn.Module:
    """The Hugging Face-style model in the run's precision, on the meta device: shapes only, no memory."""
    with torch.device("meta"):
        return build(model_config).to(_DTYPES[config.train.precision])


def compile_model(config: ResolvedConfig, model_config: ModelConfig, mesh: Mesh) -> CompiledModel:
    """The compiled model of a resolved configuration, its weights drawn from train.seed."""
    train = config.train
    masked = ("document_ids", "position_ids") if config.data.document_mask else ()
    return compile(
        plain_model(config, model_config),
        mesh,
        sequence_length=train.sequence_length,
        micro_batch_size=train.micro_batch_size,
        inputs=("input_ids", "labels", *masked),
        backend=train.backend,
        seed=train.seed,
        **vars(pass_options(config)),
    )


def pass_options(config: Config) -> PassOptions:
    """What a configuration asks of the passes."""
    return PassOptions(
        force_uniform_routing=config.train.force_uniform_routing,
        dispatch=config.mesh.dispatch,
        expert_rows=config.mesh.expert_rows,
        sequence_parallel=config.mesh.sequence_parallel,
        schedule=config.pipeline.schedule,
        micro_batches=micro_batches(config),
        virtual_stages=config.pipeline.virtual_stages,
        stage_boundaries=None if config.pipeline.stage_boundaries is None else tuple(config.pipeline.stage_boundaries),
        activation_checkpointing=tuple(config.activation_checkpointing.blocks),
        memory_budget=config.activation_checkpointing.budget,
        keep_gathered=config.activation_checkpointing.keep_gathered,
    )


def train(
    run: Run, on_step: Callable[[StepMetrics], None] = lambda metrics: None, *, profile: bool = False
) -> CompiledModel:
    """Run every step of `run`; rank 0 writes one line of metrics each, and its `on_step` sees the same record.

    profile: every rank writes what it did in step 3 to trace-rank<n>.json in the run directory, for chrome://tracing.
    Returns the trained model. Raises RunFailedError for whatever stops the run; a non-finite loss or gradient does so
    before it reaches the weights.
    """
    step = 0
    try:
        with _compile_cache(run.directory):
            compiled = compile_model(run.config, run.model_config, run.mesh)
            for metrics in _steps(run, compiled, profile):
                step = metrics.step
                if run.mesh.rank == 0:
                    on_step(metrics)
            return compiled
    except RunFailedError:
        raise
    except Exception as error:
        where = f"after step {step}" if step else "before the first step"
        raise RunFailedError(f"the run in {run.directory} stopped {where}: {type(error).__name__}: {error}") from error


def _steps(run: Run, compiled: CompiledModel, profile: bool) -> Iterator[StepMetrics]:
    config, mesh = run.config, run.mesh
    optimizer = _optimizer(compiled, config)
    device = compiled.device
    tokens_per_step = config.train.global_batch_size * config.train.sequence_length
    tflops_per_step = flops_per_token(run.model_config, config.train.sequence_length) * tokens_per_step / 1e12
    peak = peak_flops(device, config.train.precision)
    loader = DataLoader(
        run.data,
        seed=config.train.seed,
        global_batch_size=config.train.global_batch_size,
        rank=mesh.index_in("dp", "ep"),
        ranks=mesh.size_of("dp", "ep"),
        document_mask=config.data.document_mask,
    )
    with loader, _metrics_file(run) as log:
        for step in range(config.train.steps):
            started = time.perf_counter()
            batch = loader.next()
            with _trace(run) if profile and step + 1 == PROFILED_STEP else nullcontext():
                output = compiled.train_step(**{name: value.to(device) for name, value in batch.inputs().items()})
                gradient_norm = optimizer.gradient_norm()
                loss, ce_loss, aux_loss, norm, expert_load = _read(output, gradient_norm)
                if not (math.isfinite(loss) and math.isfinite(norm)):
                    raise RunFailedError(
                        f"step {step + 1}: the loss is {loss} and the gradient norm {norm}: stopped before the "
                        f"weights changed; lower optimizer.lr, or check the data ({run.directory / METRICS} has the "
                        "steps before)"
                    )
                lr = _schedule(config, step)
                for group in optimizer.param_groups:
                    group["lr"] = lr
                optimizer.step(gradient_norm=gradient_norm)
                optimizer.zero_grad()

            seconds = time.perf_counter() - started
            metrics = StepMetrics(
                step=step + 1,
                tokens=(step + 1) * tokens_per_step,
                loss=loss,
                ce_loss=ce_loss,
                aux_loss=aux_loss,
                grad_norm=norm,
                lr=lr,
                tokens_per_second=tokens_per_step / seconds,
                tflops=tflops_per_step / seconds,
                mfu=None if peak is None else tflops_per_step * 1e12 / seconds / (peak * mesh.size),
                peak_memory=peak_memory(device),
                data_wait=loader.waited,
                expert_load_max_over_mean=expert_load,
                seconds=seconds,
            )
            log.write(metrics.to_json() + "\n")
            yield metrics


def _metrics_file(run: Run) -> TextIO:
    """Where metrics go, a line a step, flushed; ranks other than 0 write nowhere."""
    path = run.directory / METRICS if run.mesh.rank == 0 else Path(os.devnull)
    return open(path, "w", encoding="utf-8", buffering=1)


@contextmanager
def _trace(run: Run) -> Iterator[None]:
    """Records what this rank does, for chrome://tracing."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    activities += [
        kind for kind in (ProfilerActivity.CUDA, ProfilerActivity.XPU) if kind.name.lower() == run.mesh.device.type
    ]
    with profile(activities=activities) as profiler:
        yield
    profiler.export_chrome_trace(str(run.directory / f"trace-rank{run.mesh.rank}.json"))


def _optimizer(compiled: CompiledModel, config: ResolvedConfig) -> ShardedAdamW:
    settings = config.optimizer
    return ShardedAdamW(
        compiled,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        clip_norm=settings.clip_norm,
        clip_after=settings.warmup_steps if settings.clip_after_warmup else 0,
        sharding=settings.sharding,
        zero=settings.zero,
        reduce_dtype=_DTYPES[settings.reduce_dtype],
    )


def _schedule(config: ResolvedConfig, step: int) -> float:
    settings = config.optimizer
    return learning_rate(
        step,
        peak=settings.lr,
        minimum=settings.min_lr,
        warmup_steps=settings.warmup_steps,
        decay_steps=settings.decay_steps,
    )


def _read(output: StepOutput, gradient_norm: Tensor) -> tuple[float, float, float, float, float | None]:
    """The numbers of a step in one read of the device: loss, ce loss, aux loss, gradient norm, expert load."""
    values = [output.loss, output.ce_loss, output.aux_loss, gradient_norm]
    counts_E = output.expert_counts
    if counts_E is not None:
        values.append(counts_E.max() / counts_E.mean())
    loss, ce_loss, aux_loss, norm, *load = torch.stack(values).tolist()
    return loss, ce_loss, aux_loss, norm, load[0] if load else None


def _check_data(config: ResolvedConfig, model_config: ModelConfig, data: PreparedData) -> None:
    if config.train.sequence_length != data.context_length:
        raise ConfigError(
            f"train.sequence_length is {config.train.sequence_length} and {config.data.path} was prepared with context "
            f"length {data.context_length}: they must be equal"
        )
    if model_config.vocab_size < data.manifest.vocab_size:
        raise ConfigError(
            f"{config.model.name} has a vocabulary of {model_config.vocab_size} and {config.data.path} one of "
            f"{data.manifest.vocab_size}: set model.overrides.vocab_size, or prepare with the model's tokenizer"
        )


@contextmanager
def _compile_cache(directory: Path) -> Iterator[None]:
    """Keep Inductor's artefacts with the run, unless the user has named a place for them."""
    variable = "TORCHINDUCTOR_CACHE_DIR"
    if variable in os.environ:
        yield
        return
    os.environ[variable] = str((directory / "compile_cache").absolute())
    try:
        yield
    finally:
        del os.environ[variable]
