"""Passes: program -> program rewrites, one a file, and the list that compile runs by default."""

from dataclasses import dataclass
from typing import Literal

from optimus_compiler.mesh import Mesh
from optimus_compiler.passes.base import Pass, PassError, PassPipeline, PassReport
from optimus_compiler.passes.canonicalise import Canonicalise
from optimus_compiler.passes.causal_mask import CausalMask
from optimus_compiler.passes.expert_parallel import ExpertParallel, lift_row_bounds
from optimus_compiler.passes.force_uniform_routing import ForceUniformRouting
from optimus_compiler.passes.fuse_loss import FuseLoss
from optimus_compiler.passes.fuse_sparse_moe import FuseSparseMoE
from optimus_compiler.passes.shard_optimizer import ShardOptimizer
from optimus_compiler.passes.widen_products import WidenProducts


@dataclass(frozen=True)
class PassOptions:
    """What a user may ask of the default passes."""

    force_uniform_routing: bool = False
    dispatch: Literal["allgather", "alltoall"] = "allgather"
    expert_rows: float | Literal["exact"] = 2.0


def default_passes(mesh: Mesh, options: PassOptions) -> PassPipeline:
    """The passes that compile runs, in order. Insert, drop or write your own: PassPipeline((*passes, MyPass()))."""
    return PassPipeline((
        Canonicalise(),
        CausalMask(),
        FuseSparseMoE(),
        FuseLoss(),
        *([ForceUniformRouting()] if options.force_uniform_routing else []),
        *([ExpertParallel(options.expert_rows, options.dispatch)] if mesh.ep > 1 else []),
        ShardOptimizer(),
        WidenProducts(),
    ))  # fmt: skip


__all__ = [
    "Canonicalise",
    "CausalMask",
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
    "WidenProducts",
    "default_passes",
    "lift_row_bounds",
]
