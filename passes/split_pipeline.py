"""SplitPipeline: the segments grouped into the stages of a pipeline, balanced by cost."""

from dataclasses import dataclass

from optimus_compiler.passes.base import Pass, PassError, PassReport
from optimus_compiler.program import Program


@dataclass(frozen=True)
class SplitPipeline(Pass):
    """Stages."""

    schedule: str = "1f1b"
    micro_batches: int = 1
    virtual_stages: int = 1
    boundaries: tuple[int, ...] | None = None

    def run(self, program: Program) -> PassReport:
        raise PassError(f"{type(self).__name__} is not there yet")
