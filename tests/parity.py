"""A compiled model beside the module it was made from: loss, auxiliary loss and every gradient by name."""

from typing import Any

import torch
from torch import Tensor, nn

import optimus_compiler as optimus
from tests.models.twins import gradients, relative_error

TOLERANCE = 1e-5  # fp32, relative, per tensor


def compile_for(
    model: nn.Module, ids: Tensor, inputs: dict[str, Tensor] | None = None, **options: Any
) -> optimus.CompiledModel:
    """Compiles for the shape of a batch, with aot_eager unless another backend is asked for."""
    options.setdefault("backend", "aot_eager")
    names = ("input_ids", "labels", *(inputs or {}))
    return optimus.compile(model, micro_batch_size=ids.shape[0], sequence_length=ids.shape[1], inputs=names, **options)


def reference_step(model: nn.Module, ids: Tensor, labels: Tensor, **inputs: Any) -> Any:
    """Forward and backward of a module as it is."""
    model.zero_grad()
    if hasattr(model, "router_aux_loss_coef"):
        inputs["output_router_logits"] = True
    if type(model).__module__.startswith("transformers."):
        inputs["use_cache"] = False
    out = model(input_ids=ids, labels=labels, **inputs)
    out.loss.backward()
    return out


def worst_gradient(compiled: optimus.CompiledModel, model: nn.Module, times: float = 1.0) -> tuple[float, str]:
    """The largest relative error of a gradient and its name; both sides must have the same names."""
    found, expected = compiled.full_gradients(), gradients(model)
    assert set(expected) <= set(found)
    return max((relative_error(found[name], expected[name] * times), name) for name in expected)


def assert_parity(
    compiled: optimus.CompiledModel,
    reference: nn.Module,
    ids: Tensor,
    labels: Tensor,
    tolerance: float = TOLERANCE,
    **inputs: Tensor,
) -> None:
    """One training step of both, twice: the second finds what stale memory or accumulated state would spoil."""
    expected = reference_step(reference, ids, labels, **inputs)
    for bucket in compiled.buckets:
        bucket.gradients.zero_()
    for times in (1, 2):
        out = compiled(ids, labels, **inputs)
        out.loss.backward()
        assert relative_error(out.loss, expected.loss) <= tolerance
        if getattr(expected, "aux_loss", None) is not None:
            assert relative_error(out.aux_loss, expected.aux_loss) <= tolerance
        error, name = worst_gradient(compiled, reference, times)
        assert error <= tolerance, f"{name}: {error}"


def random_ids(vocabulary: int, batch: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids and labels of which the first few are ignored."""
    ids = torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, :2] = -100
    return ids, labels
