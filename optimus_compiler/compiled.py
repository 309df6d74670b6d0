"""CompiledModel: the module that compile returns; runs micro-batches and steps, holds the weights of this rank."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from optimus_compiler.check import check_against_original
from optimus_compiler.executor import Executor
from optimus_compiler.explain import explain
from optimus_compiler.first_backward import FirstBackward
from optimus_compiler.lower import Backend, values_carrying_gradients
from optimus_compiler.mesh import DIMENSIONS
from optimus_compiler.micro_batches import divide, padded
from optimus_compiler.passes import PassPipeline
from optimus_compiler.program import OVERFLOW, PROBE, TRAINING, WATCH, Program
from optimus_compiler.runtime.buckets import Bucket, make_buckets
from optimus_compiler.runtime.collectives import Transfer, all_reduce
from optimus_compiler.runtime.kernels import Kernels
from optimus_compiler.runtime.likelihood import row_log_likelihoods
from optimus_compiler.runtime.reduction import GradientReduction
from optimus_compiler.weights import Weights

if TYPE_CHECKING:
    from optimus_compiler.runtime.pipeline import Pipeline

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelOutput:
    """What one micro-batch gave: fp32 scalars, and logits [B, S, V] on request."""

    loss: Tensor | None
    ce_loss: Tensor | None
    aux_loss: Tensor | None
    logits: Tensor | None


@dataclass(frozen=True)
class StepOutput:
    """Means over all micro-batches of all ranks in a step (fp32 scalars), equal on every rank.

    expert_counts: tokens routed to each expert [E], summed, where there are any. redone: row buffers were too small,
    and the step was done again with larger ones.
    """

    loss: Tensor
    ce_loss: Tensor
    aux_loss: Tensor
    expert_counts: Tensor | None
    redone: bool = False


class CompiledModel(nn.Module):
    """A compiled program with its weights. Made by optimus_compiler.compile.

    Backward adds the gradients of expert weights to their `.grad` itself: hooks on these parameters run, with None, and
    torch.autograd.grad gives none for them.
    program: the program after all passes; buckets: the flat weights and gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        pipeline: PassPipeline,
        *,
        micro_batches: int,
        backend: Backend,
        kernels: Kernels,
        seed: int | None,
        check: bool,
    ):
        super().__init__()
        self.program = program
        self.pipeline = pipeline
        self.micro_batches = micro_batches
        self.backend = backend
        self.device = next((p.device for p in model.parameters() if not p.is_meta), program.mesh.device)
        self.buckets: tuple[Bucket, ...] = make_buckets(program, self.device)
        self.weights = Weights(program, model, self.buckets, self.device, seed)
        for name, parameter in self.weights.parameters.items():
            _register(self, name, parameter)
        self.reduction = GradientReduction(self.buckets, program.mesh)
        self._executor = Executor(
            program, self.weights.parameters, device=self.device, backend=backend, kernels=kernels
        )
        self._pipeline: Pipeline | None = None
        if program.mesh.pp > 1:
            from optimus_compiler.runtime import pipeline as pipelines  # takes a second to import

            self._pipeline = pipelines.Pipeline(
                program,
                values_carrying_gradients(program),
                micro_batches=micro_batches,
                device=self.device,
                backward=self._backward,
            )
        self._total_shapes = {
            role: program.example(program.outputs[role]).shape
            for role in (*TRAINING, *program.watched())
            if role in program.outputs
        } | {"overflows": torch.Size()}
        self._local_totals = torch.zeros(0, device=self.device)
        self._original = [model] if check else []  # in a list: not a submodule
        self._first_backward = FirstBackward(self.buckets, backend)

    # weights

    @property
    def weight_loads(self) -> int:
        """How often load_state_dict has replaced the weights."""
        return self.weights.loads

    def fp32_weights(self, bucket: Bucket, start: int, stop: int) -> Tensor:
        """What fp32 masters of elements [start, stop) of a bucket start from."""
        return self.weights.fp32(bucket, start, stop)

    def full_tensors(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors shaped like this rank's parameters, by their names: gathered, named as the model's; a collective."""
        return self.weights.full(local)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Copies of all weights under the names and in the shapes of the model that was compiled; a collective."""
        return self.weights.full({name: p.detach().clone() for name, p in self.weights.parameters.items()})

    def full_gradients(self) -> dict[str, Tensor]:
        """Copies of the global mean gradients under the names and in the shapes of the model; a collective.

        From backward until zero_grad, with or without an optimizer.
        """
        local: dict[str, Tensor] = {}
        for part in self.reduction.parts:
            mean = part.mean()
            local.update({entry.name: entry.view(mean) for entry in part.bucket.entries})
        return self.weights.full(local)

    def load_state_dict(
        self,
        state_dict: Mapping[str, Tensor] | None,
        strict: bool = True,
        assign: bool = False,
        *,
        transfer: Transfer | None = None,
    ) -> None:
        """Loads full weights named and shaped as the model's; ValueError names what does not fit.

        Every rank gives the state dict and keeps its shards; or, with `transfer`, rank 0 alone gives it (the others
        give None) and sends each parameter by "broadcast", or by "all_reduce" on stacks where broadcast fails: then no
        rank holds more than one full parameter beside its shards, rank 0's own state dict apart.
        """
        if not strict or assign:
            raise ValueError(
                "load_state_dict copies a complete state dict: strict=False and assign=True are not offered"
            )
        self.weights.load(state_dict, transfer)

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, Tensor]:  # type: ignore[override]
        """The same as full_state_dict()."""
        return self.full_state_dict()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zeroes the gradients in place: they are views of the buckets and persist."""
        self.reduction.zero()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CompiledModel":
        raise RuntimeError(
            "a compiled model's weights are views of flat buckets: cast or move the model before compile"
        )

    # running

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        return_logits: bool = False,
    ) -> ModelOutput:
        """One micro-batch [B, S], B <= micro_batch_size and S <= sequence_length: smaller is padded, the result cut.

        The loss is this rank's own; its backward gives gradients of the mean over all (dp, ep) ranks. Without labels it
        returns logits only. An input that compile was not told of is an error, never a recapture.
        """
        if self._pipeline is not None:
            raise RuntimeError(
                f"the model is divided over pp={self.program.mesh.pp} ranks, of which this one has only its stages: "
                "call train_step or eval_step, on all ranks"
            )
        given = {"attention_mask": attention_mask, "document_ids": document_ids, "position_ids": position_ids}
        everything = {"input_ids": input_ids, "labels": labels, **given}
        inputs = {name: value for name, value in everything.items() if value is not None}
        values = self._padded(inputs)
        batch, length = input_ids.shape
        if torch.is_grad_enabled():
            self.reduction.is_clean = False
        if labels is None:
            wanted: tuple[str, ...] = ("logits",)
        else:
            wanted = (*TRAINING, "logits") if return_logits else TRAINING
            self._check(inputs)
        out = self._executor.run(values, wanted)
        self._first_backward.watch(out.get("loss"), self._executor.buffers)
        for value in out.values():
            if value.requires_grad:
                value.register_hook(lambda _: self.reduction.reopen())
        logits = out["logits"][:batch, :length] if "logits" in out else None
        return ModelOutput(out.get("loss"), out.get("ce_loss"), out.get("aux_loss"), logits)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside it backward only adds this rank's gradients; the next backward outside reduces all of them.

        Where only shards of gradients are kept (zero=2) there is nothing else to add to: every backward reduces.
        """
        before, self.reduction.early = self.reduction.early, False
        try:
            yield
        finally:
            self.reduction.early = before

    def train_step(self, input_ids: Tensor, labels: Tensor, **inputs: Tensor) -> StepOutput:
        """Forward and backward of micro_batches micro-batches of this (dp, ep) coordinate.

        Tensors are [micro_batches * micro_batch_size, S]; the losses are means over all ranks. Gradients of the mean
        loss are added to what the buckets hold, ready for optimizer.step(). Nothing is read back to the host, unless
        row buffers are bounded (ExpertParallel): then one flag is, and when an expert's rank needed more rows than
        there are, on any rank, the step is done again with all the rows there can be.
        """
        values = {"input_ids": input_ids, "labels": labels, **inputs}
        for probe in self._executor.probes.values():
            probe.grad = None
        bounded = bool(self.program.overflows()) and self.reduction.is_clean  # else there were gradients to lose
        self.reduction.is_clean = False
        out, overflowed = self._micro_batches(values, train=True, exact_rows=not bounded)
        if bounded and overflowed.item():
            _log.warning(
                "an expert rank needed more rows than expert_rows allows: the step is done again without limit"
            )
            self.reduction.zero()
            self.reduction.is_clean = False
            out, _ = self._micro_batches(values, train=True, exact_rows=True)
            return replace(out, redone=True)
        return out

    def eval_step(self, input_ids: Tensor, labels: Tensor, **inputs: Tensor) -> StepOutput:
        """The losses of train_step without gradients."""
        with torch.no_grad():
            out, _ = self._micro_batches({"input_ids": input_ids, "labels": labels, **inputs}, train=False)
            return out

    @torch.no_grad()
    def log_likelihoods(self, input_ids: Tensor, targets: Tensor, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row: the log-probability of its targets, summed, fp32 [rows]; whether each is the likeliest, bool.

        [rows, S], rows at most micro_batches * micro_batch_size and S at most sequence_length. targets[:, s] is what
        should follow input_ids[:, s]; -100 does not count. Every rank calls it equally often, each (dp, ep) coordinate
        with rows of its own, or none ([0, S]).
        """
        rows_at_once = self.micro_batches * self.program.micro_batch_size
        if len(input_ids) > rows_at_once:
            raise ValueError(
                f"input_ids has {len(input_ids)} rows, and a step at most {rows_at_once}: give fewer at once"
            )
        micro_batches = self._divide({"input_ids": input_ids, "labels": targets, **inputs})
        found: list[Tensor] = []  # [2, rows] of each micro-batch, where the last stage is

        def read(logits_BSV: Tensor) -> None:
            targets_BS = micro_batches[len(found)]["labels"].to(self.device)
            rows, length = targets_BS.shape
            sums_B, likeliest_B = row_log_likelihoods(logits_BSV[:rows, :length], targets_BS)
            found.append(torch.stack([sums_B, likeliest_B.float()]))

        if self._pipeline is None:
            for micro_batch in micro_batches:
                read(self._executor.run(self._padded(micro_batch), ("logits",))["logits"])
        else:

            def run_stage(stage: int, values: dict[str, Tensor]) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
                out, onward = self._executor.run_stage(stage, values, ("loss", "logits"))
                if "logits" in out:
                    read(out["logits"])
                return out, onward

            self._pipeline.step(self._stacked(micro_batches), run_stage, train=False)
        here = torch.cat(found, dim=1) if found else torch.zeros(2, len(input_ids), device=self.device)
        sums, likeliest = all_reduce(here, self.program.mesh.group("pp"))
        return sums, likeliest.bool()

    def _divide(self, inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        return divide(inputs, self.program.micro_batch_size, self.micro_batches)

    def _padded(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return padded(inputs, self.program, self.device)

    def _stacked(self, micro_batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """All micro-batches, padded, one below the other."""
        each = [self._padded(micro_batch) for micro_batch in micro_batches]
        return {name: torch.cat([values[name] for values in each]) for name in each[0]}

    def _micro_batches(
        self, inputs: dict[str, Tensor], *, train: bool, exact_rows: bool = True
    ) -> tuple[StepOutput, Tensor]:
        """The step's means over all ranks, and how many row buffers were too small."""
        size = self.program.micro_batch_size
        rows = self.micro_batches * size
        for name, value in inputs.items():
            if tuple(value.shape) != (rows, self.program.sequence_length):
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}; a step takes {(rows, self.program.sequence_length)}: "
                    f"{self.micro_batches} micro-batches of {size} sequences"
                )
        wanted = (*TRAINING, *self.program.watched(), *(() if exact_rows else self.program.overflows()))
        if train:
            self.reduction.reopen()
        micro_batches = self._divide(inputs)
        totals: dict[str, Tensor] = {}
        if self._pipeline is None:
            for index, micro_batch in enumerate(micro_batches):
                values = self._padded(micro_batch)
                self._check(micro_batch)
                out = self._executor.run(values, wanted, exact_rows=exact_rows)
                if train:
                    self._first_backward.watch(out["loss"], self._executor.buffers)
                    with self._backward(index == self.micro_batches - 1):
                        (out["loss"] / self.micro_batches).backward()
                _add(totals, out)
        else:

            def run_stage(stage: int, values: dict[str, Tensor]) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
                out, onward = self._executor.run_stage(stage, values, wanted, exact_rows=exact_rows)
                _add(totals, out)
                return out, onward

            waiting = self._first_backward.expect() if train and not self._first_backward.is_over else None
            self._pipeline.step(self._stacked(micro_batches), run_stage, train=train)
            if waiting is not None:
                self._first_backward.refuse_missing(waiting, self._executor.buffers)
        return self._means(totals)

    def local_totals(self) -> dict[str, Tensor]:
        """The sums of the last step over this rank's own micro-batches, before those of others were added, by role."""
        parts = self._local_totals.split([shape.numel() for shape in self._total_shapes.values()])
        return dict(zip(self._total_shapes, parts, strict=True))

    def probe_gradients(self) -> dict[str, Tensor]:
        """Of each watched output of this rank's stages (`watch.N`): sums of the gradients of the watched values."""
        return {
            name.replace(PROBE, WATCH): probe.grad
            for name, probe in self._executor.probes.items()
            if probe.grad is not None
        }

    @contextmanager
    def _backward(self, is_last: bool) -> Iterator[None]:
        """Around one backward; the last one of a stage starts the reduction of its gradients."""
        reduces_early = self.reduction.early
        self.reduction.early = reduces_early and is_last
        try:
            with record_function("optimus::backward"):
                yield
        finally:
            self.reduction.early = reduces_early

    def _means(self, totals: dict[str, Tensor]) -> tuple[StepOutput, Tensor]:
        """Sums over micro-batches, added up over the ranks in one collective, as means.

        Ranks of pp whose stages make an output not add zeros; those of tp have equal ones.
        """
        mesh, shapes = self.program.mesh, self._total_shapes
        flat = torch.cat([totals.get(role, torch.zeros(shape, device=self.device)).reshape(-1)
                          for role, shape in shapes.items()])  # fmt: skip
        self._local_totals = flat.clone()
        flat = all_reduce(flat, mesh.group(*DIMENSIONS)) / mesh.tp
        parts = flat.split([shape.numel() for shape in shapes.values()])
        summed = {role: part.view(shape) for (role, shape), part in zip(shapes.items(), parts, strict=True)}
        count = self.micro_batches * mesh.size_of("dp", "ep")
        means = {name: summed[name] / count for name in ("loss", "ce_loss", "aux_loss")}
        return StepOutput(**means, expert_counts=summed.get("expert_counts")), summed["overflows"]

    def _check(self, inputs: dict[str, Tensor]) -> None:
        """compile(check=True): the first batch through the original module too, which is let go when they agree."""
        if self._original:
            check_against_original(self, self._original[0], inputs)
            self._original.clear()

    def added_in_place(self) -> set[str]:
        """The parameters to whose `.grad` the backward of the last forward adds by itself: autograd sees none."""
        return set(self._executor.buffers)

    def run(self, inputs: dict[str, Tensor], wanted: tuple[str, ...]) -> dict[str, Tensor]:
        """Runs the program on one micro-batch; the wanted outputs by role."""
        return self._executor.run(self._padded(inputs), wanted)

    # reading

    def explain(self, graphs: bool = False) -> str:
        """The pipeline, what each pass matched, nodes before and after, and the distinct segments."""
        return explain(self.program, self.pipeline, graphs)


def _add(totals: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
    """Adds the outputs of a micro-batch to the totals of the step; all overflow flags to one."""
    for role, value in outputs.items():
        role = "overflows" if role.startswith(OVERFLOW) else role
        totals[role] = totals[role] + value.detach() if role in totals else value.detach().float()


def _register(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Registers a parameter under a dotted name, so that named_parameters() gives that name."""
    *path, leaf = name.split(".")
    module = root
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(leaf, parameter)
