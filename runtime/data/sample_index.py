"""Which stored instance is read when: a pure function of seed, epoch and offset, in no memory at any size."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.data.shuffle import permute


@dataclass(frozen=True)
class Position:
    """How far a run has read: all epochs before `epoch`, and `offset` instances of that one. Checkpoints save it.

    A step number would not do: what it means changes with the batch size.
    """

    epoch: int
    offset: int

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.offset < 0:
            raise DataError(f"no position at epoch {self.epoch}, offset {self.offset}: neither may be negative")


@dataclass(frozen=True)
class SampleIndex:
    """The order in which `instances` stored instances are read, epoch after epoch without end.

    Epoch 0 is in stored order (which `prepare` shuffled); epoch e > 0 is in the order of the permutation keyed by
    (seed, e). Neither ranks nor batch sizes enter, so a run may continue with others from the Position it reached.
    """

    instances: int
    seed: int

    def __post_init__(self) -> None:
        if self.instances < 1:
            raise DataError(f"{self.instances} instances have no order: there must be 1 or more")
        if not 0 <= self.seed < 1 << 64:
            raise DataError(f"seed {self.seed} is out of range: give one from 0 to 2^64 - 1")

    def advance(self, position: Position, count: int) -> Position:
        """The position `count` instances after `position`; the end of an epoch is the start of the next one.

        Raises DataError for a negative count, and for a position that no epoch of this many instances has.
        """
        if count < 0:
            raise DataError(f"no reading of {count} instances: give 0 or more")
        if position.offset > self.instances:
            raise DataError(
                f"offset {position.offset} lies beyond the {self.instances} instances of an epoch: the position is one "
                f"in other data, give the data it was reached with"
            )
        epochs, offset = divmod(position.offset + count, self.instances)
        return Position(position.epoch + epochs, offset)

    def stored(self, position: Position, count: int) -> NDArray[np.int64]:
        """The stored numbers of the `count` instances from `position` on, across epochs: int64 [count].

        Raises DataError as `advance` does.
        """
        position, end = self.advance(position, 0), self.advance(position, count)
        parts = [np.empty(0, np.int64)]
        while position != end:
            last = self.instances if position.epoch < end.epoch else end.offset
            offsets_N = np.arange(position.offset, last)
            parts.append(permute(offsets_N, self.instances, self.seed, position.epoch) if position.epoch else offsets_N)
            position = self.advance(position, len(offsets_N))
        return np.concatenate(parts)


def rank_slice(global_batch_size: int, rank: int, ranks: int) -> range:
    """The rows of a global batch of G sequences that rank r of R reads: r * G/R up to (r + 1) * G/R.

    Raises DataError where ranks could not get as many rows each, at least one.
    """
    if not 0 <= rank < ranks:
        raise DataError(f"there is no rank {rank} of {ranks}: ranks count from 0")
    if global_batch_size < 1 or global_batch_size % ranks:
        raise DataError(
            f"a global batch of {global_batch_size} sequences cannot be divided equally over {ranks} data ranks: "
            f"choose a multiple of {ranks}"
        )
    rows = global_batch_size // ranks
    return range(rank * rows, (rank + 1) * rows)
