"""Which implementation of a fused op runs: one process-wide choice, read each time an op executes.

The choice is a module global, not a thread-local: autograd runs the backward of accelerator graphs on threads of its
own, and they must see what the caller chose. Every implementation saves the same tensors for backward, so forward and
backward may run under different choices.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar, get_args

import torch

Kernels = Literal["auto", "reference", "cpu", "triton"]
Implementation = TypeVar("Implementation", bound=Callable[..., object])

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


def select(device: torch.device, *, reference: Implementation, cpu: Implementation) -> Implementation:
    """The implementation to run on tensors of `device` under the current choice.

    Raises RuntimeError when the chosen one cannot run there.
    """
    if _choice == "triton" or (_choice == "cpu" and device.type != "cpu"):
        raise RuntimeError(
            f"kernels={_choice!r} cannot run on {device.type} tensors: choose kernels='auto' or kernels='reference'"
        )
    return cpu if device.type == "cpu" and _choice != "reference" else reference
