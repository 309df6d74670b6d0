"""Every pipeline trains as one process does, under every schedule and together with the other dimensions."""

import math
from typing import Any

import pytest

import optimus_compiler as optimus
from tests.layouts import B, Result, batches, compile_small, layout_run, own_rows, small_model
from tests.ranks import Ranks
from tests.test_layouts import assert_equal, expected

GPIPE, ONE_F_ONE_B = {"schedule": "gpipe"}, {"schedule": "1f1b"}
INTERLEAVED = {"schedule": "interleaved-1f1b", "virtual_stages": 2}


def train(
    sizes: dict[str, int], kinds: list[str], options: list[dict[str, Any]], settings: list[dict[str, Any]]
) -> list[tuple[str, dict[str, Any], Result]]:
    """On every rank: each schedule is compiled once and trains each model (of one shape); the settings take turns."""
    mesh = optimus.Mesh(**sizes)  # type: ignore[arg-type]
    ids, labels = (own_rows(values[0], mesh) for values in batches())
    results: list[tuple[str, dict[str, Any], Result]] = []
    for each in options:
        compiled = compile_small(kinds[0], mesh, **each)
        if mesh.pp > 1:
            with pytest.raises(
                RuntimeError, match="of which this one has only its stages: call train_step or eval_step"
            ):
                compiled(ids[:B], labels[:B])
        for kind in kinds:
            start = small_model(kind).state_dict()
            compiled.load_state_dict(start)
            before = compiled.eval_step(ids, labels)
            result = layout_run(compiled, start, **settings[len(results) % len(settings)])
            compiled.load_state_dict(start)
            after = compiled.eval_step(ids, labels)
            assert (before.loss, before.aux_loss) == (after.loss, after.aux_loss)
            assert after.loss.item() == pytest.approx(result.losses[0], rel=1e-5)
            results.append((kind, each, result))
    return results if mesh.rank == 0 else []


def assert_all_equal(results: list[tuple[str, dict[str, Any], Result]]) -> None:
    for kind, options, result in results:
        try:
            assert_equal(result, expected(kind))
        except AssertionError as error:
            raise AssertionError(f"{kind}, {options}: {error}") from None


MOE, DENSE = ["olmoe", "idle"], ["olmo"]


@pytest.mark.parametrize(
    ("kinds", "sizes", "options"),
    [
        (MOE, {"pp": 2}, [GPIPE, ONE_F_ONE_B, INTERLEAVED]),
        (MOE, {"pp": 4}, [GPIPE, ONE_F_ONE_B]),
        (MOE, {"pp": 2, "ep": 2}, [ONE_F_ONE_B, INTERLEAVED]),
        (DENSE, {"pp": 2, "dp": 2}, [ONE_F_ONE_B, INTERLEAVED]),
        pytest.param(MOE, {"pp": 2, "dp": 2}, [ONE_F_ONE_B, INTERLEAVED], marks=pytest.mark.slow),
        pytest.param(MOE, {"pp": 2, "dp": 2, "ep": 2}, [GPIPE], marks=pytest.mark.slow),
        pytest.param(DENSE, {"pp": 2}, [GPIPE, ONE_F_ONE_B, INTERLEAVED], marks=pytest.mark.slow),
        pytest.param(DENSE, {"pp": 4}, [GPIPE, ONE_F_ONE_B], marks=pytest.mark.slow),
    ],
    ids=[
        "moe-pp2",
        "moe-pp4",
        "moe-pp2-ep2",
        "dense-pp2-dp2",
        "moe-pp2-dp2",
        "moe-pp2-dp2-ep2",
        "dense-pp2",
        "dense-pp4",
    ],
)
def test_training_equals_one_process(
    ranks: Ranks, kinds: list[str], sizes: dict[str, int], options: list[dict[str, Any]]
) -> None:
    settings = [{"sharding": "epso"}, {"sharding": "epso", "zero": 2}, {"sharding": "none"}]
    count = math.prod(sizes.values())
    (results, *_) = ranks.run(count, train, sizes, kinds, options, settings)
    assert len(results) == len(kinds) * len(options)
    assert_all_equal(results)


@pytest.mark.parametrize("kind", [pytest.param("tied-olmoe", marks=pytest.mark.slow), "tied-olmo"])
def test_tied_embeddings_are_on_two_stages_and_count_once(ranks: Ranks, kind: str) -> None:
    """Their gradient is the sum of both stages', in the gradient norm once, and both copies stay the same weight."""
    for sizes, settings in (({"pp": 2}, {"sharding": "epso"}), ({"pp": 2, "dp": 2}, {"sharding": "epso", "zero": 2})):
        (results, *_) = ranks.run(2 * sizes.get("dp", 1), train, sizes, [kind], [ONE_F_ONE_B], [settings])
        assert_all_equal(results)
