"""Sampling: the nucleus, the seed, the window the model sees."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from optimus_compiler.runtime.generate import sample


class Successor:
    """After token t its logits favour t + 1, strongly or by a given margin; it notes the shapes it saw."""

    def __init__(self, vocabulary: int, margin: float = 50.0) -> None:
        self.vocabulary, self.margin = vocabulary, margin
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, input_ids: Tensor) -> SimpleNamespace:
        self.seen.append(tuple(input_ids.shape))
        next_BS = (input_ids + 1) % self.vocabulary
        return SimpleNamespace(logits=self.margin * torch.nn.functional.one_hot(next_BS, self.vocabulary).float())


def test_continues_the_prompt_and_sees_no_more_than_the_window() -> None:
    model = Successor(10)
    ids = sample(model, [3, 4], count=2, new_tokens=5, sequence_length=4)
    assert ids.tolist() == [[3, 4, 5, 6, 7, 8, 9]] * 2
    assert model.seen == [(2, 2), (2, 3), (2, 4), (2, 4), (2, 4)]


def test_a_narrow_nucleus_is_greedy_and_a_wide_one_is_not() -> None:
    narrow = sample(Successor(10, margin=1.0), [0], count=4, new_tokens=20, sequence_length=8, top_p=0.01)
    wide = sample(Successor(10, margin=1.0), [0], count=4, new_tokens=20, sequence_length=8, top_p=1.0)
    assert narrow.tolist() == [[i % 10 for i in range(21)]] * 4
    assert len({tuple(row) for row in wide.tolist()}) == 4


def test_nothing_outside_the_nucleus_is_drawn() -> None:
    class Fixed:
        def __call__(self, input_ids: Tensor) -> SimpleNamespace:
            probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
            return SimpleNamespace(logits=probs.log().expand(*input_ids.shape, 4))

    ids = sample(Fixed(), [0], count=200, new_tokens=20, sequence_length=8, temperature=1.0, top_p=0.7)
    drawn = torch.bincount(ids[:, 1:].flatten(), minlength=4) / 4000
    assert drawn[2:].tolist() == [0.0, 0.0]  # 0.5 + 0.3 reaches 0.7
    assert float(drawn[0]) == pytest.approx(0.5 / 0.8, abs=0.03)


def test_one_seed_one_text() -> None:
    texts = [
        sample(Successor(10, margin=0.5), [0], count=2, new_tokens=16, sequence_length=8, seed=seed).tolist()
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_low_temperature_sharpens() -> None:
    ids = sample(Successor(10, margin=1.0), [0], count=4, new_tokens=9, sequence_length=8, temperature=0.01, top_p=1.0)
    assert ids.tolist() == [list(range(10))] * 4


@pytest.mark.parametrize("bad", [{"prompt": []}, {"temperature": 0.0}, {"top_p": 0.0}])
def test_bad_settings_are_refused(bad: dict) -> None:
    settings = {"prompt": [0], "count": 1, "new_tokens": 1, "sequence_length": 4} | bad
    with pytest.raises(ValueError, match="sampling needs a prompt"):
        sample(Successor(4), **settings)
