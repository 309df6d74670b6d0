"""Pretraining: compile the model of a run, continue from its checkpoint, step through the data, write metrics, save."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import BinaryIO

import torch
from torch import Tensor

from optimus_compiler.compile import compile
from optimus_compiler.compiled import CompiledModel, StepOutput
from optimus_compiler.config import ResolvedConfig, to_toml
from optimus_compiler.mesh import DIMENSIONS, Mesh
from optimus_compiler.models import ModelConfig
from optimus_compiler.runtime.checkpoint.contents import parameter_table
from optimus_compiler.runtime.checkpoint.load import StoredTensors, load_masters, load_moments, load_weights
from optimus_compiler.runtime.checkpoint.manifest import CheckpointManifest, Kind, Progress, StoredFile
from optimus_compiler.runtime.checkpoint.saver import CheckpointSaver
from optimus_compiler.runtime.collectives import all_reduce
from optimus_compiler.runtime.data.loader import DataLoader
from optimus_compiler.runtime.data.sample_index import Position, SampleIndex
from optimus_compiler.runtime.evaluate.while_training import Evaluator, describe
from optimus_compiler.runtime.evaluate.while_training import Progress as EvaluationProgress
from optimus_compiler.runtime.initial_weights import initial_weights
from optimus_compiler.runtime.loss_guard import LossGuard
from optimus_compiler.runtime.metrics import (
    EVALUATIONS,
    METRICS,
    Evaluation,
    StepMetrics,
    flops_per_token,
    peak_flops,
    peak_memory,
)
from optimus_compiler.runtime.optimizer import ShardedAdamW
from optimus_compiler.runtime.resilience.beacon import Beacon
from optimus_compiler.runtime.resilience.inject import Faults
from optimus_compiler.runtime.resilience.soft import write_report
from optimus_compiler.runtime.run import DTYPES, Run, pass_options, plain_model
from optimus_compiler.runtime.run_lock import run_lock
from optimus_compiler.runtime.schedule import learning_rate
from optimus_compiler.runtime.stop_request import StopRequest
from optimus_compiler.runtime.writers import Writers

PROFILED_STEP = 3  # of a start: the first compiles, the second still fills caches


class RunFailedError(RuntimeError):
    """A run that was in order when it started and could not go on; the message names the step."""


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


def train(
    run: Run,
    on_step: Callable[[StepMetrics], None] = lambda metrics: None,
    *,
    profile: bool = False,
    say: Callable[[str], None] = lambda sentence: None,
    on_evaluating: EvaluationProgress = lambda what, done, total: None,
) -> CompiledModel:
    """Run the steps of `run` that are left; rank 0 writes one line of metrics each, and its `on_step` sees the record.

    Checkpoints are saved as [checkpoint] says and the model evaluated as [eval] says, and `say` told of them by rank 0;
    evaluations are lines of evaluations.jsonl, and rank 0's `on_evaluating` sees how far one is. On SIGTERM, sent to
    any rank, the step is finished, a full checkpoint saved, and train returns. profile: every rank writes what it did
    in the third step to trace-rank<n>.json in the run directory, for chrome://tracing. Returns the trained model.
    Raises RunFailedError for whatever stops the run; a non-finite loss or gradient does so before it reaches the
    weights.
    """
    step = run.steps_done
    try:
        lock = run_lock(run.directory) if run.mesh.rank == 0 else nullcontext()
        with lock, _compile_cache(run), Beacon() as beacon:
            compiled = compile_model(run.config, run.model_config, run.mesh)
            for metrics in _steps(run, compiled, beacon, profile, say, on_evaluating):
                step = metrics.step
                beacon.finished(step, metrics.seconds)
                if run.mesh.rank == 0:
                    on_step(metrics)
            return compiled
    except RunFailedError:
        raise
    except Exception as error:
        where = f"after step {step}" if step else "before the first step"
        raise RunFailedError(f"the run in {run.directory} stopped {where}: {type(error).__name__}: {error}") from error


def _steps(
    run: Run,
    compiled: CompiledModel,
    beacon: Beacon,
    profile: bool,
    say: Callable[[str], None],
    on_evaluating: EvaluationProgress,
) -> Iterator[StepMetrics]:
    config, mesh = run.config, run.mesh
    notice = say if mesh.rank == 0 else lambda sentence: None
    optimizer = _optimizer(compiled, config)
    progress = _restore(run, compiled, optimizer)
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
        position=SampleIndex(len(run.data), config.train.seed).advance(
            Position(progress.epoch, progress.offset), run.skip_steps * config.train.global_batch_size
        ),
    )
    saver = CheckpointSaver(run.folder, config.checkpoint, compiled, optimizer, _describer(run, compiled), notice)
    faults = Faults.of_this_process(run.directory, mesh.rank)
    evaluator = Evaluator(run, compiled)
    guard = LossGuard(config.resilience.loss_spike_sigma, progress.recent_losses)
    stalled = 0.0
    with loader, saver, StopRequest() as stop, _lines_file(run, METRICS) as log, Writers(run, notice) as writers:

        def evaluate() -> None:
            evaluation = _evaluate(run, evaluator, progress, beacon, on_evaluating)
            writers.evaluation(evaluation)
            notice(describe(evaluation))

        if run.evaluate_first:
            evaluate()
        for step in range(progress.step, config.train.steps):
            started = time.perf_counter()
            batch = loader.next()
            inputs = {name: value.to(device) for name, value in batch.inputs().items()}
            faults.strike(step + 1, [bucket.weights for bucket in compiled.buckets])
            with _trace(run) if profile and step + 1 == run.steps_done + PROFILED_STEP else nullcontext():
                output = compiled.train_step(**inputs)
                gradient_norm = optimizer.gradient_norm()
                signals = _signals(mesh, stop.requested, saver.failed)
                loss, ce_loss, aux_loss, norm, stopping, save_failed, expert_load = _read(
                    output, gradient_norm, signals
                )
                if not (math.isfinite(loss) and math.isfinite(norm)):
                    _report_non_finite(run, compiled, optimizer, inputs, step + 1)
                    raise RunFailedError(
                        f"step {step + 1}: the loss is {loss} and the gradient norm {norm}: stopped before the "
                        f"weights changed; lower optimizer.lr, or check the data ({run.directory / METRICS} has the "
                        "steps before)"
                    )
                lr = _schedule(config, step)
                for group in optimizer.param_groups:
                    group["lr"] = lr
                if guard.is_spike(loss):
                    notice(f"step {step + 1}: the loss {loss:.4f} is a spike: the weights stay as they are")
                else:
                    optimizer.step(gradient_norm=gradient_norm)
                optimizer.zero_grad()

            seconds = time.perf_counter() - started
            progress = Progress(
                step=step + 1,
                tokens=progress.tokens + tokens_per_step,
                epoch=batch.position.epoch,
                offset=batch.position.offset,
                updates=optimizer.steps_taken,
                random_state=_random_state(),
                recent_losses=tuple(guard.recent),
            )
            metrics = StepMetrics(
                step=progress.step,
                tokens=progress.tokens,
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
                checkpoint_stall=stalled,
            )
            log.write(metrics.to_json().encode() + b"\n")
            writers.step(metrics)
            yield metrics

            if save_failed:
                saver.wait()  # raises on every rank
            is_last = progress.step == config.train.steps
            kinds = saver.due(progress.step, last=is_last)
            if stopping and not is_last and "full" not in kinds:
                kinds = ["full", *kinds]
            if kinds:
                beacon.phase = "saving"  # which may take many times as long as a step
            if kinds and mesh.rank == 0:
                os.fsync(log.fileno())  # no checkpoint is on the disk without the metrics before it
            stalled = saver.save(kinds, progress)
            if stopping and not is_last:
                saver.wait()
                notice(f"stopped by SIGTERM after step {progress.step:,}: the same command continues the run")
                break
            if run.evaluates_after(progress.step):  # the step is saved: what goes wrong from here on loses none
                evaluate()
        saver.wait()


def _evaluate(
    run: Run, evaluator: Evaluator, progress: Progress, beacon: Beacon, on_evaluating: EvaluationProgress
) -> Evaluation:
    """Evaluates the model after a step; rank 0 writes the line. The supervisor sees that it goes on."""

    def show(what: str, done: int, total: int) -> None:
        beacon.phase = f"evaluating {what} {done / total:.0%}"
        if run.mesh.rank == 0:
            on_evaluating(what, done, total)

    beacon.phase = "evaluating"  # the first batch compiles what it needs
    evaluation = evaluator.evaluate(progress.step, progress.tokens, show)
    beacon.phase = "training"
    with _lines_file(run, EVALUATIONS) as file:
        file.write(evaluation.to_json().encode() + b"\n")
    return evaluation


def _report_non_finite(
    run: Run, compiled: CompiledModel, optimizer: ShardedAdamW, inputs: dict[str, Tensor], step: int
) -> None:
    """Repeats a step on all ranks, nothing having been updated, and leaves what this rank saw for the supervisor."""
    optimizer.zero_grad()
    output = compiled.train_step(**inputs)
    again = not all(math.isfinite(value) for value in torch.stack([output.loss, optimizer.gradient_norm()]).tolist())
    write_report(run.directory, compiled, step, again=again)


def _restore(run: Run, compiled: CompiledModel, optimizer: ShardedAdamW) -> Progress:
    """Fills weights, masters and moments from where the run starts, and says how far that is."""
    config, start = run.config, run.start
    if start is None:
        if config.model.init != "random":
            source = initial_weights(config.model.init)
            load_weights(compiled, source, config.checkpoint.transfer)
            load_masters(compiled, optimizer, source)
        return Progress(step=0, tokens=0, epoch=0, offset=0, updates=0, random_state=_random_state())
    stored, progress = StoredTensors(start.path), start.manifest.progress
    load_weights(compiled, stored, config.checkpoint.transfer)
    load_masters(compiled, optimizer, stored)
    if start.manifest.kind == "full":
        load_moments(compiled, optimizer, stored)
        optimizer.steps_taken = progress.updates
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(progress.random_state), dtype=torch.uint8))
    # the optimizer counts its own updates, and clipping begins at a step of the run
    optimizer.clip_after = max(0, optimizer.clip_after - (progress.step - optimizer.steps_taken))
    return progress


def _describer(run: Run, compiled: CompiledModel) -> Callable[..., CheckpointManifest]:
    """What makes the manifest of this run's checkpoints."""
    model = {
        **run.model_config.to_hf(),
        "eos_token_id": run.data.manifest.eos_id,
        "torch_dtype": str(DTYPES[run.config.train.precision]).removeprefix("torch."),
    }
    config, data, table = to_toml(run.config), run.data.sha256, parameter_table(compiled.program)

    def describe(kind: Kind, progress: Progress, number: int, files: dict[str, StoredFile]) -> CheckpointManifest:
        return CheckpointManifest(
            kind=kind,
            number=number,
            progress=progress,
            config=config,
            model=model,
            data_sha256=data,
            mesh=run.mesh.sizes(),
            parameters=table,
            files=files,
        )

    return describe


