"""Every instance is read once an epoch, wherever batches, ranks, restarts and epochs begin and end."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.data.sample_index import Position, SampleIndex, rank_slice
from optimus_compiler.runtime.data.shuffle import permute

START = Position(0, 0)


@pytest.mark.parametrize(
    ("global_batch_size", "data_ranks"),
    [
        (192, (192, 96, 192, 64, 48, 1, 192)),  # 3,072 processes, in pipelines of 16 that share their data, and others
        pytest.param(3072, (3072, 1536, 3072, 768, 1024, 96, 1, 3072), marks=pytest.mark.slow),
    ],
)
def test_100_000_steps_of_a_job_that_restarts_with_other_ranks(
    global_batch_size: int, data_ranks: tuple[int, ...]
) -> None:
    instances, steps = 1_000_003, 100_000  # a prime: no epoch ends where a batch does
    index = SampleIndex(instances, seed=11)
    epoch_N, filled, epochs = np.empty(instances, np.int64), 0, 0
    rng = np.random.default_rng(0)
    ends = [*np.sort(rng.integers(1, steps, len(data_ranks) - 1)), steps]
    position, step = START, 0
    for ranks, end in zip(data_ranks, ends, strict=True):
        position = Position(**json.loads(json.dumps(asdict(position))))  # what a checkpoint does
        slices = [rank_slice(global_batch_size, rank, ranks) for rank in range(ranks)]
        assert [row for rows in slices for row in rows] == list(range(global_batch_size))
        while step < end:
            count = min(100, end - step)  # steps at a time
            stored_B = index.stored(position, count * global_batch_size)
            for rank in (0, int(rng.integers(ranks)), ranks - 1):
                rows = slices[rank]
                own_B = index.stored(index.advance(position, rows.start), len(rows))
                assert own_B.tolist() == stored_B[rows.start : rows.stop].tolist()
            while len(stored_B):
                taken = min(len(stored_B), instances - filled)
                epoch_N[filled : filled + taken] = stored_B[:taken]
                stored_B, filled = stored_B[taken:], filled + taken
                if filled == instances:
                    assert (np.bincount(epoch_N, minlength=instances) == 1).all()
                    filled, epochs = 0, epochs + 1
            for _ in range(count):
                position = index.advance(position, global_batch_size)
            step += count
            assert position == Position(epochs, filled)
    assert epochs * instances + filled == steps * global_batch_size
    assert len(np.unique(epoch_N[:filled])) == filled
    assert epochs >= 19


def test_the_first_epoch_is_in_stored_order_and_the_others_are_permuted_by_seed_and_epoch() -> None:
    order = SampleIndex(50, seed=3).stored(START, 150)
    assert order.dtype == np.int64
    assert order[:50].tolist() == list(range(50))
    for epoch in (1, 2):
        assert order[epoch * 50 : epoch * 50 + 50].tolist() == permute(np.arange(50), 50, seed=3, epoch=epoch).tolist()
    assert order[50:100].tolist() != order[100:].tolist()
    assert order[50:100].tolist() != SampleIndex(50, seed=4).stored(Position(1, 0), 50).tolist()


@pytest.mark.parametrize("instances", [1, 2, 7, 64])
def test_reading_in_pieces_of_any_size_is_reading_at_once(instances: int) -> None:
    index = SampleIndex(instances, seed=0)
    whole = index.stored(START, 5 * instances).tolist()
    for size in (1, 3, instances, instances + 1, 2 * instances + 3):
        pieces: list[int] = []
        position = START
        while len(pieces) < len(whole):
            pieces += index.stored(position, size).tolist()
            position = index.advance(position, size)
        assert pieces[: len(whole)] == whole
        assert position == Position(*divmod(len(pieces), instances))


def test_the_end_of_an_epoch_is_the_start_of_the_next() -> None:
    index = SampleIndex(10, seed=5)
    assert index.advance(Position(0, 7), 3) == Position(1, 0)
    assert index.advance(Position(2, 10), 0) == Position(3, 0)
    assert index.stored(Position(0, 10), 25).tolist() == index.stored(Position(1, 0), 25).tolist()
    assert index.stored(Position(0, 10), 0).tolist() == []


def test_4_trillion_tokens_need_no_memory() -> None:
    instances = 4 * 10**12 // 2048
    index = SampleIndex(instances, seed=1)
    position = index.advance(START, 2 * instances - 3)
    assert position == Position(1, instances - 3)
    stored = index.stored(position, 6)
    assert ((stored >= 0) & (stored < instances)).all()
    assert len(set(stored.tolist())) == 6


@pytest.mark.parametrize(("epoch", "offset"), [(-1, 0), (0, -1)])
def test_a_negative_position_is_refused(epoch: int, offset: int) -> None:
    with pytest.raises(DataError, match="neither may be negative"):
        Position(epoch, offset)


def test_a_position_in_other_data_is_refused() -> None:
    with pytest.raises(DataError, match="offset 11 lies beyond the 10 instances of an epoch"):
        SampleIndex(10, seed=0).stored(Position(3, 11), 1)


def test_what_has_no_order_is_refused() -> None:
    with pytest.raises(DataError, match="0 instances have no order"):
        SampleIndex(0, seed=0)
    with pytest.raises(DataError, match="no reading of -1 instances"):
        SampleIndex(5, seed=0).stored(START, -1)
    for seed in (-1, 1 << 64):
        with pytest.raises(DataError, match=f"seed {seed} is out of range"):
            SampleIndex(5, seed=seed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 0, 4), "a global batch of 10 sequences cannot be divided equally over 4 data ranks: choose a multiple"),
        ((0, 0, 1), "a global batch of 0 sequences"),
        ((2, 0, 4), "a global batch of 2 sequences cannot be divided equally over 4 data ranks"),
        ((8, 4, 4), "there is no rank 4 of 4"),
        ((8, -1, 4), "there is no rank -1 of 4"),
        ((8, 0, 0), "there is no rank 0 of 0"),
    ],
)
def test_slices_that_are_not_equal_are_refused(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        rank_slice(*arguments)
