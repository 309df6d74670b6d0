"""Heads, widths and vocabulary divided over ranks: training equals one process, alone and with the other dimensions."""

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import optimus_compiler as optimus
from tests.layouts import B, S, V, batches, compile_small, own_rows, small_model
from tests.models.twins import relative_error
from tests.ranks import Ranks
from tests.test_pipeline_layouts import GPIPE, INTERLEAVED, ONE_F_ONE_B, assert_all_equal, train

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kinds", "sequence_parallel"),
    [
        (["olmoe", "idle"], True),
        pytest.param(["olmoe", "idle"], False, marks=SLOW),  # tp x dp below is without it too
        (["tied-olmo"], True),
        (["biased-olmoe"], True),
        pytest.param(["olmo"], False, marks=SLOW),
        pytest.param(["olmo"], True, marks=SLOW),
        pytest.param(["tied-olmo"], False, marks=SLOW),
        pytest.param(["biased-olmoe"], False, marks=SLOW),
    ],
)
def test_training_equals_one_process(ranks: Ranks, kinds: list[str], sequence_parallel: bool) -> None:
    """biased-olmoe: biases (of the output projection too), clipped projections and a padding row in the vocabulary."""
    (results, *_) = ranks.run(2, train, {"tp": 2}, kinds, [{"sequence_parallel": sequence_parallel}], [{}])
    assert_all_equal(results)


@pytest.mark.parametrize("kind", ["hf-olmoe", "hf-olmo"])
def test_models_of_transformers_too(ranks: Ranks, kind: str) -> None:
    (results, *_) = ranks.run(2, train, {"tp": 2}, [kind], [{"sequence_parallel": True}], [{}])
    assert_all_equal(results)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"tp": 2, "dp": 2}, {}),
        ({"tp": 2, "ep": 2}, {"sequence_parallel": True}),
        ({"tp": 2, "pp": 2}, {"sequence_parallel": True} | INTERLEAVED),
        pytest.param({"tp": 2, "ep": 2}, {"dispatch": "alltoall"}, marks=SLOW),
        pytest.param({"tp": 2, "ep": 2, "pp": 2}, ONE_F_ONE_B, marks=SLOW),
        pytest.param({"tp": 2, "dp": 2, "ep": 2, "pp": 2}, GPIPE, marks=SLOW),
    ],
    ids=["dp", "ep", "pp", "alltoall", "ep-pp", "dp-ep-pp"],
)
def test_tensor_parallelism_composes(ranks: Ranks, sizes: dict[str, int], options: dict[str, Any]) -> None:
    settings = [{"sharding": "epso", "zero": 2}, {"sharding": "epso"}]
    (results, *_) = ranks.run(math.prod(sizes.values()), train, sizes, ["olmoe", "idle"], [options], settings)
    assert_all_equal(results)


def masked_run(sizes: dict[str, int], options: dict[str, Any]) -> dict[str, Tensor]:
    """Loss and gradients with padding and with packed documents, on this layout; logits where one rank has them."""
    mesh = optimus.Mesh(**sizes)  # type: ignore[arg-type]
    ids, labels = (own_rows(values[0], mesh) for values in batches())
    mask = torch.ones_like(ids)
    mask[::2, -5:] = 0
    documents = torch.arange(S).expand_as(ids) // 6
    found: dict[str, Tensor] = {}
    for name, extra in (("attention_mask", mask), ("document_ids", documents)):
        compiled = compile_small("olmoe", mesh, inputs=("input_ids", "labels", name), **options)
        out = compiled.train_step(ids, labels.masked_fill(mask == 0, -100), **{name: extra})
        found |= {f"{name}.{key}": value for key, value in compiled.full_gradients().items()}
        found |= {f"{name}.loss": out.loss, f"{name}.aux_loss": out.aux_loss}
        if mesh.pp == 1:
            logits = compiled(ids[:B], return_logits=True, **{name: extra[:B]}).logits
            assert logits is not None
            assert logits.shape == (B, S, V)
            found[f"{name}.logits"] = logits.detach()
    return found


@cache
def masked_alone(ranks: Ranks) -> dict[str, Tensor]:
    (found,) = ranks.run(1, masked_run, {}, {})
    return found


@pytest.mark.parametrize(
    ("sizes", "options"),
    [({"tp": 2}, {"sequence_parallel": True}), ({"pp": 2}, {"schedule": "gpipe"})],
    ids=["tp", "pp"],
)
def test_masks_and_documents_reach_every_rank(ranks: Ranks, sizes: dict[str, int], options: dict[str, Any]) -> None:
    expected = masked_alone(ranks)
    for found in ranks.run(2, masked_run, sizes, options):
        assert set(found) == {name for name in expected if "tp" in sizes or not name.endswith("logits")}
        for name, value in found.items():
            assert relative_error(value, expected[name]) <= 1e-5, name


def bf16_errors(sizes: dict[str, int]) -> tuple[float, dict[str, float]]:
    """Errors of loss and gradients of bf16 weights against fp32's, in this layout."""
    mesh = optimus.Mesh(**sizes)  # type: ignore[arg-type]
    ids, labels = (own_rows(values[0], mesh) for values in batches())
    results: list[tuple[float, dict[str, Tensor]]] = []
    for dtype in (torch.float32, torch.bfloat16):
        model = small_model("olmoe").bfloat16().to(dtype)
        compiled = optimus.compile(
            model, mesh, sequence_length=S, micro_batch_size=B, micro_batches=len(ids) // B, backend="aot_eager"
        )
        optimus.ShardedAdamW(compiled, lr=1e-3, reduce_dtype=torch.float32)
        loss = compiled.train_step(ids, labels).loss
        results.append((float(loss), compiled.full_gradients()))
    (loss_fp32, exact), (loss_bf16, low) = results
    return abs(loss_bf16 / loss_fp32 - 1), {name: relative_error(low[name], value) for name, value in exact.items()}


@pytest.mark.slow
def test_bf16_is_as_exact_as_without(ranks: Ranks) -> None:
    """Rounded partial sums: at most 1.25 times the error of one process, or of the largest gradient error there."""
    ((alone, errors),) = ranks.run(1, bf16_errors, {})
    for loss_error, found in ranks.run(2, bf16_errors, {"tp": 2}):
        assert loss_error <= max(1.25 * alone, 1e-3)
        worst = max(errors.values())
        assert all(error <= 1.25 * max(errors[name], worst) for name, error in found.items()), max(found.values())
