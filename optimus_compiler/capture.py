"""capture: a plain Hugging Face-style model -> one FX graph (torch.export, strict) -> a Program of segments."""

import contextlib
import logging
import sys
import traceback
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from optimus_compiler.cut import ExportedGraph, cut
from optimus_compiler.graphs import storage_root, writes_in_place
from optimus_compiler.program import ParameterSpec, Program, Source

OPTIONAL_INPUTS = ("attention_mask", "document_ids", "position_ids")
GROUPED_MM_ALIGNMENT = 16  # bytes: torch's grouped_mm refuses other row pitches


class CaptureError(RuntimeError):
    """A model that cannot be captured whole; the message names the module and the cause."""


def capture(
    model: nn.Module,
    *,
    sequence_length: int,
    micro_batch_size: int = 1,
    inputs: tuple[str, ...] = ("input_ids", "labels"),
    aux_loss: bool = True,
    device: torch.device | None = None,
) -> Program:
    """Captures forward, loss and pooled auxiliary loss of one micro-batch [micro_batch_size, sequence_length].

    The model may be on the meta device: capture reads shapes, never weights, and leaves the model as it was. Program
    outputs are loss, ce_loss, aux_loss (fp32 scalars), expert_counts ([E] fp32, tokens routed to each expert, pooled
    over layers; absent for dense models) and logits [B, S, V]. Where there is an auxiliary loss the program has one
    more input, `valid` ([B, S] bool), which says what is not padding.

    device: where a model on the meta device will run (default: cpu); any other runs where its parameters are.

    Raises CaptureError, naming the module and the cause, and ValueError for inputs that are not known.
    """
    _check_inputs(inputs)
    if not hasattr(model, "config") or not hasattr(model, "loss_function"):
        raise CaptureError(
            f"{type(model).__name__} has no config and loss_function: give a Hugging Face-style causal LM"
        )
    device = next((p.device for p in model.parameters() if not p.is_meta), device or torch.device("cpu"))
    wrapper = _Training(model, tuple(name for name in inputs if name != "document_ids"), aux_loss)
    example = _example_inputs(wrapper.names, micro_batch_size, sequence_length, device)
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with _as_captured(model), _values_of_buffers(model), _fake_parameters(model, mode, device):
        with _quiet():
            try:
                exported = torch.export.export(wrapper, tuple(example), strict=True)
            except Exception as error:  # torch.export raises many types, all of which mean the same to the user
                raise CaptureError(_explain(model, error)) from error
        buffers = dict(model.named_buffers())
    _without_wrapper(exported.graph)
    _refuse_what_a_program_cannot_hold(exported.graph)

    signature, persistent = exported.graph_signature, set(model.state_dict())
    if signature.buffers_to_mutate:
        name = next(iter(signature.buffers_to_mutate.values())).removeprefix("model.")
        raise CaptureError(f"the forward pass writes to the buffer {name}: a program keeps no state but its weights")
    constants = {name: exported.constants[target] for name, target in
                 signature.inputs_to_lifted_tensor_constants.items()}  # fmt: skip
    parameters = {}
    for placeholder, target in {**signature.inputs_to_parameters, **signature.inputs_to_buffers}.items():
        name = target.removeprefix("model.")  # what the wrapper calls model.x, the model calls x
        if name not in buffers:
            parameters[placeholder] = _spec(name, model.get_parameter(name))
        elif name in persistent:
            parameters[placeholder] = _spec(name, buffers[name])
            constants[name] = buffers[name]  # its value, where the model itself is on meta
        else:
            constants[placeholder] = buffers[name]
    graph = ExportedGraph(exported.graph, parameters, constants, wrapper.names, wrapper.outputs)
    _check_everything_captured(model, graph)
    return cut(graph, micro_batch_size=micro_batch_size, sequence_length=sequence_length, aliases=_aliases(model),
               extra_inputs=tuple(name for name in inputs if name == "document_ids"))  # fmt: skip


