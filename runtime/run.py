"""A run before its first step: what its configuration means, checked; and where it continues from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import nn

from optimus_compiler.capture import capture
from optimus_compiler.config import (
    Config,
    ConfigError,
    ModelSection,
    ResolvedConfig,
    load_config,
    parse_config,
    resolve,
    to_toml,
)
from optimus_compiler.layout import check_layout, micro_batches
from optimus_compiler.mesh import DIMENSIONS, Mesh
from optimus_compiler.models import ModelConfig, build, from_hf, from_name
from optimus_compiler.passes import PassOptions, PassPipeline, default_passes
from optimus_compiler.program import Program
from optimus_compiler.runtime.checkpoint.find import find_newest, open_whole
from optimus_compiler.runtime.checkpoint.folder import Checkpoint, CheckpointFolder
from optimus_compiler.runtime.checkpoint.manifest import MANIFEST, CheckpointError
from optimus_compiler.runtime.collectives import from_first, together
from optimus_compiler.runtime.data.dataset import PreparedData
from optimus_compiler.runtime.evaluate.encode import encoder, refuse_long
from optimus_compiler.runtime.evaluate.tasks import Task, load_tasks
from optimus_compiler.runtime.files import whole_file
from optimus_compiler.runtime.initial_weights import check_initial_weights
from optimus_compiler.runtime.metrics import METRICS, read_evaluations
from optimus_compiler.runtime.resume import keep_first_values, refuse_changes
from optimus_compiler.runtime.run_lock import run_lock
from optimus_compiler.runtime.writers import check_packages

CONFIG = "config.toml"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Run:
    """A run that may start: everything has been checked, every default filled in, the directory written."""

    config: ResolvedConfig
    model_config: ModelConfig
    data: PreparedData
    directory: Path
    mesh: Mesh
    folder: CheckpointFolder
    start: Checkpoint | None = None  # the checkpoint that it continues from
    skip_steps: int = 0  # steps' worth of data that are passed over at the start
    validation: PreparedData | None = None  # held-out text whose loss is measured
    tasks: tuple[Task, ...] = ()  # whose accuracies are
    evaluate_first: bool = False  # the step that it continues after was saved, and never evaluated

    @property
    def steps_done(self) -> int:
        """How many steps were taken before this start."""
        return self.start.manifest.progress.step if self.start else 0

    @property
    def is_done(self) -> bool:
        """Whether neither a step nor an evaluation is left."""
        return self.steps_done >= self.config.train.steps and not self.evaluate_first

    def evaluates_after(self, step: int) -> bool:
        """Whether [eval] asks for an evaluation after this step."""
        every = self.config.eval.every
        return bool(every) and (step % every == 0 or step == self.config.train.steps)


def open_run(
    config: Config,
    directory: Path,
    *,
    allow_changed: Sequence[str] = (),
    start_from: str | None = None,
    skip_steps: int = 0,
    say: Callable[[str], None] = lambda sentence: None,
) -> Run:
    """Check that `config` can run here and write the resolved config.toml to `directory`; every rank calls it.

    Where `directory` holds checkpoints the run continues from the newest that is whole, or from the one that is named
    `start_from` ("step-1000"); what would have been tried before that one is set aside then. skip_steps: the data of so
    many steps is passed over, where a run diverged on it. A setting that alters
    training must be what it was, unless `allow_changed` names its key. `say` is told by rank 0 what the user should
    know. Raises ValueError (one sentence) for anything the user has to change; nothing has been written then.
    """
    first = _first_config(directory)
    if first is not None:
        config = keep_first_values(config, first)
    model_config = load_model_config(config.model)
    check_layout(config, model_config)
    mesh = open_mesh(config)
    say = say if mesh.rank == 0 else lambda sentence: None
    with together(mesh):
        if mesh.rank == 0:  # which alone writes
            check_packages(config.log)
        if config.data.path is None:
            raise ConfigError(
                "data.path is missing: add it, or pass --set data.path=DIR, a folder of `optimus prepare`"
            )
        data = PreparedData.open(config.data.path, rank=mesh.rank, ranks=mesh.size)
        resolved = resolve(config, context_length=data.context_length)
        _check_data(resolved, model_config, data)
        validation = _validation_data(resolved, data, mesh)
        tasks = _tasks(resolved, data)
    folder = CheckpointFolder(directory)
    start = find_newest(folder, mesh, say) if start_from is None else open_whole(folder, start_from, mesh)
    run = Run(resolved, model_config, data, directory, mesh, folder, start, skip_steps, validation, tasks)
    with together(mesh):
        _check_start(run, first, allow_changed, say)
        if start is None and resolved.model.init != "random":
            check_initial_weights(resolved.model.init, model_config, mesh.rank, mesh.size)
        lacks_evaluation = mesh.rank == 0 and _lacks_evaluation(run)
    run = replace(run, evaluate_first=from_first(lacks_evaluation, mesh.group(*DIMENSIONS)))
    with together(mesh):
        if mesh.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            with run_lock(directory):
                if start is not None and start_from is not None:
                    for path in folder.abandon_before(start):
                        say(f"{path.name.removeprefix('abandoned-')} is set aside as {path}: delete it when you like")
                with whole_file(directory / CONFIG) as file:
                    file.write(to_toml(resolved).encode())
    return run


def _first_config(directory: Path) -> Config | None:
    """The configuration of an earlier start in this directory."""
    if (directory / CONFIG).is_file():
        return load_config(directory / CONFIG)
    found = [each for each in CheckpointFolder(directory).found() if isinstance(each, Checkpoint)]
    return parse_config(found[0].manifest.config, str(found[0].path / MANIFEST)) if found else None


def _check_start(run: Run, first: Config | None, allow_changed: Sequence[str], say: Callable[[str], None]) -> None:
    """Refuses a start that would not continue what the directory holds, and says from where it goes on."""
    start, directory = run.start, run.directory
    if start is not None:
        manifest = start.manifest
        before = parse_config(manifest.config, str(start.path / MANIFEST))
        refuse_changes(
            directory,
            before,
            run.config,
            same_model=_without_eos(from_hf(manifest.model)) == _without_eos(run.model_config),
            same_data=manifest.data_sha256 == run.data.sha256,
            allowed=allow_changed,
        )
        fresh = "" if start.kind == "full" else ", which holds weights alone: the moments start from zero"
        say(f"continuing after step {manifest.progress.step:,} from {start.path}{fresh}")
        return
    if damaged := run.folder.damaged:
        raise CheckpointError(
            f"{run.folder.path} holds no whole checkpoint, and {len(damaged)} damaged: restore one, or delete them to "
            "start again from step 1"
        )
    if first is None or not _has_steps(directory):
        return
    if not (run.config.checkpoint.every or run.config.checkpoint.persistent_every):
        raise ConfigError(
            f"{directory} already holds a run, without checkpoints to continue it from: give another --output, or set "
            "checkpoint.every to start it again"
        )
    same_model = load_model_config(first.model) == run.model_config
    same_data = first.data.path == run.config.data.path
    refuse_changes(directory, first, run.config, same_model=same_model, same_data=same_data, allowed=allow_changed)
    say(f"{directory} holds a run that stopped before its first checkpoint: starting again from step 1")


def _lacks_evaluation(run: Run) -> bool:
    """Whether the run was stopped between saving the step that it continues after and having evaluated it."""
    if not run.steps_done or not run.evaluates_after(run.steps_done):
        return False
    return run.steps_done not in {evaluation.step for evaluation in read_evaluations(run.directory)}


def _has_steps(directory: Path) -> bool:
    return (directory / METRICS).exists() and (directory / METRICS).stat().st_size > 0


def _without_eos(config: ModelConfig) -> ModelConfig:
    """A checkpoint names the data's end-of-text token, which no computation depends on."""
    return replace(config, eos_token_id=None)


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
        return build(model_config).to(DTYPES[config.train.precision])


