"""The self-check of compile(check=True): the first batch through the original module, loss and gradients compared."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from optimus_compiler.capture import is_transformers
from optimus_compiler.mesh import Mesh
from optimus_compiler.program import TRAINING
from optimus_compiler.runtime.collectives import all_reduce

if TYPE_CHECKING:
    from optimus_compiler.compiled import CompiledModel

FP32_TOLERANCE = 1e-4  # relative, ||a - b|| / ||b||: sums in another order, not another model
BF16_FACTOR = 1.5  # of the original's own error against fp32 ...
BF16_FLOOR = 5e-2  # ... but no less than a few roundings: one tensor of one batch may happen to be rounded well


class CheckError(RuntimeError):
    """The compiled program computes something else than the module it was made from."""


def check_against_original(compiled: "CompiledModel", model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Compares loss and every gradient of one micro-batch; raises CheckError naming the first tensor that differs.

    fp32 is compared directly. bf16 is compared through the module's own fp32 result: the compiled program may be at
    most as wrong as the module is itself, with a margin.
    """
    weights = compiled.full_state_dict()
    loss, gradients = _compiled_gradients(compiled, inputs)
    low = any(w.dtype in (torch.bfloat16, torch.float16) for w in weights.values())
    expected_loss, expected = _original_gradients(compiled, model, weights, inputs, torch.float32)
    if low:
        own_loss, own = _original_gradients(compiled, model, weights, inputs, None)
    for name, wanted, got in [("loss", expected_loss, loss), *((n, expected[n], gradients[n]) for n in expected)]:
        error = _relative(got, wanted)
        allowed = FP32_TOLERANCE
        if low:
            allowed = max(BF16_FLOOR, BF16_FACTOR * _relative(own_loss if name == "loss" else own[name], wanted))
        if not error <= allowed:
            raise CheckError(
                f"{name} differs from the original module's by {error:.1e} (relative), allowed {allowed:.1e}: "
                "a pass or the backend changed the computation"
            )


def _relative(got: Tensor, wanted: Tensor) -> float:
    """||got - wanted|| / ||wanted||; NaN where one is NaN and the other is not."""
    got, wanted = got.double(), wanted.double()
    difference = torch.where(got.isnan() & wanted.isnan(), 0, got - wanted).norm()
    scale = wanted.nan_to_num().norm()
    return float(difference / (scale if scale > 0 else 1.0))


def _compiled_gradients(compiled: "CompiledModel", inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    parameters = {entry.name: entry.parameter for bucket in compiled.buckets for entry in bucket.entries}
    with torch.enable_grad():
        loss = compiled.run(inputs, TRAINING)["loss"]
        names = compiled.added_in_place()
        in_place = {entry.name: entry.view(bucket.gradients)
                    for bucket in compiled.buckets for entry in bucket.entries if entry.name in names}  # fmt: skip
        before = {name: gradient.clone() for name, gradient in in_place.items()}
        for gradient in in_place.values():
            gradient.zero_()
        returned = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        gradients = dict(zip(parameters, returned, strict=True))
        for name, gradient in in_place.items():
            gradients[name] = gradient.clone()
            gradient.copy_(before[name])
    mesh = compiled.program.mesh
    means = {}
    for name, gradient in gradients.items():
        if gradient is None:
            raise CheckError(f"{name} got no gradient: a pass or the backend lost it")
        total = all_reduce(gradient, mesh.group(*compiled.program.parameters[name].replicated()))
        means[name] = total / mesh.size_of("dp", "ep", "tp")
    return _mean(loss.detach(), mesh), compiled.weights.full(means)


def _original_gradients(
    compiled: "CompiledModel",
    model: nn.Module,
    weights: dict[str, Tensor],
    inputs: dict[str, Tensor],
    dtype: torch.dtype | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the module itself with the compiled weights, in their dtype or in another."""
    names = sorted(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    state = {name: weight.to(dtype) if dtype and weight.is_floating_point() else weight
             for name, weight in weights.items() if name not in compiled.program.aliases}  # fmt: skip
    leaves = [state[name].requires_grad_() for name in names]
    options: dict[str, object] = {}
    if hasattr(model, "router_aux_loss_coef"):
        options["output_router_logits"] = "valid" in compiled.program.inputs
    if is_transformers(model):
        options["use_cache"] = False
    with torch.enable_grad():
        out = torch.func.functional_call(model, state, kwargs={**inputs, **options})
        gradients = torch.autograd.grad(out.loss, leaves)
    mesh = compiled.program.mesh
    return _mean(out.loss.detach(), mesh), {n: _mean(g, mesh) for n, g in zip(names, gradients, strict=True)}


def _mean(value: Tensor, mesh: Mesh) -> Tensor:
    """The mean over the ranks that see different data."""
    return all_reduce(value, mesh.group("dp", "ep")) / mesh.size_of("dp", "ep")
