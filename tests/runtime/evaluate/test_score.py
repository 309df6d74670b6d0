"""Likelihoods: of a plain model as torch computes them one by one; in every layout those of the plain model."""

from array import array
from typing import Any

import pytest
import torch
from torch import Tensor

import optimus_compiler as optimus
from optimus_compiler.runtime.evaluate.encode import Row
from optimus_compiler.runtime.evaluate.models import PlainModel, TrainedModel
from optimus_compiler.runtime.evaluate.score import score
from tests.layouts import S, V, compile_small, small_model
from tests.ranks import Ranks

LAYOUTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("olmoe", {}, {"backend": "eager"}),
    ("olmoe", {"dp": 2, "ep": 2}, {"backend": "eager"}),
    ("olmoe", {"pp": 2, "ep": 2}, {"backend": "eager"}),
    ("olmoe", {"tp": 2}, {"backend": "eager", "sequence_parallel": True}),
    ("tied-olmo", {"pp": 2}, {"backend": "eager", "schedule": "interleaved-1f1b", "virtual_stages": 2}),
]


def rows(count: int = 19) -> list[Row]:
    """Of lengths from 1 to S; the first is the longest and the second has one token."""
    generator = torch.Generator().manual_seed(3)
    lengths = [S, 1, *torch.randint(2, S, (count - 2,), generator=generator).tolist()]
    ids = [torch.randint(0, V, (length + 1,), generator=generator).tolist() for length in lengths]
    return [Row(array("i", each[:-1]), array("i", each[1 + (len(each) - 1) // 2 :])) for each in ids]


def one_by_one(module: torch.nn.Module, row: Row) -> tuple[float, bool]:
    logits_SV = module(torch.tensor([list(row.ids)])).logits[0].double()[-len(row.targets) :]
    log_probs_SV = logits_SV.log_softmax(-1)
    targets = torch.tensor(row.targets)
    return log_probs_SV[range(len(targets)), targets].sum().item(), bool((logits_SV.argmax(-1) == targets).all())


def greedy(module: torch.nn.Module, row: Row) -> Row:
    """The same row with the targets that the model itself would choose, one after the other."""
    ids = list(row.ids[: len(row.ids) - len(row.targets) + 1])
    while len(ids) <= len(row.ids):
        ids.append(int(module(torch.tensor([ids])).logits[0, -1].argmax()))
    return Row(array("i", ids[:-1]), array("i", ids[len(ids) - len(row.targets) :]))


@torch.no_grad()
def expected(kind: str) -> tuple[list[Row], list[tuple[float, bool]]]:
    module = small_model(kind)
    chosen = rows()
    chosen[3] = greedy(module, chosen[3])
    return chosen, [one_by_one(module, row) for row in chosen]


def assert_equal(found: list[tuple[float, bool]], wanted: list[tuple[float, bool]]) -> None:
    assert [sums for sums, _ in found] == pytest.approx([sums for sums, _ in wanted], rel=1e-5)
    assert [likeliest for _, likeliest in found] == [likeliest for _, likeliest in wanted]


def test_a_plain_models_rows_are_those_of_one_at_a_time() -> None:
    chosen, wanted = expected("olmoe")
    assert any(likeliest for _, likeliest in wanted)
    assert not all(likeliest for _, likeliest in wanted)
    assert_equal(score(PlainModel(small_model("olmoe"), optimus.Mesh(), S), chosen), wanted)


def score_in_layout(kind: str, sizes: dict[str, Any], options: dict[str, Any], chosen: list[Row]) -> Any:
    model = TrainedModel(compile_small(kind, optimus.Mesh(**sizes), **options))
    seen: list[tuple[int, int]] = []
    return score(model, chosen, lambda done, total: seen.append((done, total))), seen


@pytest.mark.parametrize(("kind", "sizes", "options"), LAYOUTS)
def test_every_layout_gives_the_plain_models_likelihoods(
    ranks: Ranks, kind: str, sizes: dict[str, Any], options: dict[str, Any]
) -> None:
    """19 rows leave, in the last round, ranks with some rows and ranks with none."""
    chosen, wanted = expected(kind)
    count = optimus.Mesh.abstract(**sizes).size
    for found, seen in ranks.run(count, score_in_layout, kind, sizes, options, chosen):
        assert_equal(found, wanted)
        assert seen[-1] == (19, 19)


def test_a_model_that_gives_no_number_is_an_error() -> None:
    module = small_model("olmo")
    with torch.no_grad():
        module.get_parameter("lm_head.weight")[5] = float("nan")
    with pytest.raises(ValueError, match="log-probabilities that are not finite"):
        score(PlainModel(module, optimus.Mesh(), S), rows())


def test_no_rows_need_no_call() -> None:
    assert score(PlainModel(small_model("olmo"), optimus.Mesh(), S), []) == []


def test_ignored_targets_do_not_count_and_rows_do_not_get_lost() -> None:
    compiled = compile_small("olmoe", optimus.Mesh(), backend="eager")
    too_many = torch.zeros(9, S, dtype=torch.int64)
    with pytest.raises(ValueError, match="input_ids has 9 rows, and a step at most 8"):
        compiled.log_likelihoods(too_many, too_many)
    ids = torch.randint(0, V, (2, S), generator=torch.Generator().manual_seed(0))
    targets: Tensor = torch.full_like(ids, -100)
    targets[1, 3] = 7
    sums, likeliest = compiled.log_likelihoods(ids, targets)
    module = small_model("olmoe")
    wanted = module(ids[1:]).logits[0, 3].log_softmax(-1)[7].item()
    assert sums.tolist() == pytest.approx([0.0, wanted], rel=1e-5)
    assert likeliest.tolist()[0] is True  # nothing is asked
