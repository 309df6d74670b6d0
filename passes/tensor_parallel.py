"""TensorParallel: attention heads, MLP and expert width and the vocabulary divided over the ranks of `tp`."""

from dataclasses import dataclass

from optimus_compiler.passes.base import Pass, PassError, PassReport
from optimus_compiler.program import Program


@dataclass(frozen=True)
class TensorParallel(Pass):
    """Weights divided over the ranks of `tp`."""

    sequence_parallel: bool = False

    def run(self, program: Program) -> PassReport:
        raise PassError(f"{type(self).__name__} is not there yet")
