"""The Triton kernels compiled for GPUs that are not at hand: tensor cores used, no register spilled, memory enough."""

import os

import pytest
import torch

from bench.triton_resources import PRODUCTS, SHARED_LIMIT, resources

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets in this process")


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        ("sm_80", torch.bfloat16),
        ("sm_90", torch.bfloat16),
        ("sm_100", torch.bfloat16),
        ("sm_90", torch.float32),
        pytest.param("sm_90", torch.float16, marks=pytest.mark.slow),
        pytest.param("sm_80", torch.float32, marks=pytest.mark.slow),
        pytest.param("sm_100", torch.float32, marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_kernels_fit_the_gpu(arch: str, dtype: torch.dtype) -> None:
    found = resources(arch, dtype)
    assert {"count_kernel", "number_kernel", "sum_rows_kernel", *PRODUCTS} <= {each.kernel for each in found}
    for each in found:
        assert each.stack == 0, each
        assert each.shared <= SHARED_LIMIT[arch], each
        if each.kernel in PRODUCTS and dtype != torch.float32:  # fp32 is multiplied exactly, which no tensor core does
            assert each.matrix_instructions > 0, each
        if each.kernel in PRODUCTS[:3] and arch != "sm_80":
            assert each.bulk_copies > 0, each
