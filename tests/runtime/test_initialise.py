"""Counter-based initialisation: any slice alone, bitwise; the right distribution; independent streams."""

import math

import pytest
import torch

from optimus_compiler.runtime import initialise
from optimus_compiler.runtime.initialise import draw

SHAPE = (7, 33)


@pytest.mark.parametrize(("start", "stop"), [(0, 231), (0, 1), (1, 2), (3, 5), (4, 8), (5, 230), (230, 231), (17, 17)])
def test_any_slice_is_drawn_alone(start: int, stop: int) -> None:
    whole = draw("w", SHAPE, seed=5, std=0.02)
    assert torch.equal(draw("w", SHAPE, seed=5, std=0.02, start=start, stop=stop), whole[start:stop])


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = draw("w", SHAPE, seed=5, std=0.02)
    monkeypatch.setattr(initialise, "CHUNK", 10)
    assert torch.equal(draw("w", SHAPE, seed=5, std=0.02), whole)


def test_streams_of_names_and_seeds_are_independent() -> None:
    streams = [draw(name, (10_000,) * 1 + (1,), seed, 1.0) for name, seed in (("a", 0), ("b", 0), ("a", 1))]
    for i, a in enumerate(streams):
        for b in streams[:i]:
            assert abs(float((a * b).mean())) < 4 / math.sqrt(10_000)


def test_distribution_is_normal() -> None:
    x = draw("w", (500, 400), seed=0, std=0.02).double() / 0.02
    n = x.numel()
    assert abs(float(x.mean())) < 4 / math.sqrt(n)
    assert abs(float(x.var()) - 1) < 4 * math.sqrt(2 / n)
    assert abs(float((x**3).mean())) < 4 * math.sqrt(15 / n)
    assert abs(float((x.abs() < 1).double().mean()) - 0.682689) < 4 * math.sqrt(0.2166 / n)
    assert torch.isfinite(x).all()


def test_norms_are_ones_and_biases_zeros() -> None:
    assert torch.equal(draw("model.layers.0.input_layernorm.weight", (5,), 0, 0.02), torch.ones(5))
    assert torch.equal(draw("model.norm.weight", (5,), 0, 0.02, 1, 3), torch.ones(2))
    assert torch.equal(draw("q_proj.bias", (5,), 0, 0.02), torch.zeros(5))
    assert draw("mlp.gate.weight", (5, 4), 0, 0.02).any()


def test_known_values() -> None:
    """Pinned: a change would start every run from other weights."""
    expected = draw("model.embed_tokens.weight", (4, 4), seed=0, std=0.02)[:3]
    torch.testing.assert_close(expected, torch.tensor(PINNED), rtol=1e-6, atol=0)


PINNED = [-0.0030327518470585346, -0.020310936495661736, -0.013320599682629108]
