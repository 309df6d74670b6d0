"""The learning rate of a step: linear warm-up, then cosine decay, then the minimum for ever."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, minimum: float, warmup_steps: int, decay_steps: int) -> float:
    """Learning rate of step `step`, counted from 0 (arXiv 2604.00785, training set-up).

    It rises linearly from `minimum` at step 0 to `peak` at `warmup_steps`, falls along half a cosine to `minimum` at
    `decay_steps`, and stays there however long the run goes on. Raises ValueError for a negative step.
    """
    if step < 0:
        raise ValueError(f"step is {step}: steps are counted from 0")
    if step < warmup_steps:
        return minimum + (peak - minimum) * step / warmup_steps
    if step >= decay_steps:
        return minimum
    progress = (step - warmup_steps) / (decay_steps - warmup_steps)
    return minimum + (peak - minimum) * 0.5 * (1.0 + math.cos(math.pi * progress))