def _random_state() -> str:
    """torch's CPU generator. No step draws from it; what a pass of the user's draws goes on after a resume."""
    return torch.get_rng_state().numpy().tobytes().hex()


def _signals(mesh: Mesh, stop_requested: bool, save_failed: bool) -> Tensor:
    """Whether any rank was asked to stop, and whether on any a save has failed: [2] fp32, above zero for yes.

    All ranks get the same answer in the same step, so that none waits for one that has left.
    """
    signals = torch.zeros(2, device=mesh.device)
    for index, signal in enumerate((stop_requested, save_failed)):
        if signal:
            signals[index] = 1
    return all_reduce(signals, mesh.group(*DIMENSIONS))


def _lines_file(run: Run, name: str) -> BinaryIO:
    """Where records go, a line each, unbuffered, after what earlier starts wrote; ranks above 0 write nowhere."""
    path = run.directory / name
    if run.mesh.rank > 0:
        return open(os.devnull, "wb", buffering=0)
    if path.exists():
        lines, newline, _cut_short = path.read_bytes().rpartition(b"\n")
        os.truncate(path, len(lines) + len(newline))
    return open(path, "ab", buffering=0)


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
        reduce_dtype=DTYPES[settings.reduce_dtype],
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


def _read(
    output: StepOutput, gradient_norm: Tensor, signals: Tensor
) -> tuple[float, float, float, float, float, float, float | None]:
    """The numbers of a step in one read of the device: losses, gradient norm, the two signals, expert load."""
    values = [output.loss, output.ce_loss, output.aux_loss, gradient_norm, *signals]
    counts_E = output.expert_counts
    if counts_E is not None:
        values.append(counts_E.max() / counts_E.mean())
    loss, ce_loss, aux_loss, norm, stopping, save_failed, *load = torch.stack(values).tolist()
    return loss, ce_loss, aux_loss, norm, stopping, save_failed, load[0] if load else None


@contextmanager
def _compile_cache(run: Run) -> Iterator[None]:
    """Keep Inductor's artefacts with the run, unless the user has named a place for them."""
    variable = "TORCHINDUCTOR_CACHE_DIR"
    if variable in os.environ:
        yield
        return
    os.environ[variable] = str((run.directory / "compile_cache").absolute())
    try:
        yield
    finally:
        del os.environ[variable]
