"""Which implementation of a fused op runs: one process-wide choice, read each time an op executes.

The choice is a module global, not a thread-local: autograd runs the backward of accelerator graphs on threads of its
own, and they must see what the caller chose. Every implementation saves the same tensors for backward, so forward and
backward may run under different choices.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from optimus_compiler.runtime.kernels.triton.probe import problem

Kernels = Literal["auto", "reference", "cpu", "triton"]
Implementation = TypeVar("Implementation", bound=Callable[..., object])

_log = logging.getLogger(__name__)
_choice: Kernels = "auto"


def set_kernels(choice: Kernels) -> None:
    """Choose the implementation of every fused op from now on, in every thread.

    "auto" takes the fast path of the tensors' device where there is one and the reference elsewhere. Raises ValueError
    for an unknown name; a choice that cannot run on a tensor's device raises RuntimeError when the op executes.
    """
    global _choice
    if choice not in get_args(Kernels):
        raise ValueError(f"kernels={choice!r} is unknown: choose one of {', '.join(get_args(Kernels))}")
    _choice = choice


@contextmanager
def use_kernels(choice: Kernels) -> Iterator[None]:
    """`set_kernels` for the duration of a with block; run the backward inside the block too if it matters."""
    before = _choice
    set_kernels(choice)
    try:
        yield
    finally:
        set_kernels(before)


def require(choice: Kernels, device: torch.device) -> None:
    """Raises RuntimeError, one sentence, where the fused ops cannot run on a device under a choice."""
    reason = problem(device) if choice == "triton" else None
    if choice == "cpu" and device.type != "cpu":
        reason = "the C++ kernels are for CPUs"
    if reason:
        raise RuntimeError(
            f"kernels={choice!r} cannot run on {device.type} tensors ({reason}): "
            "choose kernels='auto' or kernels='reference'"
        )


def select(x: Tensor, *, reference: Implementation, cpu: Implementation, triton: Implementation) -> Implementation:
    """The implementation to run on tensors like x (device, dtype) under the current choice; fp64 takes the reference.

    Raises RuntimeError when the chosen one cannot run there.
    """
    require(_choice, x.device)
    if _choice == "reference" or x.dtype == torch.float64:
        return reference
    if _choice == "triton":
        return triton
    if x.device.type == "cpu":
        return cpu
    return triton if _triton_runs(x.device) else reference


@cache
def _triton_runs(device: torch.device) -> bool:
    """False, after a warning, where it does not."""
    reason = problem(device)
    if reason:
        _log.warning("experts run on the slow reference path on %s: %s", device, reason)
    return reason is None
