"""Reads a run's batches in order, each rank its rows, one batch ahead of the training step on a thread."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from optimus_compiler.runtime.data.dataset import PreparedData
from optimus_compiler.runtime.data.labels import documents_of, labels_of
from optimus_compiler.runtime.data.sample_index import Position, SampleIndex, rank_slice


@dataclass(frozen=True)
class Batch:
    """The rows of a global batch that one rank trains on: int64 [global batch / ranks, context_length] each.

    position: what the run has read when every rank has used its rows, the same on every rank.
    """

    input_ids: Tensor
    labels: Tensor
    document_ids: Tensor | None
    position_ids: Tensor | None
    position: Position

    def inputs(self) -> dict[str, Tensor]:
        """The tensors by the names under which a compiled model takes them."""
        named = {"input_ids": self.input_ids, "labels": self.labels}
        if self.document_ids is not None and self.position_ids is not None:
            named |= {"document_ids": self.document_ids, "position_ids": self.position_ids}
        return named


class DataLoader:
    """Batch after batch of `data` from `position` on, for rank `rank` of `ranks`.

    The global batch at a position is the next `global_batch_size` instances of the sample index, into the next epoch
    where one ends; the ranks take equal, adjacent slices of it. With `document_mask` batches carry document numbers and
    positions. `waited` is how many seconds the last `next` had to wait for its batch.
    """

    def __init__(
        self,
        data: PreparedData,
        *,
        seed: int,
        global_batch_size: int,
        rank: int = 0,
        ranks: int = 1,
        document_mask: bool = False,
        position: Position = Position(0, 0),
    ) -> None:
        """Begins to read the first batch. Raises DataError for arguments that do not fit the data or each other."""
        self._data = data
        self._index = SampleIndex(len(data), seed)
        self._global_batch_size = global_batch_size
        self._rows = rank_slice(global_batch_size, rank, ranks)
        self._document_mask = document_mask
        position = self._index.advance(position, 0)
        self.waited = 0.0
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        self._next = self._reader.submit(self._read, position)

    def next(self) -> Batch:
        """The next batch, without end. Raises what stopped its reading: DataError, or OSError."""
        started = time.perf_counter()
        batch = self._next.result()
        self.waited = time.perf_counter() - started
        self._next = self._reader.submit(self._read, batch.position)
        return batch

    def close(self) -> None:
        """Waits for the batch being read and ends the thread."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, position: Position) -> Batch:
        first = self._index.advance(position, self._rows.start)
        ids_BT = self._data.read(self._index.stored(first, len(self._rows)))
        eos_id = self._data.manifest.eos_id
        document_ids_BT, position_ids_BT = documents_of(ids_BT, eos_id) if self._document_mask else (None, None)
        return Batch(
            input_ids=ids_BT,
            labels=labels_of(ids_BT, eos_id),
            document_ids=document_ids_BT,
            position_ids=position_ids_BT,
            position=self._index.advance(position, self._global_batch_size),
        )
