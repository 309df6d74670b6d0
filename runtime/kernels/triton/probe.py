"""Whether the Triton kernels run on a device: looked into once, by running one of them."""

import re
from functools import cache
from importlib.util import find_spec

import torch

OLDEST, NEWEST = (3, 6), (3, 9)


@cache
def problem(device: torch.device) -> str | None:
    """Why they do not run there, in a few words; None where they do."""
    if find_spec("triton") is None:
        return "triton is not installed: pip install 'optimus-compiler[triton]'"
    import triton

    version = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])
    if not OLDEST <= version <= NEWEST:
        return f"triton {triton.__version__} is installed, 3.6 to 3.9 are supported"
    if triton.knobs.runtime.interpret:
        return None
    if device.type == "cpu":
        return "on a CPU they are only interpreted: set TRITON_INTERPRET=1 before Python starts"
    if device.type not in ("cuda", "xpu") or torch.version.hip:
        return "they are written for CUDA and XPU"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "they need compute capability 8.0"
    return _failure(device)


def _failure(device: torch.device) -> str | None:
    """What is wrong with the answer of a small block on the device."""
    from optimus_compiler.runtime.kernels.triton.products import multiply

    a_RC = (torch.arange(64 * 64, device=device) % 7).view(64, 64).bfloat16()
    offsets_E = torch.tensor([16, 64], dtype=torch.int32, device=device)
    table_ENC = torch.stack([torch.eye(64), 2 * torch.eye(64)]).to(a_RC)
    try:
        out_RN = multiply(a_RC, table_ENC, offsets_E, transposed=True, product="down")
    except Exception as error:  # whatever a compiler or driver raises: it is reported, and the reference runs
        return f"a small product failed: {' '.join(str(error).split())[:300] or type(error).__name__}"
    right = torch.equal(out_RN[:16], a_RC[:16]) and torch.equal(out_RN[16:], 2 * a_RC[16:])
    return None if right else "a small product came out wrong"
