"""What the kernels ask about the device they run on; everything follows from `arch_of`."""

from functools import cache

import torch
from torch import Tensor


@cache
def arch_of(device: torch.device) -> str:
    """ "sm_90" and the like, "xpu", or "interpreter" for a CPU."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm_{major}{minor}"
    return "interpreter" if device.type == "cpu" else device.type


@cache
def name_of(device: torch.device) -> str:
    """The name of the GPU."""
    if device.type in ("cuda", "xpu"):
        return torch.get_device_module(device).get_device_name(device)
    return arch_of(device)


@cache
def programs_of(device: torch.device) -> int:
    """How many programs run at once if each has a multiprocessor (XPU: an Xe core) of its own."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "xpu":
        return torch.xpu.get_device_properties(device).gpu_subslice_count
    return 3  # interpreted: few, so that each takes several tiles


def per_expert(device: torch.device) -> bool:
    """Whether grid axis 1 is the expert, and rows are gathered into contiguous memory first: both for XPU, whose fast
    block loads are two-dimensional and want an address that all lanes share."""
    return arch_of(device) == "xpu"


def aligned(*matrices: Tensor) -> bool:
    """Whether tensor descriptors address these: 16-byte aligned rows. Before Hopper they would only be slower loads."""
    if arch_of(matrices[0].device).startswith("sm_8"):
        return False
    return all(m.data_ptr() % 16 == 0 and m.shape[-1] * m.element_size() % 16 == 0 for m in matrices)


def precision() -> str:
    """How fp32 is multiplied: exactly, unless torch.set_float32_matmul_precision asks for TF32."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
