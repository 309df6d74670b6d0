"""Passes: program -> program rewrites, one a file, and the list that compile runs by default."""

from dataclasses import dataclass

from optimus_compiler.mesh import Mesh
from optimus_compiler.passes.base import Pass, PassError, PassPipeline, PassReport
from optimus_compiler.passes.canonicalise import Canonicalise
from optimus_compiler.passes.causal_mask import CausalMask
from optimus_compiler.passes.force_uniform_routing import ForceUniformRouting
from optimus_compiler.passes.fuse_loss import FuseLoss
from optimus_compiler.passes.fuse_sparse_moe import FuseSparseMoE
from optimus_compiler.passes.widen_products import WidenProducts


@dataclass(frozen=True)
class PassOptions:
    """What a user may ask of the default passes."""

    force_uniform_routing: bool = False


def default_passes(mesh: Mesh, options: PassOptions) -> PassPipeline:
    """The passes that compile runs, in order. Insert, drop or write your own: PassPipeline((*passes, MyPass()))."""
    return PassPipeline((
        Canonicalise(),
        CausalMask(),
        FuseSparseMoE(),
        FuseLoss(),
        *([ForceUniformRouting()] if options.force_uniform_routing else []),
        WidenProducts(),
    ))  # fmt: skip


__all__ = [
    "Canonicalise",
    "CausalMask",
    "ForceUniformRouting",
    "FuseLoss",
    "FuseSparseMoE",
    "Pass",
    "PassError",
    "PassOptions",
    "PassPipeline",
    "PassReport",
    "WidenProducts",
    "default_passes",
]