class _Training(nn.Module):
    """Calls the model for its logits and computes the losses as Hugging Face does, in a form that pads correctly.

    The auxiliary loss (Switch Transformer, equations 4 to 6, pooled over all layers) is written here and not taken
    from the model, because two [E] vectors threaded through the layers let a stage be any list of layers, and `valid`
    excludes padding whether or not the model has an attention mask.
    """

    def __init__(self, model: nn.Module, inputs: tuple[str, ...], aux_loss: bool):
        super().__init__()
        self.model = model
        config: Any = model.config
        self.has_router = aux_loss and hasattr(model, "router_aux_loss_coef")
        self.names = (*inputs, "valid") if self.has_router else inputs
        self.outputs = ("loss", "ce_loss", "aux_loss", "expert_counts", "logits")
        self.keywords: dict[str, Any] = {"output_router_logits": True} if self.has_router else {}
        if is_transformers(model):
            self.keywords["use_cache"] = False
        self.num_experts = int(getattr(model, "num_experts", 0))
        self.top_k = int(getattr(model, "num_experts_per_tok", 0))
        self.coefficient = float(getattr(model, "router_aux_loss_coef", 0.0))
        self.vocab_size = int(config.vocab_size)

    def forward(self, *values: Tensor) -> tuple[Tensor | None, ...]:
        named = dict(zip(self.names, values, strict=True))
        labels, valid = named.pop("labels"), named.pop("valid", None)
        out = self.model(**named, **self.keywords)
        ce_loss = self.model.loss_function(out.logits, labels, self.vocab_size)  # type: ignore[operator]
        router_logits = out.router_logits if self.has_router else None
        if not router_logits or valid is None:
            return ce_loss, ce_loss, torch.zeros((), device=ce_loss.device), None, out.logits
        aux_loss, counts_E = self.pooled_auxiliary_loss(router_logits, valid)
        return ce_loss + self.coefficient * aux_loss, ce_loss, aux_loss, counts_E, out.logits

    def pooled_auxiliary_loss(self, router_logits: tuple[Tensor, ...], valid_BS: Tensor) -> tuple[Tensor, Tensor]:
        device = router_logits[0].device
        counts_E = torch.zeros(self.num_experts, device=device)
        probabilities_E = torch.zeros(self.num_experts, device=device)
        valid_T1 = valid_BS.reshape(-1, 1).float()
        for logits_TE in router_logits:
            weights_TE = torch.softmax(logits_TE, dim=-1)
            _, chosen_TK = torch.topk(weights_TE, self.top_k, dim=-1)
            chosen_TE = torch.zeros_like(weights_TE, dtype=torch.float32).scatter(1, chosen_TK, 1.0)
            counts_E = counts_E + (chosen_TE * valid_T1).sum(dim=0)
            probabilities_E = probabilities_E + (weights_TE.float() * valid_T1).sum(dim=0)
        rows = valid_T1.sum() * len(router_logits)
        return (counts_E / rows * (probabilities_E / rows)).sum() * self.num_experts, counts_E


def _check_inputs(inputs: tuple[str, ...]) -> None:
    if tuple(inputs[:2]) != ("input_ids", "labels"):
        raise ValueError(f"inputs={inputs} must begin with ('input_ids', 'labels')")
    for name in inputs[2:]:
        if inputs.count(name) > 1:
            raise ValueError(f"inputs names {name!r} twice")
        if name not in OPTIONAL_INPUTS:
            raise ValueError(f"inputs names {name!r}; a program may also take {', '.join(OPTIONAL_INPUTS)}")


def _example_inputs(names: tuple[str, ...], batch: int, length: int, device: torch.device) -> list[Tensor]:
    """One distinct tensor an input: torch.export merges inputs that are the same object."""
    positions = torch.arange(length).expand(batch, length).clone()
    kinds = {"position_ids": positions, "valid": torch.ones(batch, length, dtype=torch.bool)}
    ones = torch.ones(batch, length, dtype=torch.int64)
    return [(kinds[name] if name in kinds else ones.clone()).to(device) for name in names]


def is_transformers(model: nn.Module) -> bool:
    """Whether a model is one of transformers' (which is not imported to find out)."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


@contextlib.contextmanager
def _as_captured(model: nn.Module) -> Iterator[None]:
    """Training mode and, for transformers, the implementations that torch.export can trace; restored afterwards."""
    training = {module: module.training for module in model.modules()}
    changed: list[tuple[Any, str, Any]] = []
    model.train()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):  # recomputation is the compiler's business
            changed.append((module, "gradient_checkpointing", True))
            module.gradient_checkpointing = False  # type: ignore[assignment]
    if is_transformers(model):
        from transformers.utils.output_capturing import maybe_install_capturing_hooks

        # HF's output recorder takes a lock on first use, which breaks the trace
        maybe_install_capturing_hooks(model.base_model)
        wanted = {"_attn_implementation": "sdpa", "_experts_implementation": _traceable_experts(model)}
        for config in {
            id(c): c for c in (getattr(m, "config", None) for m in model.modules()) if c is not None
        }.values():
            for key, value in wanted.items():
                if hasattr(config, key):
                    changed.append((config, key, getattr(config, key)))
                    setattr(config, key, value)
    try:
        yield
    finally:
        for owner, key, value in changed:
            setattr(owner, key, value)
        for module, mode in training.items():
            module.training = mode


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch's own logging of a failed trace out of the way: CaptureError says what there is to say."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _traceable_experts(model: nn.Module) -> str:
    """grouped_mm, or batched_mm where grouped_mm would refuse the widths; eager's loop cannot be exported."""
    for name, parameter in model.named_parameters():
        if ".experts." in name and parameter.shape[-1] * parameter.element_size() % GROUPED_MM_ALIGNMENT:
            return "batched_mm"
    return "grouped_mm"


