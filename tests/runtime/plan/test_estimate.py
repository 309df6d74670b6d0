"""Plans of small models: memory against what is allocated, operations and traffic against a count by hand."""

import math

import pytest
import torch

import optimus_compiler as optimus
from optimus_compiler.config import Config, ConfigError, parse_config
from optimus_compiler.runtime.plan.estimate import Plan, estimate
from optimus_compiler.runtime.plan.hardware import load_hardware
from optimus_compiler.runtime.plan.layout import on_processes, refuse_what_does_not_fit
from optimus_compiler.runtime.run import load_model_config, passed_program, plain_model
from tests.tiny_run import CONFIG

LAYERS, EXPERTS, H, WIDTH, SEQUENCE = 2, 4, 32, 16, 16


def config_with(*lines: str) -> Config:
    text = CONFIG.replace("global_batch_size = 4\n", "sequence_length = 16\n")
    return parse_config(text + "\n".join(("", *lines)), "test")


def planned(config: Config) -> Plan:
    return estimate(passed_program(config)[0], config, load_hardware("aurora"))


@pytest.fixture(scope="module")
def whole() -> Plan:
    return planned(config_with())


@pytest.fixture(scope="module")
def divided() -> Plan:
    return planned(config_with("[mesh]", "pp = 2", "dp = 2", "ep = 2"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_is_what_a_compiled_model_and_its_optimizer_allocate(precision: str) -> None:
    config = config_with()
    config = config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})
    memory = planned(config).memory[0]
    model = plain_model(config, load_model_config(config.model))
    compiled = optimus.compile(model, sequence_length=SEQUENCE, micro_batch_size=2, seed=0, backend="aot_eager")
    optimizer = optimus.ShardedAdamW(compiled, lr=1e-3, reduce_dtype=torch.bfloat16)
    allocated = sum(b.weights.nbytes + b.gradients.nbytes for b in compiled.buckets)
    allocated += sum(t.nbytes for shard in optimizer.shards for t in shard.tensors().values())
    assert memory.state == pytest.approx(allocated, rel=0.01)
    assert memory.parameters == sum(p.numel() for p in model.parameters())


def test_operations_are_those_of_the_products(whole: Plan) -> None:
    """Per token: attention's four projections, the router, K experts of three matrices, the head; S^2 attention."""
    tokens, words, K = 2 * SEQUENCE, 300, 2
    layer = 2 * tokens * (4 * H * H + EXPERTS * H + 3 * K * H * WIDTH) + 4 * tokens * SEQUENCE * H
    (stage,) = whole.stages
    assert stage.forward.flops == pytest.approx(LAYERS * layer + 2 * tokens * H * words, rel=0.02)
    assert stage.backward.flops == pytest.approx(2 * stage.forward.flops, rel=0.15)
    assert 0 < stage.forward.expert_seconds < stage.forward.seconds
    assert whole.transfers == ({},)
    assert whole.time.communication == whole.time.bubble == 0


def test_traffic_is_that_of_the_collectives(divided: Plan) -> None:
    first, last = divided.transfers
    tokens, count = 2 * 2 * SEQUENCE, divided.micro_batches  # gathered over ep
    # x, weights and indices of one layer forward; the output's gradient backward
    times, size = first["all_gather", "ep"]
    assert times == count * 4
    assert size == count * tokens * (2 * 4 * H + 4 * 2 + 8 * 2)
    experts = EXPERTS // 2 * 3 * H * WIDTH * 4
    assert first["reduce_scatter", "dp"] == first["all_gather", "dp"] == (1, experts)
    assert ("reduce_scatter", "dp+ep") in last
    assert divided.time.bubble > 0
    assert divided.time.communication > 0
    assert divided.time.total == pytest.approx(
        divided.time.compute + divided.time.communication + divided.time.bubble + divided.time.optimizer
    )


def test_sharding_divides_the_optimizer(divided: Plan) -> None:
    """epso: experts over dp, everything else over dp x ep; so: everything over dp."""
    config = config_with("[mesh]", "pp = 2", "dp = 2", "ep = 2", "[optimizer]", 'sharding = "so"')
    so = planned(config)
    for a, b in zip(divided.memory, so.memory, strict=True):
        experts = LAYERS // 2 * EXPERTS // 2 * 3 * H * WIDTH
        dense = a.parameters - experts
        assert (a.weights, a.gradients, a.activations) == (b.weights, b.gradients, b.activations)
        assert b.optimizer == pytest.approx(8 * (experts + dense) / 2, rel=0.01)
        assert a.optimizer == pytest.approx(8 * (experts / 2 + dense / 4), rel=0.01)


def test_zero_2_holds_shards_and_reduces_after_every_micro_batch(divided: Plan) -> None:
    config = config_with("[mesh]", "pp = 2", "dp = 2", "ep = 2", "[optimizer]", "zero = 2")
    shards = planned(config)
    times, size = divided.transfers[0]["reduce_scatter", "dp"]
    count = divided.micro_batches
    assert shards.transfers[0]["reduce_scatter", "dp"] == (count * times, count * size)
    assert shards.transfers[0]["all_gather", "dp"] == divided.transfers[0]["all_gather", "dp"]
    assert all(a.gradients < b.gradients for a, b in zip(shards.memory, divided.memory, strict=True))
    assert shards.time.communication > divided.time.communication


def test_other_numbers_of_processes_keep_the_batch_of_a_rank() -> None:
    config = config_with("[mesh]", "ep = 2", "dp = 2")
    wider = on_processes(config, 24)
    assert (wider.mesh.dp, wider.mesh.ep) == (12, 2)
    assert wider.global_batch_size() == 6 * config.global_batch_size()
    with pytest.raises(ConfigError, match="--world-size 9 is no multiple of pp=1 x ep=2 x tp=1 = 2"):
        on_processes(config, 9)


def test_what_does_not_fit_is_refused_with_the_limit(whole: Plan) -> None:
    refuse_what_does_not_fit(whole)
    limit = whole.memory[0].state * 2 / 3

    def with_memory(size: float) -> Plan:
        memory = whole.hardware.memory.model_copy(update={"value": size / 2**30})
        hardware = whole.hardware.model_copy(update={"memory": memory})
        return Plan(**{**vars(whole), "hardware": hardware})

    with pytest.raises(ConfigError, match=r"a rank needs 0\.0 GB of .* GiB for weights, gradients and optimizer state"):
        refuse_what_does_not_fit(with_memory(limit))
    with pytest.raises(ConfigError, match="GB of them for activations: recompute more"):
        refuse_what_does_not_fit(with_memory(whole.memory[0].peak - 1))


@pytest.mark.slow
def test_seven_billion_parameters_do_not_fit_one_tile() -> None:
    config = on_processes(parse_config('[model]\nname = "mula-7b-a1b"\n[train]\nsteps = 1\n', "test"), 1)
    with pytest.raises(ConfigError, match=r"needs 110\.7 GB of 64 GiB for weights, gradients and optimizer state"):
        refuse_what_does_not_fit(planned(config))


def test_rates_follow_from_the_step(whole: Plan) -> None:
    assert whole.tokens == 2 * SEQUENCE
    assert whole.tokens_per_second == pytest.approx(whole.tokens / whole.time.total)
    assert whole.joules_per_token == pytest.approx(400 * whole.time.total / whole.tokens)
    assert math.isclose(whole.mfu, whole.tokens_per_second * whole.model_flops / 419e12)
