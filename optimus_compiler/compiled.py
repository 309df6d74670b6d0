"""CompiledModel: runs a program's segments in order; parameters are views of flat buckets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from optimus_compiler.check import check_against_original
from optimus_compiler.explain import explain
from optimus_compiler.lower import Backend, Function, copy_graph, gradient_marks, lower
from optimus_compiler.passes import PassPipeline
from optimus_compiler.program import TRAINING, ParameterSpec, Program, Segment, keep_outputs
from optimus_compiler.runtime.buckets import Bucket, make_buckets
from optimus_compiler.runtime.initialise import draw
from optimus_compiler.runtime.kernels import Kernels, set_kernels

IGNORED_LABEL = -100


@dataclass(frozen=True)
class ModelOutput:
    """What one micro-batch gave: fp32 scalars, and logits [B, S, V] on request."""

    loss: Tensor | None
    ce_loss: Tensor | None
    aux_loss: Tensor | None
    logits: Tensor | None


@dataclass(frozen=True)
class StepOutput:
    """Means over the micro-batches of a step (fp32 scalars), and tokens routed to each expert [E], summed, if any."""

    loss: Tensor
    ce_loss: Tensor
    aux_loss: Tensor
    expert_counts: Tensor | None


@dataclass
class _Step:
    """One segment and its compiled function."""

    segment: Segment
    parameters: Sequence[Tensor]
    marks: tuple[bool, ...]
    function: Function
    last_read: tuple[str, ...] = ()  # values that nothing after this segment needs
    checked: bool = False


class CompiledModel(nn.Module):
    """A compiled program with its weights. Made by optimus_compiler.compile.

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
        self.kernels = kernels
        self.device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
        self.seed = seed
        self.initializer_range = float(getattr(model.config, "initializer_range", 0.02))
        self.buckets: tuple[Bucket, ...] = make_buckets(program, self.device)
        self._model_state_names = tuple(model.state_dict())
        self._original = [model] if check else []  # in a list: not a submodule
        # a padding row gets no gradient: Hugging Face keeps it zero
        self._padding_rows = {f"{path}.weight": module.padding_idx for path, module in model.named_modules()
                              if isinstance(module, nn.Embedding) and module.padding_idx is not None}  # fmt: skip
        self._set_weights(model)
        self._constants = {name: value.to(self.device, copy=True) for name, value in
                           {**program.constants, **program.constant_values()}.items()}  # fmt: skip
        self._functions: dict[str, Function] = {}
        self._marks = gradient_marks(program)
        self._schedules: dict[tuple[str, ...], list[_Step]] = {}
        self._watched = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    # weights

    def _set_weights(self, model: nn.Module) -> None:
        """Registers every parameter under its name; values from the seed, or from the model."""
        state = {**dict(model.named_parameters()), **self.program.constants}
        by_name = {entry.name: entry.parameter for bucket in self.buckets for entry in bucket.entries}
        for name, spec in self.program.parameters.items():
            drawn = self.seed is not None and isinstance(state[spec.source.names[0]], nn.Parameter)
            if not drawn and any(state[source].is_meta for source in spec.source.names):
                raise ValueError(f"parameter {name} is on the meta device and has no value: give compile a seed")
            value = self._draw(spec) if drawn else spec.source.build(state, spec.shape)
            if name in by_name:
                with torch.no_grad():
                    by_name[name].copy_(value)
            else:
                by_name[name] = nn.Parameter(value.to(self.device, spec.dtype, copy=True), requires_grad=False)
            _register(self, name, by_name[name])
        self._parameters_by_name = by_name

    def _draw(self, spec: ParameterSpec) -> Tensor:
        assert self.seed is not None
        drawn = draw(spec.name, spec.shape, self.seed, self.initializer_range).view(spec.shape)
        if spec.name in self._padding_rows:
            drawn[self._padding_rows[spec.name]] = 0
        return drawn

    def fp32_weights(self, bucket: Bucket) -> Tensor:
        """What fp32 master weights of a bucket start from: the fp32 draw where weights were drawn, else the weights."""
        flat = bucket.weights.detach().to(torch.float32, copy=True)
        if self.seed is not None and bucket.weights.dtype != torch.float32:
            for entry in bucket.entries:
                drawn, weight = self._draw(self.program.parameters[entry.name]).to(flat.device), entry.view(flat)
                weight.copy_(torch.where(drawn.to(bucket.weights.dtype) == weight, drawn, weight))
        return flat

    def full_state_dict(self) -> dict[str, Tensor]:
        """Copies of all weights under the names and in the shapes of the model that was compiled."""
        return self.in_model_names({name: p.detach().clone() for name, p in self._parameters_by_name.items()})

    def full_gradients(self) -> dict[str, Tensor]:
        """Copies of all gradients of trainable parameters, under the names and in the shapes of the model."""
        gradients = {
            name: p.grad.detach().clone() for name, p in self._parameters_by_name.items() if p.grad is not None
        }
        return self.in_model_names(gradients)

    def in_model_names(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of whole parameters under the names and in the shapes of the model that was compiled."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            found.update(self.program.parameters[name].source.split(tensor))
        for alias, name in self.program.aliases.items():
            if name in found:
                found[alias] = found[name]
        return {name: found[name] for name in self._model_state_names if name in found}

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> None:
        """Loads full weights named and shaped as the model's; ValueError names what does not fit."""
        if not strict or assign:
            raise ValueError(
                "load_state_dict copies a complete state dict: strict=False and assign=True are not offered"
            )
        needed = {name for spec in self.program.parameters.values() for name in spec.source.names}
        missing, unknown = needed - set(state_dict), set(state_dict) - set(self._model_state_names)
        if missing or unknown:
            raise ValueError(f"the state dict lacks {sorted(missing)[:3]} and has unknown {sorted(unknown)[:3]}")
        values = {name: spec.source.build(state_dict, spec.shape) for name, spec in self.program.parameters.items()}
        with torch.no_grad():
            for name, value in values.items():
                self._parameters_by_name[name].copy_(value)

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, Tensor]:  # type: ignore[override]
        """The same as full_state_dict()."""
        return self.full_state_dict()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zeroes the gradients in place: they are views of the buckets and persist."""
        for bucket in self.buckets:
            bucket.gradients.zero_()

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

        Without labels it returns logits only. An input that compile was not told of is an error, never a recapture.
        """
        given = {"attention_mask": attention_mask, "document_ids": document_ids, "position_ids": position_ids}
        everything = {"input_ids": input_ids, "labels": labels, **given}
        inputs = {name: value for name, value in everything.items() if value is not None}
        values = self.pad(inputs)
        batch, length = input_ids.shape
        if labels is None:
            wanted: tuple[str, ...] = ("logits",)
        else:
            wanted = (*TRAINING, "logits") if return_logits else TRAINING
            self._check(inputs)
        out = self.run(values, wanted)
        self._watch_first_backward(out.get("loss"))
        logits = out["logits"][:batch, :length] if "logits" in out else None
        return ModelOutput(out.get("loss"), out.get("ce_loss"), out.get("aux_loss"), logits)

    def train_step(self, input_ids: Tensor, labels: Tensor, **inputs: Tensor) -> StepOutput:
        """Forward and backward of micro_batches micro-batches: tensors are [micro_batches * micro_batch_size, S].

        Gradients of the mean loss are added to what the buckets hold; nothing is read back to the host.
        """

        def backward(out: dict[str, Tensor]) -> None:
            (out["loss"] / self.micro_batches).backward()

        return self._micro_batches({"input_ids": input_ids, "labels": labels, **inputs}, backward)

    def eval_step(self, input_ids: Tensor, labels: Tensor, **inputs: Tensor) -> StepOutput:
        """The losses of train_step without gradients."""
        with torch.no_grad():
            return self._micro_batches({"input_ids": input_ids, "labels": labels, **inputs}, lambda out: None)

    def _micro_batches(self, inputs: dict[str, Tensor], then: Callable[[dict[str, Tensor]], None]) -> StepOutput:
        rows = self.micro_batches * self.program.micro_batch_size
        for name, value in inputs.items():
            if tuple(value.shape) != (rows, self.program.sequence_length):
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}; a step takes {(rows, self.program.sequence_length)}: "
                    f"{self.micro_batches} micro-batches of {self.program.micro_batch_size} sequences"
                )
        totals: dict[str, Tensor] = {}
        for index in range(self.micro_batches):
            first = index * self.program.micro_batch_size
            micro_batch = {name: value[first : first + self.program.micro_batch_size] for name, value in inputs.items()}
            values = self.pad(micro_batch)
            self._check(micro_batch)
            out = self.run(values, TRAINING)
            self._watch_first_backward(out["loss"])
            then(out)
            for name, value in out.items():
                totals[name] = totals[name] + value.detach() if name in totals else value.detach()
        means = {name: totals[name] / self.micro_batches for name in ("loss", "ce_loss", "aux_loss")}
        return StepOutput(**means, expert_counts=totals.get("expert_counts"))

    def _check(self, inputs: dict[str, Tensor]) -> None:
        """compile(check=True): the first batch through the original module too, which is let go when they agree."""
        if self._original:
            check_against_original(self, self._original[0], inputs)
            self._original.clear()

    def run(self, inputs: dict[str, Tensor], wanted: tuple[str, ...]) -> dict[str, Tensor]:
        """Runs the segments; the wanted outputs by role."""
        set_kernels(self.kernels)
        wanted = tuple(role for role in wanted if role in self.program.outputs)
        values = {**self._constants, **inputs}
        for step in self._schedule(wanted):
            arguments = [*step.parameters, *(values[name] for name in step.segment.inputs)]
            if not torch.is_grad_enabled():
                # AOTAutograd's functions switch gradients on: what needs none must look so
                arguments = [argument.detach() for argument in arguments]
            elif not step.checked:
                _check_marks(step, arguments)
            values.update(zip(step.segment.outputs, step.function(*arguments), strict=True))
            for name in step.last_read:
                del values[name]
        return {role: values[self.program.outputs[role]] for role in wanted}

    def _schedule(self, wanted: tuple[str, ...]) -> list[_Step]:
        """The segments compiled for the wanted outputs; only the head differs between choices of outputs."""
        if wanted not in self._schedules:
            steps = []
            results = {self.program.outputs[role] for role in wanted}
            for segment in self.program.segments:
                if segment.kind == "const":
                    continue
                marks = self._marks[id(segment.graph)]
                if segment.kind == "head":
                    segment, marks = _with_outputs(segment, marks, results)
                if segment.key not in self._functions:
                    self._functions[segment.key] = lower(segment, marks, self.backend)
                parameters = [self._parameters_by_name[name] for name in segment.parameters]
                steps.append(_Step(segment, parameters, marks, self._functions[segment.key]))
            _note_last_reads(steps, results)
            self._schedules[wanted] = steps
        return self._schedules[wanted]

    def pad(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Right-pads to the compiled shape: the losses ignore padding, and causal attention ends before it."""
        if inputs["input_ids"].dim() != 2:
            raise ValueError(
                f"input_ids has shape {tuple(inputs['input_ids'].shape)}, a micro-batch is [batch, sequence]"
            )
        batch, length = inputs["input_ids"].shape
        full = (self.program.micro_batch_size, self.program.sequence_length)
        if batch > full[0] or length > full[1]:
            raise ValueError(f"input_ids has shape {(batch, length)}, compiled was {full}: cut it, or compile for more")
        declared = [name for name in self.program.inputs if name not in ("valid", "labels")]
        for name, value in inputs.items():
            if name not in (*declared, "labels"):
                raise ValueError(f"{name} was not declared: compile(..., inputs=(..., {name!r}))")
            if value.shape != inputs["input_ids"].shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, input_ids {(batch, length)}")
        for name in declared:
            if name not in inputs:
                raise ValueError(f"{name} was declared to compile and must be given")
        for name, value in inputs.items():
            if value.dtype.is_floating_point or value.dtype.is_complex:
                raise ValueError(f"{name} is {value.dtype}: give integers")
        # compiled code reads memory as it was captured: int64, contiguous
        padded = {name: value.to(self.device, torch.int64).contiguous() for name, value in inputs.items()}
        if "valid" in self.program.inputs:
            mask = padded.get("attention_mask")
            padded["valid"] = mask != 0 if mask is not None else torch.ones_like(padded["input_ids"], dtype=torch.bool)
        if (batch, length) == full:
            return padded
        # a padded position attends to itself: attention over nothing would be NaN
        fills = {"labels": IGNORED_LABEL, "attention_mask": 1, "document_ids": -1, "valid": False}
        edges = (0, full[1] - length, 0, full[0] - batch)
        return {name: nn.functional.pad(value, edges, value=fills.get(name, 0)) for name, value in padded.items()}

    def _watch_first_backward(self, loss: Tensor | None) -> None:
        """At the end of the first backward, refuses a program in which a parameter got no gradient."""
        if self._watched or loss is None or not loss.requires_grad:
            return
        for hook in self._hooks:
            hook.remove()
        names = {entry.name for bucket in self.buckets for entry in bucket.entries}
        waiting = set(names)
        self._hooks = [entry.parameter.register_post_accumulate_grad_hook(lambda _, n=entry.name: waiting.discard(n))
                       for bucket in self.buckets for entry in bucket.entries]  # fmt: skip

        def finish() -> None:
            for hook in self._hooks:
                hook.remove()
            if waiting == names:
                return  # torch.autograd.grad accumulates nothing: wait for a backward
            if waiting:
                raise RuntimeError(
                    f"{len(waiting)} parameters got no gradient, {min(waiting)} among them: the backend {self.backend} "
                    "or a pass lost them"
                )
            self._watched = True

        def begin(gradient: Tensor) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(finish)

        loss.register_hook(begin)

    # reading

    def explain(self, graphs: bool = False) -> str:
        """The pipeline, what each pass matched, nodes before and after, and the distinct segments."""
        return explain(self.program, self.pipeline, graphs)


def _register(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Registers a parameter under a dotted name, so that named_parameters() gives that name."""
    *path, leaf = name.split(".")
    module = root
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(leaf, parameter)


def _with_outputs(segment: Segment, marks: tuple[bool, ...], results: set[str]) -> tuple[Segment, tuple[bool, ...]]:
    """A copy of a segment that computes only some of its outputs, with the gradient marks that remain."""
    names = (*segment.parameters, *segment.inputs)
    copy = replace(segment, graph=copy_graph(segment.graph))
    keep_outputs([copy], [i for i, name in enumerate(segment.outputs) if name in results])
    mark_of = dict(zip(names, marks, strict=True))
    return copy, tuple(mark_of[name] for name in (*copy.parameters, *copy.inputs))


def _note_last_reads(steps: list[_Step], results: set[str]) -> None:
    """Marks where each activation is read last, so that evaluation holds only what it needs."""
    made = {name for step in steps for name in step.segment.outputs}
    later = set(results)
    for step in reversed(steps):
        seen = set(step.segment.inputs) | set(step.segment.outputs)
        step.last_read = tuple(name for name in made & seen if name not in later)
        later |= seen


def _check_marks(step: _Step, arguments: list[Tensor]) -> None:
    names = (*step.segment.parameters, *step.segment.inputs)
    for name, mark, argument in zip(names, step.marks, arguments, strict=True):
        if argument.requires_grad and not mark:
            raise RuntimeError(
                f"{name} needs a gradient, and the {step.segment.kind} was compiled without one: this is a bug"
            )
    step.checked = True
