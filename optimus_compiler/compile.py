"""compile: capture -> passes -> lower, and the module that runs the result."""

from collections.abc import Sequence
from typing import Literal, get_args

from torch import nn

from optimus_compiler.capture import capture
from optimus_compiler.compiled import CompiledModel
from optimus_compiler.lower import Backend
from optimus_compiler.mesh import Mesh
from optimus_compiler.passes import PassOptions, PassPipeline, default_passes
from optimus_compiler.runtime.kernels import Kernels
from optimus_compiler.runtime.kernels.dispatch import require


def compile(
    model: nn.Module,
    mesh: Mesh | None = None,
    *,
    sequence_length: int,
    micro_batch_size: int = 1,
    micro_batches: int = 1,
    inputs: tuple[str, ...] = ("input_ids", "labels"),
    backend: Backend = "inductor",
    kernels: Kernels = "auto",
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    stage_boundaries: Sequence[int] | None = None,
    dispatch: Literal["allgather", "alltoall"] = "allgather",
    expert_rows: float | Literal["exact"] = 2.0,
    sequence_parallel: bool = False,
    activation_checkpointing: Sequence[str] = (),
    memory_budget: str | None = None,
    keep_gathered: bool = False,
    aux_loss: bool = True,
    force_uniform_routing: bool = False,
    watch_finite: bool = False,
    passes: PassPipeline | None = None,
    seed: int | None = None,
    check: bool = False,
) -> CompiledModel:
    """Compiles a plain Hugging Face-style model for training on a mesh.

    sequence_length, micro_batch_size: the static shape [micro_batch_size, sequence_length] of one micro-batch of this
    rank; micro_batches: how many of them a train_step takes. schedule, virtual_stages, stage_boundaries: how a pipeline
    runs and is cut where pp > 1 (passes/split_pipeline.py). inputs: what the program takes; beyond input_ids and
    labels, attention_mask [B, S] of 0 and 1, document_ids [B, S] (attention stays within a document) and position_ids
    [B, S] may be declared. seed: an int draws the weights (the model may then be on the meta device), None keeps the
    model's own. dispatch, expert_rows: how tokens reach the experts of other ranks, and how many rows (times those of
    an even share) an expert rank has room for before a step is done again (passes/expert_parallel.py).
    sequence_parallel: norms work on a part of the sequence where tp > 1 (passes/tensor_parallel.py).
    activation_checkpointing ("norm", "attention", "moe"), memory_budget ("8 GiB"), keep_gathered: what backward
    computes again (passes/checkpoint_activations.py). watch_finite: whether it is to be known which rank made a number
    that is not finite (passes/watch_finite.py). passes: the pipeline, default_passes by default. check: on the first
    batch, compares loss and all gradients with the original module, which is kept for that, and refuses a
    mismatch.

    Raises CaptureError, PassError, ProgramError, ValueError or, where the kernels cannot run, RuntimeError, each one
    sentence, before any memory is taken.
    """
    mesh = mesh or Mesh()
    if micro_batches < 1 or micro_batch_size < 1 or sequence_length < 1:
        raise ValueError(f"sequence_length={sequence_length}, micro_batch_size={micro_batch_size} and "
                         f"micro_batches={micro_batches} must be at least 1")  # fmt: skip
    for option, value, known in (("backend", backend, Backend), ("kernels", kernels, Kernels)):
        if value not in get_args(known):
            raise ValueError(f"{option}={value!r} is unknown: choose one of {', '.join(get_args(known))}")
    require(kernels, mesh.device)
    if expert_rows != "exact" and (isinstance(expert_rows, str) or not expert_rows > 0):
        raise ValueError(f"expert_rows={expert_rows!r} must be a positive number, or 'exact'")
    if dispatch not in ("allgather", "alltoall"):
        raise ValueError(f"dispatch={dispatch!r} is unknown: choose allgather or alltoall")
    if passes is not None and not isinstance(passes, PassPipeline):
        raise ValueError(f"passes is a {type(passes).__name__}: give PassPipeline((Canonicalise(), ...))")
    if sequence_parallel and mesh.tp == 1:
        raise ValueError("sequence_parallel=True divides sequences over tp ranks and the mesh has tp=1: raise tp")
    if check and mesh.pp > 1:
        raise ValueError(f"check=True runs the whole model and the mesh has pp={mesh.pp}: check with pp=1")
    if check and ("document_ids" in inputs or any(parameter.is_meta for parameter in model.parameters())):
        raise ValueError("check=True runs the original module: it needs weights, and inputs without document_ids")
    program = capture(
        model,
        sequence_length=sequence_length,
        micro_batch_size=micro_batch_size,
        inputs=inputs,
        aux_loss=aux_loss,
        device=mesh.device,
    )
    program.mesh = mesh
    options = PassOptions(
        force_uniform_routing=force_uniform_routing,
        dispatch=dispatch,
        expert_rows=expert_rows,
        sequence_parallel=sequence_parallel,
        schedule=schedule,
        micro_batches=micro_batches,
        virtual_stages=virtual_stages,
        stage_boundaries=None if stage_boundaries is None else tuple(stage_boundaries),
        activation_checkpointing=tuple(activation_checkpointing),
        memory_budget=memory_budget,
        keep_gathered=keep_gathered,
        watch_finite=watch_finite,
    )
    pipeline = passes or default_passes(mesh, options)
    pipeline.run(program)
    if mesh.pp > 1 and len(program.stage_ranks) == 1:
        raise ValueError(f"the mesh has pp={mesh.pp} and the passes leave one stage: add SplitPipeline to them")
    return CompiledModel(
        model, program, pipeline, micro_batches=micro_batches, backend=backend, kernels=kernels, seed=seed, check=check
    )
