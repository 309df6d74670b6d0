"""How much memory something takes on the CPU at most."""

from collections.abc import Callable

import pytest
from torch.profiler import ProfilerActivity, profile


def peak_of(step: Callable[[], object]) -> int:
    """The most bytes that are allocated on the CPU above what there is before, by the profiler's memory events."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("optimus_compiler.runtime.kernels.recycle.SMALLEST", 2**62)  # recycled memory would go unseen
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
    now = most = 0
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most
