"""Executor: compiles the segments of a program on first use and runs them in order, stage by stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from optimus_compiler.gradient_buffers import add_gradient_buffers
from optimus_compiler.graphs import copy_graph
from optimus_compiler.lower import Backend, Function, gradient_marks, lower
from optimus_compiler.passes import lift_row_bounds
from optimus_compiler.program import PROBE, Program, Segment, with_outputs
from optimus_compiler.runtime.kernels import Kernels, set_kernels


@dataclass
class _Step:
    """One segment and its compiled function."""

    segment: Segment
    parameters: Sequence[Tensor]
    marks: tuple[bool, ...]
    function: Function
    buffers: tuple[str, ...] = ()  # parameters to whose `.grad` backward itself adds
    last_read: tuple[str, ...] = ()  # values that nothing after this segment needs
    checked: bool = False


class Executor:
    """Runs a program on given parameters. Segments of one key are compiled once."""

    def __init__(
        self,
        program: Program,
        parameters: Mapping[str, Tensor],
        *,
        device: torch.device,
        backend: Backend,
        kernels: Kernels,
    ) -> None:
        self.program = program
        self.backend = backend
        self.kernels = kernels
        self._parameters = parameters
        constants = {**program.constants, **program.constant_values()}
        self._constants = {name: value.to(device, copy=True) for name, value in constants.items()}
        # their gradients are sums of gradients: what they were before a step is no matter, only whether they are finite
        self.probes = {
            name: value.requires_grad_() for name, value in self._constants.items() if name.startswith(PROBE)
        }
        self._functions: dict[str, Function] = {}
        self._marks = gradient_marks(program)
        self._experts = [name for name, spec in program.parameters.items() if spec.role == "expert" and spec.trainable
                         and name in parameters]  # fmt: skip
        self._schedules: dict[tuple[int, tuple[str, ...], bool, tuple[torch.dtype | None, ...]], list[_Step]] = {}
        self.buffers: dict[str, Tensor] = {}  # by parameter: what the backward of the last run adds its gradient to
        self._carried = {stage: program.carried_into(stage) for stage in range(1, len(program.stage_ranks))}

    def run(self, inputs: dict[str, Tensor], wanted: tuple[str, ...], *, exact_rows: bool = True) -> dict[str, Tensor]:
        """Runs all segments; the wanted outputs by role, those that the program has. See run_stage."""
        self.buffers = {}
        return self.run_stage(0, inputs, wanted, exact_rows=exact_rows)[0]

    def run_stage(
        self, stage: int, inputs: dict[str, Tensor], wanted: tuple[str, ...], *, exact_rows: bool = True
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        """Runs the segments of a stage; (the wanted outputs that it makes, by role; what the next stage reads).

        Where an expert weight has a gradient already (its part of a bucket), backward adds to that in place.
        inputs: the program's, and what the stage before gave, by name. exact_rows: row buffers hold every row there
        can be. Without it they are bounded, and the outputs `program.overflows()` say whether the bounds held.
        """
        set_kernels(self.kernels)
        values = {**self._constants, **inputs}
        for step in self._schedule(stage, wanted, exact_rows or not self.program.overflows()):
            # .data has a version count of its own: other micro-batches write here before this one's backward
            buffers = {name: self._parameters[name].grad.data for name in step.buffers}  # type: ignore[union-attr]
            self.buffers.update(buffers)
            arguments = [*step.parameters, *(values[name] for name in step.segment.inputs), *buffers.values()]
            if not torch.is_grad_enabled():
                # AOTAutograd's functions switch gradients on: what needs none must look so
                arguments = [argument.detach() for argument in arguments]
            elif not step.checked:
                _check_marks(step, arguments)
            values.update(zip(step.segment.outputs, step.function(*arguments), strict=True))
            for name in step.last_read:
                del values[name]
        made = {role: self.program.outputs[role] for role in wanted if role in self.program.outputs}
        outputs = {role: values[name] for role, name in made.items() if name in values}
        return outputs, tuple(values[name] for name in self._carried.get(stage + 1, ()))

    def _schedule(self, stage: int, wanted: tuple[str, ...], exact_rows: bool) -> list[_Step]:
        """A stage compiled for the wanted outputs; only the head differs between choices of outputs."""
        gradients = {name: self._parameters[name].grad for name in self._experts}
        dtypes = tuple(None if gradient is None else gradient.dtype for gradient in gradients.values())
        key = (stage, wanted, exact_rows, dtypes)
        if key not in self._schedules:
            with self.program.fake_mode:
                fakes = {name: torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
                         for name, gradient in gradients.items() if gradient is not None}  # fmt: skip
            steps = []
            results = {self.program.outputs[role] for role in wanted if role in self.program.outputs}
            results.update(self._carried.get(stage + 1, ()))
            for segment in self.program.segments:
                if segment.kind == "const" or segment.stage != stage:
                    continue
                marks = self._marks[id(segment.graph)]
                if segment.kind == "head":
                    segment, marks = with_outputs(segment, marks, results)
                segment = replace(segment, graph=copy_graph(segment.graph))
                if exact_rows:
                    lift_row_bounds(segment.graph)
                buffers = add_gradient_buffers(segment, fakes)
                marks += (False,) * len(buffers)
                if segment.key not in self._functions:
                    self._functions[segment.key] = lower(segment, marks, self.backend, self.program.mesh)
                parameters = [self._parameters[name] for name in segment.parameters]
                steps.append(_Step(segment, parameters, marks, self._functions[segment.key], buffers))
            _note_last_reads(steps, results)
            self._schedules[key] = steps
        return self._schedules[key]


def _note_last_reads(steps: list[_Step], results: set[str]) -> None:
    """Marks where each activation is read last, so that evaluation holds only what it needs."""
    made = {name for step in steps for name in step.segment.outputs}
    later = set(results)
    for step in reversed(steps):
        seen = set(step.segment.inputs) | set(step.segment.outputs)
        step.last_read = tuple(name for name in made & seen if name not in later)
        later |= seen


def _check_marks(step: _Step, arguments: list[Tensor]) -> None:
    names = (*step.segment.parameters, *step.segment.inputs, *step.buffers)
    for name, mark, argument in zip(names, step.marks, arguments, strict=True):
        if argument.requires_grad and not mark:
            raise RuntimeError(
                f"{name} needs a gradient, and the {step.segment.kind} was compiled without one: this is a bug"
            )
    step.checked = True
