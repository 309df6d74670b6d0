"""What several ranks do beyond training alike: accumulation, bf16, other models, loading, memory, order, repetition."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import optimus_compiler as optimus
from optimus_compiler.models import build as build_model
from optimus_compiler.models import from_name
from tests.layouts import MICRO_BATCHES, B, S, V, batches, compile_small, own_rows, reference_run, small_model
from tests.models.others import other_model
from tests.models.twins import relative_error
from tests.ranks import RankError, Ranks

# gradients by the module's call, with and without no_sync


def accumulate(dp: int, ep: int) -> dict[str, float]:
    """The worst error of a gradient against the whole batch in one process, for each way to accumulate it."""
    mesh = optimus.Mesh(dp=dp, ep=ep)
    compiled = compile_small("olmoe", mesh)
    reference = small_model("olmoe")
    ids, labels = (values[0] for values in batches())
    for rows, targets in zip(ids.split(B), labels.split(B), strict=True):
        out = reference(input_ids=rows, labels=targets, output_router_logits=True)
        (out.loss / MICRO_BATCHES).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    norm = torch.cat([g.flatten() for g in expected.values() if g is not None]).norm()
    own = list(zip(own_rows(ids, mesh).split(B), own_rows(labels, mesh).split(B), strict=True))

    def backward(number: int) -> None:
        (compiled(own[number][0], own[number][1]).loss / len(own)).backward()

    def only_the_last_reduces() -> None:
        with compiled.no_sync():
            for number in range(len(own) - 1):
                backward(number)
        backward(len(own) - 1)

    def every_backward_reduces() -> None:
        for number in range(len(own)):
            backward(number)

    def none_reduces() -> None:
        with compiled.no_sync():
            every_backward_reduces()

    def half_a_step_twice() -> None:
        for number in range(len(own)):
            backward(number)
            compiled.full_gradients()  # a look in between changes nothing

    worst: dict[str, float] = {}
    for setting in ("no optimizer", ("epso", 1), ("epso", 2), ("so", 1), ("so", 2), ("none", 1)):
        optimizer = None
        if setting != "no optimizer":
            optimizer = optimus.ShardedAdamW(compiled, lr=1e-3, sharding=setting[0], zero=setting[1])  # type: ignore[arg-type]
        for way in (only_the_last_reduces, every_backward_reduces, none_reduces, half_a_step_twice):
            compiled.zero_grad()
            way()
            found = compiled.full_gradients()
            errors = [relative_error(found[name], value) for name, value in expected.items() if value is not None]
            if optimizer is not None:
                errors.append(relative_error(optimizer.gradient_norm(), norm))
                after = compiled.full_gradients()
                errors += [relative_error(after[name], found[name]) for name in found]
            worst[f"{setting} {way.__name__}"] = max(errors)
        compiled.zero_grad()
        assert all(value.count_nonzero() == 0 for value in compiled.full_gradients().values())
    return worst


@pytest.mark.parametrize(("dp", "ep"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_gradients_accumulate_exactly_once(ranks: Ranks, dp: int, ep: int) -> None:
    for worst in ranks.run(dp * ep, accumulate, dp, ep):
        assert len(worst) == 24
        assert max(worst.values()) <= 1e-5, worst


def add_to_gradients_with_bounded_rows() -> tuple[list[bool], float]:
    """Two steps' gradients added up: the second may not be done again, so it runs with all rows at once."""
    mesh = optimus.Mesh(ep=4)
    compiled = compile_small("olmoe", mesh, expert_rows=0.5)
    optimizer = optimus.ShardedAdamW(compiled, lr=1e-3)
    ids, labels = (own_rows(values[0], mesh) for values in batches())
    redone = [compiled.train_step(ids, labels).redone for _ in range(2)]
    twice = compiled.full_gradients()
    optimizer.zero_grad()
    redone.append(compiled.train_step(ids, labels).redone)
    once = compiled.full_gradients()
    return redone, max(relative_error(twice[name], 2 * once[name]) for name in once)


