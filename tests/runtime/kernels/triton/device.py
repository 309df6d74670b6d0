"""Where the Triton tests run, and small blocks there."""

from typing import Any

import torch

from tests.runtime.kernels.naive import Block, make_block

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def block_on_device(**sizes: Any) -> Block:
    """make_block, on the device."""
    block = make_block(**sizes)
    return Block._make([*(leaf.detach().to(DEVICE).requires_grad_() for leaf in block[:4]), block[4].to(DEVICE)])
