"""The loss-spike guard: a step whose loss lies far above the recent ones changes nothing."""

from collections import deque
from collections.abc import Iterable
from statistics import fmean, pstdev

WINDOW = 100  # recent losses that are looked at
FEWEST = 20  # before so many nothing is a spike


class LossGuard:
    """Knows the losses of the last steps that were taken; equal on all ranks, as the losses are.

    sigma: how many standard deviations above their mean a loss is a spike; None: never.
    """

    def __init__(self, sigma: float | None, recent: Iterable[float] = ()) -> None:
        self._sigma = sigma
        self.recent = deque(recent, maxlen=WINDOW)

    def is_spike(self, loss: float) -> bool:
        """Whether the step with this loss is to be skipped; the loss is remembered if not."""
        if self._sigma is None:
            return False
        if len(self.recent) >= FEWEST and loss > fmean(self.recent) + self._sigma * pstdev(self.recent):
            return True
        self.recent.append(loss)
        return False
