"""ShardOptimizer: says for every parameter over which ranks its optimizer state may be divided (EPSO)."""

from collections import Counter
from dataclasses import dataclass, replace

from optimus_compiler.passes.base import Pass, PassReport
from optimus_compiler.program import Program


@dataclass(frozen=True)
class ShardOptimizer(Pass):
    """EP-aware sharding of optimizer state (paper, section 3.2), generalised to any mesh.

    1. A parameter is replicated on the mesh dimensions that its placement does not name.
    2. Its state is divided over all of them: expert weights (P_E, sharded on ep) over dp, all others (P_NE) over
       dp x ep, so that no element of the state is stored twice.

    ShardedAdamW does it: sharding="epso" takes these dimensions, "so" (the baseline) only dp among them, "none" none.
    """

    def run(self, program: Program) -> PassReport:
        counts: Counter[str] = Counter()
        for name, spec in program.parameters.items():
            if spec.trainable:
                program.parameters[name] = replace(spec, state=spec.replicated())
                sizes = program.mesh.sizes()
                counts[" x ".join(f"{d}={sizes[d]}" for d in spec.replicated() if sizes[d] > 1) or "one rank"] += 1
        return self.report(sum(counts.values()), *(f"{count} over {where}" for where, count in counts.items()))
