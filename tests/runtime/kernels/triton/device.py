"""Where the Triton tests run, and small blocks there."""

from typing import Any

import torch

from tests.runtime.kernels.naive import Block, make_block

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
assert DEVICE is not None


def block_on_device(**sizes: Any) -> Block:
    """make_block, on the device."""
    *leaves, indices_TK = make_block(**sizes)
    return Block(*(leaf.detach().to(DEVICE).requires_grad_() for leaf in leaves), indices_TK.to(DEVICE))
