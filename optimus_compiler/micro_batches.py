"""The inputs of a step: divided into micro-batches, each checked and padded to the shape that was compiled."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from optimus_compiler.program import Program
from optimus_compiler.runtime.likelihood import IGNORED_LABEL


def divide(inputs: Mapping[str, Tensor], size: int, count: int) -> list[dict[str, Tensor]]:
    """`count` micro-batches of `size` rows, of fewer, or none, where the inputs end."""
    starts = range(0, count * size, size)
    return [{name: value[first : first + size] for name, value in inputs.items()} for first in starts]


def padded(inputs: Mapping[str, Tensor], program: Program, device: torch.device) -> dict[str, Tensor]:
    """A micro-batch on the device, right-padded: the losses ignore padding, and causal attention ends before it.

    Raises ValueError for an input that is missing, was not declared to compile, is no integer, or too large.
    """
    if inputs["input_ids"].dim() != 2:
        raise ValueError(f"input_ids has shape {tuple(inputs['input_ids'].shape)}, a micro-batch is [batch, sequence]")
    batch, length = inputs["input_ids"].shape
    full = (program.micro_batch_size, program.sequence_length)
    if batch > full[0] or length > full[1]:
        raise ValueError(f"input_ids has shape {(batch, length)}, compiled was {full}: cut it, or compile for more")
    declared = [name for name in program.inputs if name not in ("valid", "labels")]
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
    values = {name: value.to(device, torch.int64).contiguous() for name, value in inputs.items()}
    if "valid" in program.inputs:
        mask = values.get("attention_mask")
        values["valid"] = mask != 0 if mask is not None else torch.ones_like(values["input_ids"], dtype=torch.bool)
    if (batch, length) == full:
        return values
    # a padded position attends to itself: attention over nothing would be NaN
    fills = {"labels": IGNORED_LABEL, "attention_mask": 1, "document_ids": -1, "valid": False}
    edges = (0, full[1] - length, 0, full[0] - batch)
    return {name: pad(value, edges, value=fills.get(name, 0)) for name, value in values.items()}
