"""bench/roofline.py: counted operations and bytes, and the table of them in the kernels' design note."""

import pytest

from bench.roofline import H200, PVC, Device, Stage, least_seconds, stages, table
from optimus_compiler.runtime.kernels import triton


def test_the_design_note_shows_the_roofline() -> None:
    assert triton.__doc__ is not None
    for line in table().splitlines():
        assert f"    {line}\n" in triton.__doc__


def test_operations_are_those_of_nine_products() -> None:
    found = stages(tokens=3, top_k=2, hidden=8, width=4, experts=5)
    assert sum(stage.flops for stage in found) == 18 * 3 * 2 * 8 * 4
    by_name = {stage.name: stage for stage in found}
    # x, two tables, and gate, up and h, two bytes an element
    assert by_name["gate, up, SwiGLU"].bytes == 2 * (3 * 8 + 2 * 5 * 8 * 4 + 3 * 6 * 4)
    assert by_name["sum of rows"].bytes == 2 * (6 * 8 + 3 * 8)


def test_the_slower_of_computing_and_copying_counts() -> None:
    device = Device("", flops=10.0, bytes=2.0)
    assert least_seconds(Stage("", 100.0, 4.0), device) == 10.0
    assert least_seconds(Stage("", 100.0, 40.0), device) == 20.0


@pytest.mark.parametrize(("device", "seconds"), [(PVC, 6.58e-3), (H200, 1.37e-3)])
def test_the_least_time_of_the_whole_layer(device: Device, seconds: float) -> None:
    whole = sum(least_seconds(stage, device) for stage in stages(4096, 8, 2048, 1024, 64))
    assert whole == pytest.approx(seconds, abs=5e-6)
