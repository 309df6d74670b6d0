"""Runs this rank's stages of a pipeline under a schedule of torch.distributed.pipelining."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from optimus_compiler.program import Program

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved-1f1b": ScheduleInterleaved1F1B}


class RunStage(Protocol):
    """Runs one stage on one micro-batch."""

    def __call__(self, stage: int, values: dict[str, Tensor]) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        """The program's inputs and what the stage before gave, by name -> (outputs by role, what the next reads)."""
        ...


class Pipeline:
    """The stages of this rank. `step` runs a step's micro-batches through all ranks of pp."""

    def __init__(
        self,
        program: Program,
        carrying_gradients: set[str],
        *,
        micro_batches: int,
        device: torch.device,
        backward: Callable[[bool], AbstractContextManager[None]],
    ) -> None:
        """carrying_gradients: values whose gradient travels back. backward(is_last): the context that a stage's
        backward runs in; is_last says that it is the stage's last in this step."""
        self.run_stage: RunStage | None = None  # of the step that is running
        count = len(program.stage_ranks)

        def examples(stage: int) -> tuple[Tensor, ...]:
            """What enters a stage, on the meta device; after the last, the loss leaves."""
            if stage == count:
                return (torch.empty(1, device="meta", requires_grad=True),)
            found = []
            for name in program.carried_into(stage):
                value = program.example(name)
                marked = name in carrying_gradients
                found.append(torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=marked))
            return tuple(found)

        stages = [
            _Stage(
                _StageModule(self, stage, program.carried_into(stage), is_last=stage == count - 1),
                stage,
                count,
                device,
                input_args=examples(stage),
                output_args=examples(stage + 1),
                group=program.mesh.group("pp"),
            )
            for stage in program.stages_here()
        ]
        for stage in stages:
            stage.context = backward
        schedule: Any = SCHEDULES[program.schedule]
        self._schedule = schedule(
            stages if program.schedule == "interleaved-1f1b" else stages[0],
            n_microbatches=micro_batches,
            loss_fn=lambda loss, _: loss.sum() / micro_batches,
            scale_grads=False,
        )

    def step(self, inputs: Mapping[str, Tensor], run_stage: RunStage, *, train: bool) -> None:
        """Forward, and with `train` backward, of all micro-batches through the stages here.

        inputs: [micro_batches * micro_batch_size, S] each, the same on all ranks of pp.
        """
        self.run_stage = run_stage
        if train:
            self._schedule.step(**inputs, target=inputs["input_ids"], return_outputs=False)
        else:
            self._schedule.eval(**inputs, target=inputs["input_ids"], return_outputs=False)


class _StageModule(nn.Module):
    """What torch's stage calls: what was received, and the program's inputs by name -> what to send, or the loss [1].

    It holds no parameters: they are leaves that autograd finds.
    """

    def __init__(self, pipeline: Pipeline, stage: int, received: tuple[str, ...], *, is_last: bool) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._stage = stage
        self._received = received
        self._is_last = is_last

    def forward(self, *received: Tensor, **inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        assert self._pipeline.run_stage is not None, "a stage runs within a step"
        values = {**inputs, **dict(zip(self._received, received, strict=True))}
        outputs, onward = self._pipeline.run_stage(self._stage, values)
        return outputs["loss"].reshape(1) if self._is_last else tuple(value.contiguous() for value in onward)


class _Stage(PipelineStage):
    """torch's stage with a context around each backward."""

    context: Callable[[bool], AbstractContextManager[None]]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self.context(last_backward):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
