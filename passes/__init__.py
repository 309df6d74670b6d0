"""Passes: program -> program rewrites, one a file, and the list that compile runs by default."""

from dataclasses import dataclass
from typing import Literal

from optimus_compiler.mesh import Mesh
from optimus_compiler.passes.base import Pass, PassError, PassPipeline, PassReport
from optimus_compiler.passes.canonicalise import Canonicalise
from optimus_compiler.passes.causal_mask import CausalMask
from optimus_compiler.passes.checkpoint_activations import CheckpointActivations
from optimus_compiler.passes.expert_parallel import ExpertParallel, lift_row_bounds
from optimus_compiler.passes.force_uniform_routing import ForceUniformRouting
from optimus_compiler.passes.fuse_loss import FuseLoss
from optimus_compiler.passes.fuse_sparse_moe import FuseSparseMoE
from optimus_compiler.passes.shard_optimizer import ShardOptimizer
from optimus_compiler.passes.split_pipeline import SplitPipeline
from optimus_compiler.passes.tensor_parallel import TensorParallel
from optimus_compiler.passes.watch_finite import WatchFinite
from optimus_compiler.passes.widen_products import WidenProducts


@dataclass(frozen=True)
class PassOptions:
    """What a user may ask of the default passes."""

    force_uniform_routing: bool = False
    dispatch: Literal["allgather", "alltoall"] = "allgather"
    expert_rows: float | Literal["exact"] = 2.0
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    micro_batches: int = 1
    virtual_stages: int = 1
    stage_boundaries: tuple[int, ...] | None = None
    activation_checkpointing: tuple[str, ...] = ()
    memory_budget: str | None = None
    keep_gathered: bool = False
    watch_finite: bool = False


def default_passes(mesh: Mesh, options: PassOptions) -> PassPipeline:
    """The passes that compile runs, in order. Insert, drop or write your own: PassPipeline((*passes, MyPass()))."""
    stages = (options.schedule, options.micro_batches, options.virtual_stages, options.stage_boundaries)
    recomputed = (options.activation_checkpointing, options.memory_budget, options.keep_gathered)
    return PassPipeline((
        Canonicalise(),
        CausalMask(),
        FuseSparseMoE(),
        FuseLoss(),
        *([ForceUniformRouting()] if options.force_uniform_routing else []),
        *([ExpertParallel(options.expert_rows, options.dispatch)] if mesh.ep > 1 else []),
        *([TensorParallel(options.sequence_parallel)] if mesh.tp > 1 else []),
        WidenProducts(),
        *([SplitPipeline(*stages)] if mesh.pp > 1 else []),
        *([WatchFinite()] if options.watch_finite else []),
        *([CheckpointActivations(*recomputed)] if options.activation_checkpointing or options.memory_budget else []),
        ShardOptimizer(),
    ))  # fmt: skip


__all__ = [
    "Canonicalise",
    "CausalMask",
    "CheckpointActivations",
    "ExpertParallel",
    "ForceUniformRouting",
    "FuseLoss",
    "FuseSparseMoE",
    "Pass",
    "PassError",
    "PassOptions",
    "PassPipeline",
    "PassReport",
    "ShardOptimizer",
    "SplitPipeline",
    "TensorParallel",
    "WatchFinite",
    "WidenProducts",
    "default_passes",
    "lift_row_bounds",
]
