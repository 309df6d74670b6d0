"""The permutation is a bijection at every size, fixed for ever by its keys, and looks random."""

from itertools import permutations

import numpy as np
import pytest

from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.data.shuffle import permute


@pytest.mark.parametrize("size", [1, 2, 3, 16, 255, 256, 257, 65_537, 300_000])
def test_every_position_goes_to_a_place_of_its_own(size: int) -> None:
    np.testing.assert_array_equal(np.sort(permute(np.arange(size), size, seed=7, epoch=3)), np.arange(size))


def test_values_are_pinned() -> None:
    # A change here would silently reorder everybody's data on resume.
    assert permute(np.arange(10), 10, seed=0, epoch=0).tolist() == [1, 6, 8, 4, 7, 3, 9, 2, 5, 0]
    assert permute(np.array([0, 1_999_999_999]), 2_000_000_000, seed=2**64 - 1, epoch=5).tolist() == [
        169415043,
        1813625372,
    ]


@pytest.mark.parametrize("position", [-1, 10, 1 << 40])
def test_a_position_outside_is_refused(position: int) -> None:
    with pytest.raises(DataError, match=rf"{position} are not all in \[0, 10\)|positions {position} to"):
        permute(np.array([3, position]), 10, seed=0, epoch=0)


def test_any_subset_can_be_asked_for_alone() -> None:
    whole = permute(np.arange(1000), 1000, seed=1, epoch=2)
    asked = np.array([999, 0, 5, 5])
    np.testing.assert_array_equal(permute(asked, 1000, seed=1, epoch=2), whole[asked])


def test_seed_and_epoch_both_change_the_order() -> None:
    orders = {tuple(permute(np.arange(100), 100, s, e)) for s in range(3) for e in range(3)}
    assert len(orders) == 9


def test_orders_are_uniform() -> None:
    drawn = [tuple(permute(np.arange(4), 4, seed, epoch=0).tolist()) for seed in range(480)]
    counts = np.array([drawn.count(order) for order in permutations(range(4))])
    assert ((counts - 20) ** 2 / 20).sum() < 49.7  # chi-squared, 23 degrees of freedom, p = 0.001
    size = 1000
    orders = np.stack([permute(np.arange(size), size, seed, epoch=1) for seed in range(100)])
    assert abs((orders == np.arange(size)).sum(1).mean() - 1) < 0.4  # fixed points of a random order: 1 ± 1/sqrt(100)
    assert abs((np.diff(orders, axis=1) == 1).sum(1).mean() - 1) < 0.4  # neighbours that stay neighbours: the same
