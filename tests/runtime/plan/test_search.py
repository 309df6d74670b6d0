"""Layouts found by `--layout auto`, and deep models planned from shallow ones."""

import pytest

from optimus_compiler.config import Config, ConfigError, parse_config
from optimus_compiler.program import ProgramError
from optimus_compiler.runtime.plan.deepen import deepen, front_program, planned_program
from optimus_compiler.runtime.plan.estimate import estimate
from optimus_compiler.runtime.plan.hardware import load_hardware
from optimus_compiler.runtime.plan.search import _refuse, _Rough, search
from optimus_compiler.runtime.run import passed_program
from tests.tiny_run import CONFIG

AURORA = load_hardware("aurora")


def config_with(*lines: str, layers: int = 2, experts: int = 4) -> Config:
    text = CONFIG.replace("global_batch_size = 4\n", "sequence_length = 16\n")
    text = text.replace("num_hidden_layers = 2", f"num_hidden_layers = {layers}")
    text = text.replace("num_experts = 4", f"num_experts = {experts}")
    return parse_config(text + "\n".join(("", *lines)), "test")


@pytest.mark.parametrize(
    "lines",
    [
        (),
        ("[mesh]", "pp = 2", "dp = 2", "ep = 2", "[activation_checkpointing]", 'blocks = ["moe"]'),
        pytest.param(
            ("[mesh]", "pp = 2", "tp = 2", "[pipeline]", 'schedule = "interleaved-1f1b"', "virtual_stages = 2"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one process", "pp x dp x ep, recomputed", "interleaved x tp"],
)
def test_a_deepened_program_is_planned_like_the_captured_one(lines: tuple[str, ...]) -> None:
    config = config_with(*lines, layers=5)
    deep, whole = planned_program(config), passed_program(config)[0]
    assert list(deep.parameters) == list(whole.parameters)
    assert set(deep.outputs) == set(whole.outputs)
    assert [(s.kind, s.stage, s.parameters) for s in deep.segments] == [
        (s.kind, s.stage, s.parameters) for s in whole.segments
    ]
    a, b = (estimate(program, config, AURORA) for program in (deep, whole))
    assert (a.memory, a.transfers, a.time) == (b.memory, b.transfers, b.time)


def test_layers_that_differ_are_not_repeated() -> None:
    program = front_program(config_with())
    layers = [segment for segment in program.segments if segment.kind == "layer"]
    layers[1].graph = layers[1].graph.__copy__()
    with pytest.raises(ProgramError, match="the model's layers are not one function"):
        deepen(program, 4)


def test_search_finds_what_fits_and_ranks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimus_compiler.runtime.plan.search.EXACT", 3)
    monkeypatch.setattr("optimus_compiler.runtime.plan.search.RECOMPUTED", ((),))
    config = config_with("[mesh]", "dp = 2", experts=2)
    train = config.train.model_copy(update={"global_batch_size": 2, "micro_batch_size": 1})
    config = config.model_copy(update={"train": train})
    seen: list[str] = []
    plans = search(config, AURORA, 2, lambda what, done, total: seen.append(what))
    layouts = {(p.mesh.pp, p.mesh.dp, p.mesh.ep, p.config.train.micro_batch_size) for p in plans}
    assert len(layouts) == len(plans)
    assert all(pp * dp * ep == 2 and micro_batch in (1, 2) for pp, dp, ep, micro_batch in layouts)
    assert all(p.mesh.size == 2 and p.config.global_batch_size() == config.global_batch_size() for p in plans)
    rates = [plan.tokens_per_second for plan in plans]
    assert rates == sorted(rates, reverse=True)
    assert seen[0] == "layers with tp=1"


def test_what_cannot_fit_is_refused_with_the_leanest_layout() -> None:
    config = config_with("[mesh]", "pp = 2")
    rough = [_Rough(config, 1.0, 3 * 2**30), _Rough(config_with(), 1.0, 5 * 2**30)]
    with pytest.raises(ConfigError, match=r"the leanest, pp=2 dp=1 ep=1 tp=1 .*, needs 3\.0 GiB of 64 GiB a device"):
        _refuse(rough, AURORA, 2)
    with pytest.raises(ConfigError, match="no layout of 7 devices divides the model and its batch"):
        _refuse([], AURORA, 7)
