"""Every layout trains as one process does: loss, gradients, gradient norm, weights and moments after five steps."""

from functools import cache
from typing import Any

import pytest
from torch import Tensor

import optimus_compiler as optimus
from tests.layouts import Result, compile_small, layout_run, reference_run, small_model
from tests.models.twins import relative_error
from tests.ranks import Ranks

TOLERANCE = 1e-5
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1)]
SETTINGS = [{"sharding": sharding, "zero": zero} for sharding in ("epso", "so", "none") for zero in (1, 2)]

pytestmark = pytest.mark.xdist_group("ranks")


@cache
def expected(kind: str) -> Result:
    return reference_run(small_model(kind))


def train_all_settings(kind: str, dp: int, ep: int, options: dict[str, Any]) -> list[Result] | None:
    """On every rank: compile once, train once for each setting of the optimizer. The first rank reports."""
    mesh = optimus.Mesh(dp=dp, ep=ep)
    compiled = compile_small(kind, mesh, **options)
    start = small_model(kind).state_dict()
    results = [layout_run(compiled, start, **settings) for settings in SETTINGS]
    return results if mesh.rank == 0 else None


def assert_equal(found: Result, wanted: Result) -> None:
    for name in ("losses", "aux_losses", "norms"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=TOLERANCE), name
    for name in ("gradients", "weights", "exp_avg", "exp_avg_sq"):
        assert_tensors_equal(name, getattr(found, name), getattr(wanted, name))


def assert_tensors_equal(what: str, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(wanted) <= set(found)
    for name, value in wanted.items():
        error = relative_error(found[name], value)
        assert error <= TOLERANCE, f"{what} of {name}: {error}"


@pytest.mark.parametrize("kind", ["olmoe", "olmo", "idle"])
@pytest.mark.parametrize(("dp", "ep"), LAYOUTS)
def test_training_equals_one_process(ranks: Ranks, kind: str, dp: int, ep: int) -> None:
    results = ranks.run(dp * ep, train_all_settings, kind, dp, ep, {})
    for settings, result in zip(SETTINGS, results[0], strict=True):
        print(settings)
        assert_equal(result, expected(kind))
