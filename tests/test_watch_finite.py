"""WatchFinite: not a bit changes, and the rank that made a number that is not finite is told from its peers."""

from typing import Any

import pytest
import torch

import optimus_compiler as optimus
from optimus_compiler.program import PROBE, Segment, with_outputs
from optimus_compiler.runtime.resilience.soft import first_fault
from tests.captured import B, S, compiled_program
from tests.layouts import batches, compile_small, own_rows
from tests.ranks import Ranks

LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp": ({"dp": 2}, {}),
    "ep": ({"ep": 2}, {}),
    "ep, all to all": ({"ep": 2}, {"dispatch": "alltoall"}),
    "tp": ({"tp": 2}, {"sequence_parallel": True}),
    "pp": ({"pp": 2}, {"schedule": "1f1b"}),
    "pp, virtual": ({"pp": 2}, {"schedule": "interleaved-1f1b", "virtual_stages": 2}),
}


def step(compiled: optimus.CompiledModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the first batch."""
    mesh = compiled.program.mesh
    compiled.zero_grad()
    ids, labels = (own_rows(values[0], mesh) for values in batches())
    loss = compiled.train_step(ids, labels).loss
    return loss, compiled.full_gradients()


def compare(sizes: dict[str, int], options: dict[str, Any]) -> list[str]:
    """What differs with the pass from without it, bit by bit."""
    mesh = optimus.Mesh(**sizes)  # type: ignore[arg-type]
    (loss, gradients), (watched_loss, watched) = (
        step(compile_small("olmoe", mesh, watch_finite=watch, activation_checkpointing=("norm", "moe"), **options))
        for watch in (False, True)
    )
    return [name for name in gradients if not torch.equal(gradients[name], watched[name])] + (
        [] if torch.equal(loss, watched_loss) else ["loss"]
    )


def of_all(*quick: str) -> list[object]:
    """Every layout, all but some of them only in long runs."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]


@pytest.mark.parametrize("layout", of_all("ep", "tp", "pp"))
def test_watching_changes_no_bit(ranks: Ranks, layout: str) -> None:
    for differing in ranks.run(2, compare, *LAYOUTS[layout]):
        assert differing == []


def test_logits_are_gathered_only_for_who_asks_for_them() -> None:
    """Watching the gathered logits would gather them in every training step."""
    program = compiled_program("olmoe", optimus.Mesh.abstract(tp=2), watch_finite=True)
    (head,) = (segment for segment in program.segments if segment.kind == "head")
    trained, _ = with_outputs(
        head, (False,) * len(head.placeholders()), set(head.outputs) - {program.outputs["logits"]}
    )
    vocabulary = program.parameters["lm_head.weight"].shape[0]

    def gathers(segment: Segment) -> int:
        shapes = [n.meta["val"].shape for n in segment.graph.graph.nodes if "all_gather" in str(n.target)]
        return sum(vocabulary in (shape[0], shape[-1]) or shape.numel() >= vocabulary * B * S for shape in shapes)

    assert gathers(head) == 1
    assert gathers(trained) == 0


def poisoned(sizes: dict[str, int], options: dict[str, Any], culprits: list[int]) -> list[bool]:
    """With spoilt tables on some ranks: whether each of two steps finds the first fault to be this rank's own."""
    mesh = optimus.Mesh(**sizes)  # type: ignore[arg-type]
    compiled = compile_small("olmoe", mesh, watch_finite=True, **options)
    step(compiled)
    assert first_fault(compiled) is None
    if mesh.rank in culprits:
        for name, table in compiled._executor._constants.items():
            if table.is_floating_point() and not name.startswith(PROBE):
                table.fill_(torch.nan)  # of the rotary embedding: no weight, and nothing received
    found = []
    for _ in range(2):
        loss, _ = step(compiled)
        assert not torch.isfinite(loss)
        fault = first_fault(compiled)
        found.append(fault is not None and fault[1])
    return found


@pytest.mark.parametrize("layout", of_all("dp", "ep", "tp", "pp"))
@pytest.mark.parametrize(
    "culprits", [[1], *(pytest.param(c, marks=pytest.mark.slow) for c in ([0], [0, 1]))], ids=["1", "0", "both"]
)
def test_the_culprit_is_told_from_its_victims(ranks: Ranks, layout: str, culprits: list[int]) -> None:
    sizes, options = LAYOUTS[layout]
    found = ranks.run(2, poisoned, sizes, options, culprits)
    if culprits == [0, 1] and "pp" in sizes:  # what the first layer has spoilt is all that the other rank sees
        culprits = [1] if options.get("virtual_stages") else [0]
    assert found == [[rank in culprits] * 2 for rank in range(2)]


def spoilt_weight(sizes: dict[str, int], options: dict[str, Any]) -> tuple[str, bool] | None:
    """What a rank finds first when a weight of its own is not finite, whatever it receives."""
    compiled = compile_small("olmoe", optimus.Mesh(**sizes), watch_finite=True, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        for bucket in compiled.buckets:
            bucket.weights.fill_(torch.nan)
    step(compiled)
    return first_fault(compiled)


def test_spoilt_weights_are_everybodys_own(ranks: Ranks) -> None:
    assert ranks.run(2, spoilt_weight, *LAYOUTS["pp"]) == [("a weight", True)] * 2


def spoilt_gradient(sizes: dict[str, int], options: dict[str, Any]) -> bool | None:
    """With a gradient that becomes infinite on rank 1 alone in backward: whose fault the first one is."""
    mesh = optimus.Mesh(**sizes)  # type: ignore[arg-type]
    compiled = compile_small("olmoe", mesh, watch_finite=True, **options)
    step(compiled)
    if mesh.rank == 1:
        (norm,) = [p for name, p in compiled.named_parameters() if name == "model.norm.weight"]
        with torch.no_grad():
            norm.fill_(3e38)  # finite, and so is the loss of normalised logits; the gradient is not
    step(compiled)
    fault = first_fault(compiled)
    return None if fault is None else fault[1]


@pytest.mark.parametrize("layout", ["ep", "dp"])
def test_backward_is_watched_too(ranks: Ranks, layout: str) -> None:
    assert ranks.run(2, spoilt_gradient, *LAYOUTS[layout])[1] is True