def passed_program(config: Config) -> tuple[Program, PassPipeline]:
    """The model of a configuration after all passes for its mesh, and these; nothing is allocated, and no other process
    is needed."""
    program, pipeline = captured_program(config)
    pipeline.run(program)
    return program, pipeline


def captured_program(config: Config, most_layers: int | None = None) -> tuple[Program, PassPipeline]:
    """The model of a configuration as captured, with so many of its layers, on its mesh; and the passes to run."""
    model_config = load_model_config(config.model)
    check_layout(config, model_config)
    layers = min(model_config.num_hidden_layers, most_layers or model_config.num_hidden_layers)
    program = capture(
        plain_model(config, replace(model_config, num_hidden_layers=layers)),
        sequence_length=config.train.sequence_length or model_config.max_position_embeddings,
        micro_batch_size=config.train.micro_batch_size,
    )
    program.mesh = abstract_mesh(config)
    return program, default_passes(program.mesh, pass_options(config))


def abstract_mesh(config: Config) -> Mesh:
    """The mesh of a configuration, whatever the number of processes here."""
    return Mesh.abstract(pp=config.mesh.pp, dp=config.mesh.dp, ep=config.mesh.ep, tp=config.mesh.tp)


def block_sizes(program: Program) -> dict[str, int]:
    """The sizes of a rank's expert block in a program after the passes; raises ValueError for a dense model."""
    for segment in program.segments:
        for node in segment.graph.graph.nodes:
            if node.target is torch.ops.optimus.grouped_mlp.default:
                x_TH, _, _, down_EHI, token_R = (argument.meta["val"] for argument in node.args[:5])
                experts, hidden, width = down_EHI.shape
                return {
                    "experts": experts,
                    "hidden": hidden,
                    "width": width,
                    "tokens": x_TH.shape[0],
                    "rows": token_R.shape[0],
                }
    raise ValueError("the model has no expert block")


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
        watch_finite=abstract_mesh(config).size > 1,  # else nobody else is to blame
    )


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


def _tasks(config: ResolvedConfig, data: PreparedData) -> tuple[Task, ...]:
    """The tasks of [eval], whose every choice the model can read at once. No primary accuracy asks for what comes after
    an unconditional prompt, which is half of all requests."""
    loaded = load_tasks(config.eval.tasks, config.eval.limit)
    tasks = tuple(Task(task.name, tuple(replace(q, unconditional=()) for q in task.questions)) for task in loaded)
    if tasks:
        refuse_long(tasks, encoder(data.tokenizer()), config.train.sequence_length)
    return tasks


def _validation_data(config: ResolvedConfig, data: PreparedData, mesh: Mesh) -> PreparedData | None:
    """The held-out text of the run, which must be prepared as its training data is."""
    path = config.data.validation_path
    if path is None:
        return None
    validation = PreparedData.open(path, rank=mesh.rank, ranks=mesh.size)
    theirs, ours = validation.manifest, data.manifest
    if theirs.tokenizer.sha256 != ours.tokenizer.sha256 or theirs.eos_id != ours.eos_id:
        raise ConfigError(
            f"data.validation_path = {path} was prepared with another tokenizer than {config.data.path}: prepare it "
            "again"
        )
    if theirs.context_length != ours.context_length:
        raise ConfigError(
            f"data.validation_path = {path} was prepared with context length {theirs.context_length} and "
            f"{config.data.path} with {ours.context_length}: prepare it again"
        )
    return validation