def test_a_step_that_adds_to_gradients_is_not_done_again(ranks: Ranks) -> None:
    for redone, error in ranks.run(4, add_to_gradients_with_bounded_rows):
        assert redone == [True, False, True]
        assert error <= 1e-6


# uniform routing, other models


def uniform_routing() -> tuple[list[float], float]:
    """Counts over all ranks, and the loss, under forced uniform routing at ep=2."""
    mesh = optimus.Mesh(ep=2)
    compiled = compile_small("olmoe", mesh, force_uniform_routing=True)
    ids, labels = (own_rows(values[0], mesh) for values in batches())
    out = compiled.train_step(ids, labels)
    assert out.expert_counts is not None
    return out.expert_counts.tolist(), float(out.loss)


def test_uniform_routing_gives_every_expert_the_same(ranks: Ranks) -> None:
    """2 layers, 2 choices of each of 128 tokens, 8 experts: 64 tokens an expert."""
    results = ranks.run(2, uniform_routing)
    for counts, loss in results:
        assert counts == [2 * 2 * MICRO_BATCHES * B * S / 8] * 8
        assert loss == results[0][1]


def divide_other_model(kind: str, sizes: dict[str, int], **options: Any) -> dict[str, float]:
    """Errors of loss and gradients at ep=2 against the model itself on both halves of the batch."""
    mesh = optimus.Mesh(ep=2, **sizes)  # type: ignore[arg-type]
    model = other_model(kind, vocab_size=96)
    compiled = optimus.compile(
        copy.deepcopy(model), mesh, sequence_length=S, micro_batch_size=B, backend="aot_eager", **options
    )
    ids = torch.randint(0, int(model.config.vocab_size), (2 * B, S), generator=torch.Generator().manual_seed(1))
    losses = []
    for rows in ids.split(B):
        out = model(input_ids=rows, labels=rows.clone(), use_cache=False,
                    **({"output_router_logits": True} if hasattr(model, "router_aux_loss_coef") else {}))  # fmt: skip
        (out.loss / 2).backward()
        losses.append(out.loss.item())
    own = own_rows(ids, mesh)
    step = compiled.train_step(own, own.clone())
    found = compiled.full_gradients()
    errors = {name: relative_error(found[name], p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": abs(float(step.loss) / (sum(losses) / 2) - 1), **errors}


@pytest.mark.parametrize(
    "kind", [*(pytest.param(k, marks=pytest.mark.slow) for k in ("Mixtral", "Qwen3-MoE")), "DeepSeek-V3"]
)
def test_other_models_are_divided_too(ranks: Ranks, kind: str) -> None:
    """DeepSeek-V3's first layer is dense: a rank's layers differ, and the order of collectives stays one."""
    for errors in ranks.run(2, divide_other_model, kind, {}):
        assert max(errors.values()) <= 1e-5, max(errors, key=errors.__getitem__)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3-MoE"])
def test_other_models_are_divided_in_width_too(ranks: Ranks, kind: str) -> None:
    """Qwen3-MoE normalises each head by itself: its norms stay whole."""
    for errors in ranks.run(4, divide_other_model, kind, {"tp": 2}):
        assert max(errors.values()) <= 1e-5, max(errors, key=errors.__getitem__)


def dense_stage() -> dict[str, float]:
    return divide_other_model("DeepSeek-V3", {"pp": 2}, schedule="gpipe", stage_boundaries=[1])


def test_a_stage_without_experts_beside_stages_with_them(ranks: Ranks) -> None:
    """DeepSeek-V3's dense layer alone on the first stage: it has no router statistics to send and no ep collective."""
    for errors in ranks.run(4, dense_stage):
        assert max(errors.values()) <= 1e-5, max(errors, key=errors.__getitem__)


# bf16


def bf16_losses(dp: int, ep: int) -> list[float]:
    """50 losses with bf16 weights and bf16 gradient reduction, on one batch."""
    mesh = optimus.Mesh(dp=dp, ep=ep)
    compiled = optimus.compile(
        small_model("olmoe").to(torch.bfloat16), mesh, sequence_length=S, micro_batch_size=B, seed=5,
        micro_batches=MICRO_BATCHES // mesh.size, backend="aot_eager",
    )  # fmt: skip
    optimizer = optimus.ShardedAdamW(compiled, lr=3e-3, reduce_dtype=torch.bfloat16)
    ids, labels = (own_rows(values[0], mesh) for values in batches())
    losses = []
    for _ in range(50):
        losses.append(float(compiled.train_step(ids, labels).loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "ep"), [(2, 2), (2, 1), (1, 2)])
def test_bf16_reduction_follows_one_process(ranks: Ranks, dp: int, ep: int) -> None:
    """Rounding in another order, for 50 steps, stays within BF16_LOSS."""
    (alone, *_) = ranks.run(1, bf16_losses, 1, 1)
    assert alone[-1] < 0.6 * alone[0]
    results = ranks.run(dp * ep, bf16_losses, dp, ep)
    assert all(result == results[0] for result in results)
    worst = max(abs(a - b) for a, b in zip(results[0], alone, strict=True))
    print(f"dp={dp} ep={ep}: largest difference of the loss over 50 steps {worst:.4f}")
    assert worst <= BF16_LOSS


BF16_LOSS = 0.05


# weights


def drawn_weights(dp: int, ep: int) -> tuple[dict[str, Tensor], int]:
    """Weights drawn from a seed, and the most elements that a weight of this rank has."""
    with torch.device("meta"):
        model = build_model(from_name("olmoe-tiny", vocab_size=V, hidden_size=32, num_hidden_layers=1, num_experts=4))
    mesh = optimus.Mesh(dp=dp, ep=ep)
    compiled = optimus.compile(model, mesh, sequence_length=S, seed=11, backend="eager")
    return compiled.full_state_dict(), sum(p.numel() for p in compiled.parameters())


def test_drawn_weights_do_not_depend_on_the_layout(ranks: Ranks) -> None:
    (alone, whole), *_ = ranks.run(1, drawn_weights, 1, 1)
    experts = sum(value.numel() for name, value in alone.items() if ".experts." in name)
    for dp, ep in ((1, 2), (1, 4), (2, 2)):
        for found, held in ranks.run(dp * ep, drawn_weights, dp, ep):
            assert held == whole - experts + experts // ep
            assert found.keys() == alone.keys()
            for name, value in alone.items():
                assert torch.equal(found[name], value), name


def receive_weights(transfer: str, faulty: bool) -> str | bool:
    """Rank 0 alone has a state dict. Whether all ranks ended with its bits, or what they raised."""
    mesh = optimus.Mesh(ep=2)
    with torch.device("meta"):
        empty = small_model("olmoe")
    compiled = optimus.compile(empty, mesh, sequence_length=S, seed=0, backend="eager")
    wanted = small_model("olmoe").state_dict()
    wanted["model.norm.weight"][0] = -0.0
    given = dict(wanted) if mesh.rank == 0 else None
    if given is not None and faulty:
        del given["model.norm.weight"]
    try:
        compiled.load_state_dict(given, transfer=transfer)  # type: ignore[arg-type]
    except ValueError as error:
        return str(error)
    found = compiled.full_state_dict()
    return all(torch.equal(found[n].view(torch.int32), wanted[n].view(torch.int32)) for n in wanted)


@pytest.mark.parametrize("transfer", ["broadcast", "all_reduce"])
def test_one_rank_reads_and_the_others_receive(ranks: Ranks, transfer: str) -> None:
    assert ranks.run(2, receive_weights, transfer, False) == [True, True]
    first, second = ranks.run(2, receive_weights, transfer, True)
    assert "lacks ['model.norm.weight']" in first
    assert "rank 0 has no state dict that fits" in second


# memory


SHARDS = {"none": (1, 1), "so": (2, 2), "epso": (2, 4)}  # ranks that share the state of experts, of the rest


def memory(dtype: torch.dtype) -> dict[tuple[str, int], tuple[int, int, int]]:
    """Bytes of all weights, gradients and state of this rank: by the report, counted, by the formula."""
    mesh = optimus.Mesh(dp=2, ep=2)
    model = build_model(from_name("olmoe-tiny", vocab_size=2000)).to(dtype)
    compiled = optimus.compile(model, mesh, sequence_length=S, backend="eager")
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n) // mesh.ep
    others = sum(p.numel() for n, p in model.named_parameters() if ".experts." not in n)
    weight, gradient, state = (2, 2, 12) if dtype == torch.bfloat16 else (4, 4, 8)
    found = {}
    for sharding, shards in SHARDS.items():
        for zero in (1, 2):
            optimizer = optimus.ShardedAdamW(
                compiled, lr=1e-3, sharding=sharding, zero=zero, reduce_dtype=dtype  # type: ignore[arg-type]
            )  # fmt: skip
            report = optimizer.memory_report()
            assert "bytes a parameter" in str(report)
            tensors = [p.detach() for p in compiled.parameters()]
            tensors += [p.grad for p in compiled.parameters() if p.grad is not None]
            tensors += [part.owned for part in compiled.reduction.parts]
            tensors += [value for state in optimizer.state.values() for value in state.values()]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
            formula = sum(
                count * (weight + (gradient / n if zero == 2 else gradient) + state / n)
                for count, n in zip((experts, others), shards, strict=True)
            )
            found[sharding, zero] = (report.total, sum(storages.values()), round(formula))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_memory_is_what_the_formula_says(ranks: Ranks, dtype: torch.dtype) -> None:
    for found in ranks.run(4, memory, dtype):
        for reported, counted, formula in found.values():
            assert reported == counted
            assert abs(reported / formula - 1) < 0.02
        total = {setting: counted for setting, (_, counted, _) in found.items()}
        assert total["epso", 1] < total["so", 1] < total["none", 1] == total["none", 2]
        assert total["epso", 2] < total["epso", 1]


# the optimizer as a torch.optim.Optimizer


def state_round_trip(zero: int) -> tuple[bool, list[float]]:
    """Two steps, save, two steps, restore, the same two steps: bit by bit. And the learning rates of a scheduler."""
    mesh = optimus.Mesh(dp=2, ep=2)
    compiled = compile_small("olmoe", mesh, backend="eager")
    optimizer = optimus.ShardedAdamW(compiled, lr=1e-2, zero=zero, no_decay=("*norm.weight",), clip_after=1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    all_ids, all_labels = batches()
    rates = []

    def step(number: int) -> None:
        compiled.train_step(own_rows(all_ids[number], mesh), own_rows(all_labels[number], mesh))
        optimizer.step()
        optimizer.zero_grad()

    for number in range(2):
        step(number)
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    saved, weights = copy.deepcopy(optimizer.state_dict()), compiled.full_state_dict()
    for number in (2, 3):
        step(number)
    expected = (compiled.full_state_dict(), optimizer.full_state()["exp_avg_sq"])
    compiled.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    for number in (2, 3):
        step(number)
    found = (compiled.full_state_dict(), optimizer.full_state()["exp_avg_sq"])
    equal = all(torch.equal(a[n], b[n]) for a, b in zip(expected, found, strict=True) for n in a)
    return equal and len(optimizer.param_groups) == 2, rates


@pytest.mark.parametrize("zero", [1, 2])
def test_optimizer_state_is_saved_and_restored(ranks: Ranks, zero: int) -> None:
    for equal, rates in ranks.run(4, state_round_trip, zero):
        assert equal
        assert rates == [1e-2, 5e-3]


# order and repetition


def traced_collectives() -> tuple[list[str], list[float]]:
    """Every collective of a step in order, as (name, bytes, ranks); and the losses of two equal runs, bit by bit."""
    mesh = optimus.Mesh(dp=2, ep=2)
    calls: list[str] = []
    compiled = compile_small("idle", mesh)
    optimizer = optimus.ShardedAdamW(compiled, lr=1e-3)
    ids, labels = (own_rows(values[0], mesh) for values in batches())
    compiled.train_step(ids, labels)
    optimizer.step()
    optimizer.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        compiled.train_step(ids, labels)
        optimizer.step()
    for event in sorted(profiler.events(), key=lambda e: e.time_range.start):
        if event.name.startswith(("c10d::", "_c10d_functional::", "optimus::reduce ")):
            calls.append(f"{event.name} {event.input_shapes}")
    losses = []
    for _ in range(2):
        compiled.load_state_dict(small_model("idle").state_dict())
        optimizer = optimus.ShardedAdamW(compiled, lr=1e-3)
        for _ in range(3):
            losses.append(float(compiled.train_step(ids, labels).loss))
            optimizer.step()
            optimizer.zero_grad()
    return calls, losses


def test_every_rank_runs_the_same_collectives_in_the_same_order(ranks: Ranks) -> None:
    """Also ranks without a token, in both directions; and a run repeats bit by bit."""
    results = ranks.run(4, traced_collectives)
    for calls, losses in results:
        assert calls == results[0][0]
        assert losses[:3] == losses[3:]
        assert losses == results[0][1]
    reduced = [call.split()[1] for call in results[0][0] if call.startswith("optimus::reduce ")]
    assert reduced == [
        "head.float32",
        "layer1.float32/ep",
        "layer1.float32",
        "embed+layer0.float32/ep",
        "embed+layer0.float32",
    ]
    layers, buckets = 2, 5
    counts = Counter(call.split()[0] for call in results[0][0])
    assert counts["_c10d_functional::all_gather_into_tensor"] == layers * (3 + 1)  # forward 3, backward 1
    assert counts["_c10d_functional::reduce_scatter_tensor"] == layers * (1 + 2)  # forward 1, backward 2
    assert counts["c10d::_reduce_scatter_base_"] == buckets  # gradients
    assert counts["c10d::_allgather_base_"] == buckets  # weights


def check_itself(right: bool) -> str:
    mesh = optimus.Mesh(ep=2)
    model = small_model("olmoe")
    compiled = compile_small("olmoe", mesh, check=True)
    del model
    ids, labels = (own_rows(values[0], mesh) for values in batches())
    if not right:
        with torch.no_grad():
            compiled.get_parameter("model.layers.0.mlp.experts.down_proj").add_(1e-3 * dist.get_rank())
        original: nn.Module = compiled._original[0]
        original.load_state_dict(small_model("olmoe").state_dict())
        compiled.full_state_dict = small_model("olmoe").state_dict  # type: ignore[method-assign]
    try:
        compiled.train_step(ids, labels)
    except optimus.CheckError as error:
        return str(error)
    return "agrees"


def test_check_compares_with_the_original_over_all_ranks(ranks: Ranks) -> None:
    assert ranks.run(2, check_itself, True) == ["agrees", "agrees"]
    assert all("differs from the original" in result for result in ranks.run(2, check_itself, False))


def fail_on_rank_one() -> None:
    if optimus.Mesh(dp=2).rank == 1:
        raise ValueError("the reason")


def test_the_pool_reports_a_rank_that_raises(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2.*the reason"):
        ranks.run(2, fail_on_rank_one)


def test_reference_run_can_tell_runs_apart() -> None:
    """The comparison of layouts means something: another seed of the data order gives other numbers."""
    first, second = reference_run(small_model("olmoe")), reference_run(small_model("idle"))
    assert first.losses != second.losses
