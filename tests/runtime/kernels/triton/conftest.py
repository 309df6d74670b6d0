"""The Triton kernels need a GPU, or a process in which Triton interprets: elsewhere these tests are not collected.

tests/runtime/kernels/test_triton_interpreted.py runs them in such a process.
"""

import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from tests.runtime.kernels.triton.device import DEVICE

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if DEVICE.type == "cpu" and not INTERPRETED:
    collect_ignore_glob = ["test_*.py"]


def _patch_once_for_a_function() -> None:
    """Triton makes its language an interpreted one for a launch, and again whenever a kernel calls a function: that
    is half of the time of these tests, and to no effect but the first time (what it does for a function it leaves)."""
    from triton.runtime import interpreter

    patch = cache(interpreter._patch_lang)

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        patch(self.fn)
        return self.rewrite()(*arguments, **named)

    interpreter.InterpretedFunction.__call__ = call


if INTERPRETED:
    _patch_once_for_a_function()


@pytest.fixture(autouse=True)
def triton_kernels() -> Iterator[None]:
    """All fused ops of these tests run on Triton unless they say otherwise."""
    from optimus_compiler.runtime.kernels import use_kernels

    torch.manual_seed(0)
    with use_kernels("triton"):
        yield
