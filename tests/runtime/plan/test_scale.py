"""Stragglers, uneven routing and failures: sampled, but within what is known of them."""

import json
from pathlib import Path

import numpy as np
import pytest

from optimus_compiler.runtime.plan.scale import dirichlet, imbalance, recorded, straggling


def test_the_slowest_of_more_ranks_is_slower() -> None:
    assert straggling(1, 0.02) == pytest.approx(1.0, abs=0.005)
    assert straggling(1000, 0.02) == pytest.approx(np.exp(0.02 * 3.24), rel=0.005)  # the mean largest of 1,000 normals
    assert straggling(10, 0.02) < straggling(100, 0.02) < straggling(10_000, 0.02)


def test_even_shares_cost_nothing() -> None:
    even = np.full((1, 12), 1 / 12)
    assert imbalance(even, 4, 8) == pytest.approx(1.0)


def test_the_fullest_rank_is_waited_for() -> None:
    shares = np.array([[0.4, 0.1, 0.1, 0.1, 0.1, 0.2]])
    assert imbalance(shares, 3, 1) == pytest.approx(3 * 0.5)
    assert imbalance(shares, 1, 1) == pytest.approx(1.0)


def test_more_even_routing_and_fewer_groups_cost_less() -> None:
    rough, smooth = dirichlet(48, 2.0), dirichlet(48, 50.0)
    assert 1 < imbalance(smooth, 12, 8) < imbalance(rough, 12, 8)
    assert imbalance(rough, 12, 1) <= imbalance(rough, 12, 128)


def test_recorded_loads(tmp_path: Path) -> None:
    file = tmp_path / "loads.json"
    file.write_text(json.dumps([[1, 3], [5, 5]]))
    assert recorded(file, 2).tolist() == [[0.25, 0.75], [0.5, 0.5]]
    with pytest.raises(ValueError, match="the model has 3 experts a layer"):
        recorded(file, 3)
    file.write_text("{")
    with pytest.raises(ValueError, match="is not a JSON list of token counts"):
        recorded(file, 2)
