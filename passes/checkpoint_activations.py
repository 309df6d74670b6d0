"""CheckpointActivations: which activations are computed again in backward instead of being kept (paper, SAC)."""

from dataclasses import dataclass

from optimus_compiler.passes.base import Pass, PassError, PassReport
from optimus_compiler.program import Program


@dataclass(frozen=True)
class CheckpointActivations(Pass):
    """Recompute tags on norm, attention and moe blocks."""

    blocks: tuple[str, ...] = ()
    memory_budget: str | None = None
    keep_gathered: bool = False

    def run(self, program: Program) -> PassReport:
        raise PassError(f"{type(self).__name__} is not there yet")
