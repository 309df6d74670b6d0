"""Recomputed activations: the gradients are bit by bit those without, whatever is recomputed and in every layout."""

import math
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import Tensor

import optimus_compiler as optimus
from tests.layouts import B, S, batches, compile_small, own_rows, small_model
from tests.models.twins import relative_error
from tests.ranks import Ranks

BLOCKS = ("norm", "attention", "moe")
CHOICES = list(chain.from_iterable(combinations(BLOCKS, size) for size in range(1, 4)))


def gradients(mesh: optimus.Mesh, kind: str, **options: Any) -> dict[str, Tensor]:
    """Losses, expert counts and all gradients of one step."""
    compiled = compile_small(kind, mesh, **options)
    ids, labels = (own_rows(values[0], mesh) for values in batches())
    out = compiled.train_step(ids, labels)
    found = {"loss": out.loss, "aux_loss": out.aux_loss}
    if out.expert_counts is not None:
        found["expert_counts"] = out.expert_counts
    return found | compiled.full_gradients()


def differing(sizes: dict[str, int], kind: str, choices: list[tuple[str, ...]], options: dict[str, Any]) -> list[str]:
    """What is not bitwise what it is without checkpointing, in one layout."""
    mesh = optimus.Mesh(**sizes)  # type: ignore[arg-type]
    expected = gradients(mesh, kind, **options)
    wrong = []
    for blocks in choices:
        found = gradients(mesh, kind, activation_checkpointing=blocks, **options)
        assert found.keys() == expected.keys()
        wrong += [f"{blocks}: {name}" for name, value in found.items() if not torch.equal(value, expected[name])]
    return wrong


@pytest.mark.parametrize(
    ("kind", "choices"),
    [
        ("olmoe", [*CHOICES[:3], BLOCKS]),
        pytest.param("olmoe", CHOICES[3:6], marks=pytest.mark.slow),
        ("tied-olmo", [BLOCKS]),
        pytest.param("tied-olmo", [("moe",)], marks=pytest.mark.slow),
        ("biased-olmoe", [BLOCKS]),
        ("hf-olmoe", [BLOCKS]),
    ],
    ids=["olmoe", "olmoe, pairs", "tied-olmo", "tied-olmo, moe", "biased-olmoe", "hf-olmoe"],
)
def test_gradients_are_bitwise_those_without(kind: str, choices: list[tuple[str, ...]]) -> None:
    """Expert counts among what is compared: recomputation must not count twice."""
    assert differing({}, kind, choices, {}) == []


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"ep": 2}, {}),
        ({"tp": 2}, {"sequence_parallel": True}),
        ({"pp": 2}, {"schedule": "1f1b"}),
        pytest.param({"ep": 2}, {"keep_gathered": True}, marks=pytest.mark.slow),
        pytest.param({"ep": 2}, {"dispatch": "alltoall"}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "ep": 2, "tp": 2}, {"sequence_parallel": True}, marks=pytest.mark.slow),
    ],
    ids=["ep", "tp", "pp", "ep-kept", "alltoall", "pp-ep-tp"],
)
@pytest.mark.parametrize("blocks", [BLOCKS, pytest.param(("moe",), marks=pytest.mark.slow)], ids=["all", "moe"])
def test_every_layout_recomputes_to_the_same_bits(
    ranks: Ranks, sizes: dict[str, int], options: dict[str, Any], blocks: tuple[str, ...]
) -> None:
    for wrong in ranks.run(math.prod(sizes.values()), differing, sizes, "olmoe", [blocks], options):
        assert wrong == []


def test_near_ties_are_not_routed_again() -> None:
    """Routers whose scores tie but for rounding: no choice is made in backward, so none can fall the other way."""
    model = small_model("olmoe")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.copy_(parameter[:1] + 1e-7 * torch.randn_like(parameter))
    ids, labels = (values[0][:B] for values in batches())
    found = []
    for blocks in ((), BLOCKS):
        compiled = optimus.compile(
            model, sequence_length=S, micro_batch_size=B, backend="aot_eager", activation_checkpointing=blocks
        )
        loss = compiled(ids, labels).loss
        assert loss is not None
        with torch.profiler.profile() as profiler:
            loss.backward()
        ran = {event.name for event in profiler.events()}
        assert "aten::mm" in ran
        assert not ran & {"aten::topk", "aten::sort", "optimus::index_tokens"}
        assert ("optimus::grouped_mlp" in ran) == bool(blocks)
        found.append(compiled.full_gradients())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [("attention",), BLOCKS])
def test_inductor_is_within_rounding(blocks: tuple[str, ...]) -> None:
    mesh = optimus.Mesh()
    expected = gradients(mesh, "olmoe", backend="inductor")
    found = gradients(mesh, "olmoe", backend="inductor", activation_checkpointing=blocks)
    for name, value in expected.items():
        assert relative_error(found[name], value) <= 1e-6, name


def collectives_of_backward(keep_gathered: bool) -> list[str]:
    """The collectives that a step's backward starts at ep=2 with everything checkpointed."""
    mesh = optimus.Mesh(ep=2)
    compiled = compile_small("olmoe", mesh, activation_checkpointing=BLOCKS, keep_gathered=keep_gathered)
    ids, labels = (own_rows(values[0], mesh) for values in batches())
    loss = compiled(ids[:B], labels[:B]).loss
    assert loss is not None
    with torch.profiler.profile() as profiler:
        loss.backward()
    names = [event.name.partition("::")[2] for event in profiler.events() if event.name.startswith("_c10d_functional")]
    return [name for name in names if name != "wait_tensor"]


def test_the_gather_is_replayed_unless_it_is_kept(ranks: Ranks) -> None:
    """Of each of 2 layers: hidden states and routing weights again, then the collectives of the gradients."""
    backward_of_a_layer = ["all_gather_into_tensor", "reduce_scatter_tensor", "reduce_scatter_tensor"]
    for kept, gathers in ((True, 2), (False, 6)):
        for names in ranks.run(2, collectives_of_backward, kept):
            assert names.count("all_gather_into_tensor") == gathers
            assert names.count("reduce_scatter_tensor") == 2 * backward_of_a_layer.count("reduce_scatter_tensor")
