"""Every pipeline trains as one process does, under every schedule and together with the other dimensions."""

from typing import Any

import pytest

import optimus_compiler as optimus
from tests.layouts import Result, batches, compile_small, layout_run, own_rows, small_model
from tests.ranks import Ranks
from tests.test_layouts import assert_equal, expected

GPIPE, ONE_F_ONE_B = {"schedule": "gpipe"}, {"schedule": "1f1b"}
INTERLEAVED = {"schedule": "interleaved-1f1b", "virtual_stages": 2}


def train(
    sizes: dict[str, int], kind: str, options: list[dict[str, Any]], settings: list[dict[str, Any]]
) -> list[Result]:
    """On every rank: one result for each schedule, with the optimizer's settings in turn. The first rank reports."""
    mesh = optimus.Mesh(**sizes)  # type: ignore[arg-type]
    start = small_model(kind).state_dict()
    results = []
    for index, each in enumerate(options):
        compiled = compile_small(kind, mesh, **each)
        ids, labels = (own_rows(values[0], mesh) for values in batches())
        before = compiled.eval_step(ids, labels)
        result = layout_run(compiled, start, **settings[index % len(settings)])
        compiled.load_state_dict(start)
        after = compiled.eval_step(ids, labels)
        assert (before.loss, before.aux_loss) == (after.loss, after.aux_loss)
        assert after.loss.item() == pytest.approx(result.losses[0], rel=1e-5)
        results.append(result)
    return results if mesh.rank == 0 else []


@pytest.mark.parametrize("kind", ["olmoe", "idle", "olmo"])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"pp": 2}, [GPIPE, ONE_F_ONE_B, INTERLEAVED]),
        ({"pp": 4}, [GPIPE, ONE_F_ONE_B]),
        ({"pp": 2, "dp": 2}, [ONE_F_ONE_B, INTERLEAVED]),
        ({"pp": 2, "ep": 2}, [ONE_F_ONE_B, INTERLEAVED]),
    ],
    ids=["pp2", "pp4", "pp2-dp2", "pp2-ep2"],
)
def test_training_equals_one_process(
    ranks: Ranks, kind: str, sizes: dict[str, int], options: list[dict[str, Any]]
) -> None:
    settings = [{"sharding": "epso"}, {"sharding": "epso", "zero": 2}, {"sharding": "none"}]
    count = sizes["pp"] * sizes.get("dp", 1) * sizes.get("ep", 1)
    (results, *_) = ranks.run(count, train, sizes, kind, options, settings)
    for each, result in zip(options, results, strict=True):
        try:
            assert_equal(result, expected(kind))
        except AssertionError as error:
            raise AssertionError(f"{each}: {error}") from None
