"""The Triton kernels need a GPU, or a process in which Triton interprets: elsewhere these tests are not collected.

tests/runtime/kernels/test_triton_interpreted.py runs them in such a process.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.runtime.kernels.triton.device import DEVICE

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if DEVICE.type == "cpu" and not INTERPRETED:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def triton_kernels() -> Iterator[None]:
    """All fused ops of these tests run on Triton unless they say otherwise."""
    from optimus_compiler.runtime.kernels import use_kernels

    torch.manual_seed(0)
    with use_kernels("triton"):
        yield
