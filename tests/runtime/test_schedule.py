"""The learning rate: values at the corners, and that it never rises again."""

from itertools import pairwise
from typing import Any

import pytest

from optimus_compiler.runtime.schedule import learning_rate

PAPER: dict[str, Any] = {"peak": 4e-4, "minimum": 4e-5, "warmup_steps": 2500, "decay_steps": 10_000}


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 4e-5),
        (1250, 2.2e-4),
        (2500, 4e-4),
        (6250, 2.2e-4),  # half way down the cosine
        (4375, 4e-5 + 3.6e-4 * (1 + 2**-0.5) / 2),  # a quarter of the way: cos(pi / 4)
        (10_000, 4e-5),
    ],
)
def test_value_at_step(step: int, expected: float) -> None:
    assert learning_rate(step, **PAPER) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("step", [10_000, 10_001, 12_500, 17_500, 10**9])
def test_stays_at_the_minimum_after_the_planned_steps(step: int) -> None:
    assert learning_rate(step, **PAPER) == 4e-5


def test_rises_then_falls() -> None:
    rates = [learning_rate(step, **PAPER) for step in range(12_000)]
    assert all(a < b for a, b in pairwise(rates[:2501]))
    assert all(a > b for a, b in pairwise(rates[2500:10_001]))


def test_without_warmup_the_first_step_has_the_peak() -> None:
    assert learning_rate(0, peak=1.0, minimum=0.1, warmup_steps=0, decay_steps=10) == 1.0


def test_warmup_that_fills_the_whole_run_ends_at_the_minimum() -> None:
    rates = [learning_rate(step, peak=1.0, minimum=0.0, warmup_steps=4, decay_steps=4) for step in range(6)]
    assert rates == [0.0, 0.25, 0.5, 0.75, 0.0, 0.0]


def test_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="step is -1"):
        learning_rate(-1, **PAPER)
