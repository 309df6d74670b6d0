"""Pass, PassReport and PassPipeline: what a graph pass is, what it reports, and how a list of them runs."""

import ast
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from torch import fx

from optimus_compiler.program import Program


class PassError(RuntimeError):
    """A pass found something it must not change, or nothing where it should; the message says what it looked for."""


@dataclass(frozen=True)
class PassReport:
    """What a pass did: how many places matched, nodes added and removed (every layer counted), notes, seconds."""

    name: str
    matches: int
    notes: tuple[str, ...] = ()
    added: int = 0
    removed: int = 0
    nodes_before: int = 0
    nodes_after: int = 0
    seconds: float = 0.0


class Pass:
    """One program -> program rewrite. Subclasses are frozen dataclasses whose fields are the pass's options."""

    def run(self, program: Program) -> PassReport:
        """Rewrites the program in place and reports `matches` and `notes`; the pipeline fills in the rest."""
        raise TypeError(f"{type(self).__name__} does not define run()")

    def report(self, matches: int, *notes: str) -> PassReport:
        """A report of this pass."""
        return PassReport(type(self).__name__, matches, notes)

    def __str__(self) -> str:
        options = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)  # type: ignore[arg-type]
                   if getattr(self, f.name) != f.default]  # fmt: skip
        return f"{type(self).__name__}({', '.join(options)})"


@dataclass(frozen=True)
class PassPipeline:
    """Passes in the order they run. `str()` prints the list and `parse` reads it back."""

    passes: tuple[Pass, ...]

    def run(self, program: Program) -> list[PassReport]:
        """Runs every pass; after each, drops what nobody reads, merges equal segments and verifies the program."""
        for step in self.passes:
            before, nodes_before, start = _nodes(program), program.node_count(), time.perf_counter()
            report = step.run(program)
            program.prune()
            program.deduplicate()
            program.verify()
            after = _nodes(program)
            program.history.append(replace(
                report,
                added=sum(count for node, count in after.items() if node not in before),
                removed=sum(count for node, count in before.items() if node not in after),
                nodes_before=nodes_before,
                nodes_after=program.node_count(),
                seconds=time.perf_counter() - start,
            ))  # fmt: skip
        read = {name for segment in program.segments for name in segment.inputs}
        for name in program.inputs:
            if name not in read:
                raise PassError(f"nothing reads the declared input {name}: no operation of the model, no pass")
        return list(program.history)

    def __str__(self) -> str:
        return " -> ".join(str(step) for step in self.passes)

    @classmethod
    def parse(cls, text: str) -> "PassPipeline":
        """Reads `Canonicalise() -> FuseLoss(logits_limit=0)`; ValueError names what is not a pass or an option."""
        known = {kind.__name__: kind for kind in _subclasses(Pass)}
        steps = []
        for part in text.split("->"):
            try:
                call = ast.parse(part.strip(), mode="eval").body
            except SyntaxError as error:
                raise ValueError(f"{part.strip()!r} is not a pass: write Name(option=value)") from error
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
                raise ValueError(f"{part.strip()!r} is not a pass: write Name(option=value)")
            if call.func.id not in known:
                raise ValueError(f"there is no pass {call.func.id!r}; the passes are {', '.join(sorted(known))}")
            kind = known[call.func.id]
            options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
            for name in options:
                if name not in {f.name for f in fields(kind)}:  # type: ignore[arg-type]
                    raise ValueError(f"{kind.__name__} has no option {name!r}")
            steps.append(kind(**options))
        return cls(tuple(steps))


def _subclasses(kind: type[Pass]) -> Iterable[type[Pass]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)


def _nodes(program: Program) -> dict[fx.Node, int]:
    """Every operation of the program with the number of segments that run it."""
    return {node: len(group) for group in program.groups() for node in group[0].graph.graph.nodes
            if node.op == "call_function"}  # fmt: skip
