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
MOE, DENSE = ["olmoe", "idle"], ["olmo"]
LAYOUTS = [(MOE, 1, 1), (MOE, 1, 2), (MOE, 2, 2), (MOE, 1, 4), (DENSE, 2, 2)]
MORE_LAYOUTS = [(MOE, 2, 1), (MOE, 4, 1), (DENSE, 1, 1), (DENSE, 2, 1), (DENSE, 1, 2), (DENSE, 1, 4), (DENSE, 4, 1)]
SETTINGS = [{"sharding": sharding, "zero": zero} for sharding in ("epso", "so", "none") for zero in (1, 2)]


@cache
def expected(kind: str) -> Result:
    return reference_run(small_model(kind))


def train(
    kinds: list[str], dp: int, ep: int, settings: list[dict[str, Any]], options: dict[str, Any]
) -> list[tuple[str, dict[str, Any], Result]]:
    """On every rank: compile once, train once for each model (of one shape) and setting. The first rank reports."""
    mesh = optimus.Mesh(dp=dp, ep=ep)
    compiled = compile_small(kinds[0], mesh, **options)
    results = []
    for kind in kinds:
        start = small_model(kind).state_dict()
        chosen = settings[:2] if kind == "idle" else settings
        results += [(kind, each, layout_run(compiled, start, **each)) for each in chosen]
    return results if mesh.rank == 0 else []


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


@pytest.mark.parametrize(
    ("kinds", "dp", "ep"), LAYOUTS + [pytest.param(*layout, marks=pytest.mark.slow) for layout in MORE_LAYOUTS]
)
def test_training_equals_one_process(ranks: Ranks, kinds: list[str], dp: int, ep: int) -> None:
    """idle: ranks 2 and 3 of ep=4, rank 1 of ep=2 get no token for their experts."""
    (results, *_) = ranks.run(dp * ep, train, kinds, dp, ep, SETTINGS, {})
    assert len(results) == len(SETTINGS) + 2 * (len(kinds) - 1)
    for kind, settings, result in results:
        try:
            assert_equal(result, expected(kind))
        except AssertionError as error:
            raise AssertionError(f"{kind}, {settings}: {error}") from None


@pytest.mark.parametrize(
    ("dp", "ep", "options", "redone"),
    [
        (2, 2, {"dispatch": "alltoall"}, False),
        pytest.param(1, 4, {"dispatch": "alltoall", "expert_rows": "exact"}, False, marks=pytest.mark.slow),
        pytest.param(1, 4, {"dispatch": "alltoall", "expert_rows": 0.5}, True, marks=pytest.mark.slow),
        (1, 4, {"expert_rows": 0.5}, True),
    ],
)
def test_dispatch_and_row_bounds_change_nothing(
    ranks: Ranks, dp: int, ep: int, options: dict[str, Any], redone: bool
) -> None:
    """Half the rows of an even share: some rank overflows in every step, which is done again before the optimizer."""
    (results, *_) = ranks.run(dp * ep, train, ["olmoe", "idle"], dp, ep, SETTINGS[:1], options)
    for kind, _, result in results:
        assert result.redone == [redone] * len(result.losses)
        assert_equal(result, expected(kind))


@pytest.mark.slow
def test_inductor_equals_one_process(ranks: Ranks) -> None:
    ((result, *_), *_) = ranks.run(2, train, ["olmoe"], 1, 2, SETTINGS[:1], {"backend": "inductor"})
    assert_equal(result[2], expected("olmoe"))