@contextlib.contextmanager
def _fake_parameters(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Swaps every parameter for a FakeTensor of its shape, on its device (`device` for meta), and swaps it back.

    Meta parameters would lose the gradient of cross entropy silently; real ones would cost memory for big models.
    """
    real: list[tuple[nn.Module, str, nn.Parameter]] = []
    fake: dict[nn.Parameter, nn.Parameter] = {}
    try:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if parameter not in fake:
                    place = device if parameter.is_meta else parameter.device
                    with mode:
                        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=place)
                        fake[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                real.append((module, name, parameter))
                module._parameters[name] = fake[parameter]
        yield
    finally:
        for module, name, parameter in real:
            module._parameters[name] = parameter


@contextlib.contextmanager
def _values_of_buffers(model: nn.Module) -> Iterator[None]:
    """Gives buffers of a model on the meta device (rope frequencies) the values that their module's rule computes."""
    saved = [(module, dict(module._buffers)) for module in model.modules()
             if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values())]  # fmt: skip
    try:
        for module, _ in saved:
            if not hasattr(model, "_init_weights"):
                raise CaptureError(f"a buffer of {type(module).__name__} is on the meta device and has no value: build "
                                   "the model on cpu")  # fmt: skip
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device="cpu")
            model._init_weights(module)  # type: ignore[operator]
        yield
    finally:
        for module, buffers in saved:
            module._buffers.update(buffers)


def _spec(name: str, tensor: Tensor) -> ParameterSpec:
    shape = tuple(tensor.shape)
    return ParameterSpec(
        name=name,
        shape=shape,
        dtype=tensor.dtype,
        source=Source((name,), shape),
        role="expert" if ".experts." in name else "dense",
        trainable=isinstance(tensor, nn.Parameter) and tensor.requires_grad,
    )


def _aliases(model: nn.Module) -> dict[str, str]:
    """Every further state-dict name of a tied parameter -> the name it was captured under."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    return {name: first[parameter] for name, parameter in model.named_parameters(remove_duplicate=False)
            if first[parameter] != name}  # fmt: skip


def _check_everything_captured(model: nn.Module, graph: ExportedGraph) -> None:
    used = {graph.parameters[node.name].name for node in graph.graph.nodes
            if node.op == "placeholder" and node.name in graph.parameters and node.users}  # fmt: skip
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in used:
            raise CaptureError(f"parameter {name} takes no part in the captured forward pass: freeze or remove it")


def _without_wrapper(graph: torch.fx.Graph) -> None:
    """Module paths as the user knows them: what the wrapper calls model.x is x."""
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        node.meta["nn_module_stack"] = {key: ("" if path == "model" else path.removeprefix("model."), kind)
                                        for key, (path, kind) in stack.items()}  # fmt: skip


def _refuse_what_a_program_cannot_hold(graph: torch.fx.Graph) -> None:
    """Randomness, writes to buffers, nested graphs: a program is a function of its inputs and weights."""
    for node in graph.nodes:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        path = (stack[-1][0] if stack else "") or "the model"
        if node.op == "get_attr":
            raise CaptureError(f"{path} has control flow that depends on data ({node.name}): write it without")
        if writes_in_place(node) and storage_root(node).op == "placeholder":
            raise CaptureError(
                f"{path} writes to {storage_root(node).name}, a buffer or an input: keep no state in forward"
            )
        rate = 0.0
        if node.target is torch.ops.aten.dropout.default:
            rate = node.args[1] if node.args[2] else 0.0
        elif node.target is torch.ops.aten.scaled_dot_product_attention.default:
            rate = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        elif torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise CaptureError(
                f"{path} draws random numbers ({node.target}): switch it off, a program has no randomness"
            )
        if rate:
            raise CaptureError(f"{path} has dropout {rate}: set it to 0, pretraining uses none")


def _explain(model: nn.Module, error: Exception) -> str:
    """One sentence: the innermost module whose forward was being traced, and the first line of the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    details = [line.partition(":")[2].strip() for line in lines if line.startswith("Developer debug context:")]
    if not any(details):
        details = [line.partition(":")[2].strip() for line in lines if line.startswith("Explanation:")]
    cause = "; ".join([lines[0], *filter(None, details)])
    frames = list(getattr(error, "real_stack", None) or []) or traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        for name, module in model.named_modules():
            code = getattr(type(module).forward, "__code__", None)
            code = getattr(getattr(type(module).forward, "__wrapped__", None), "__code__", code)
            if isinstance(code, CodeType) and code.co_filename == frame.filename and frame.lineno is not None:
                last = max((line for _, _, line in code.co_lines() if line is not None), default=code.co_firstlineno)
                if code.co_firstlineno <= frame.lineno <= last:
                    return f"{name or 'the model'} ({type(module).__name__}) cannot be captured: {cause}"
    return f"{type(model).__name__} cannot be captured: {cause}"
