"""Faults on purpose: how they are written, whom they concern, and that each happens once."""

from pathlib import Path

import pytest
import torch

from optimus_compiler.runtime.resilience.inject import Faults, Injection, InjectionError


def test_a_specification() -> None:
    assert Injection.parse("step=7,node=1,kind=kill") == Injection(7, "node1", "kill")
    assert Injection.parse("kind=nan, rank=3, step=1, node=x1921c0") == Injection(1, "x1921c0", "nan", 3)
    assert Injection.parse("step=2,kind=exit").node == "node0"
    assert Injection.parse("step=2,kind=exit,rank=5") == Injection(2, None, "exit", 5)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("step=7,kind=explode", "kind must be one of kill, stop, hang"),
        ("step=0,kind=kill", "step must be a number from 1 on"),
        ("kind=kill", "step must be a number from 1 on"),
        ("step=1,kind=kill,nodes=2", "there is no 'nodes'"),
        ("step=1,kind=kill,rank=x", "rank must be a number from 0 on"),
    ],
)
def test_a_specification_that_means_nothing(text: str, sentence: str) -> None:
    with pytest.raises(InjectionError, match=sentence):
        Injection.parse(text)


def strike(run: Path, texts: list[str], step: int, node: str = "node1", rank: int = 2, local_rank: int = 0) -> bool:
    """Whether "nan" hits this process at a step."""
    weight = torch.ones(3)
    Faults(texts, run, node=node, rank=rank, local_rank=local_rank).strike(step, [weight])
    return bool(weight.isnan().all())


def test_it_strikes_its_rank_at_its_step_once_in_the_life_of_a_run(tmp_path: Path) -> None:
    texts = ["step=5,node=1,kind=nan"]
    assert not strike(tmp_path, texts, 4)
    assert not strike(tmp_path, texts, 5, node="node0")
    assert not strike(tmp_path, texts, 5, rank=3, local_rank=1)
    assert strike(tmp_path, texts, 5)
    assert not strike(tmp_path, texts, 5)  # the run was started again
    assert strike(tmp_path, [*texts, "step=5,node=1,kind=nan,rank=3"], 5, rank=3, local_rank=1)
    assert strike(tmp_path, [*texts, *texts, "step=6,kind=nan,rank=3"], 6, node="node9", rank=3, local_rank=1)


def test_nan_all_strikes_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        assert strike(tmp_path, ["step=1,node=0,kind=nan-all"], 1, node=f"node{rank}", rank=rank)
        assert not strike(tmp_path, ["step=1,node=0,kind=nan-all"], 1, node=f"node{rank}", rank=rank)


def test_a_rank_that_left_its_node_is_not_struck(tmp_path: Path) -> None:
    assert not strike(tmp_path, ["step=5,node=0,kind=nan"], 5, node="node3")
