"""Mesh: sizes, coordinates and groups, alone, in four gloo processes under torchrun, and in a world of 12,288 ranks.

Run as a script, under torchrun, this file is one of the processes: it writes what it saw, and the test asserts it.
"""

import copy
import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # its autograd formulas of the operators
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from optimus_compiler import processes
from optimus_compiler.mesh import DIMENSIONS, SUBSETS, Mesh

SHAPES = ((1, 2, 2, 1), (2, 1, 2, 1), (1, 2, 1, 2), (1, 1, 2, 2), (2, 2, 1, 1), (1, 4, 1, 1), (4, 1, 1, 1))


def expected_ranks(shape: tuple[int, ...], rank: int, subset: tuple[str, ...]) -> list[int]:
    """The ranks of a rank's group, from the list of all coordinates."""
    places = list(product(*(range(size) for size in shape)))  # by rank: the last dimension counts fastest
    fixed = [i for i, name in enumerate(DIMENSIONS) if name not in subset]
    return [r for r, place in enumerate(places) if all(place[i] == places[rank][i] for i in fixed)]


def test_sizes() -> None:
    mesh = Mesh.abstract(pp=2, dp=3, ep=4, tp=5)
    assert (mesh.size, str(mesh)) == (120, "pp=2 x dp=3 x ep=4 x tp=5")
    assert mesh.sizes() == {"pp": 2, "dp": 3, "ep": 4, "tp": 5}
    assert [mesh.size_of(*names) for names in ((), ("tp",), ("tp", "dp"), DIMENSIONS)] == [1, 5, 15, 120]
    assert mesh == Mesh.abstract(2, 3, 4, 5)
    assert mesh != Mesh.abstract(2, 3, 5, 4)
    assert hash(mesh) == hash(pickle.loads(pickle.dumps(mesh)))
    assert repr(mesh) == "Mesh(pp=2, dp=3, ep=4, tp=5)"
    assert Mesh() == Mesh.abstract()


def test_names_of_groups() -> None:
    mesh = Mesh.abstract(pp=2, dp=3, tp=5)
    assert mesh.group_name("dp") == "dp@2x3x1x5"
    assert mesh.group_name("ep", "dp") == "dp@2x3x1x5"  # dimensions of size 1 drop out
    assert mesh.group_name("tp", "dp") == mesh.group_name("dp", "ep", "tp") == "dp+tp@2x3x1x5"
    assert mesh.group_name(*DIMENSIONS) == "pp+dp+tp@2x3x1x5"
    with pytest.raises(ValueError, match="no group over ep: it would hold one process"):
        mesh.group_name("ep")
    with pytest.raises(ValueError, match="no group over pp and dp: groups are made for pp, dp, ep, tp, dp"):
        mesh.group_name("pp", "dp")
    assert Mesh.abstract(pp=2, dp=3).group_name("pp", "dp") == "pp+dp@2x3x1x1"  # all ranks
    with pytest.raises(ValueError, match="'cp' is no mesh dimension: choose from pp, dp, ep, tp"):
        mesh.size_of("dp", "cp")


def test_what_does_not_fit_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="the mesh pp=1 x dp=2 x ep=2 x tp=1 needs 4 processes and this job has 1: "):
        Mesh(dp=2, ep=2)
    for create in (Mesh, Mesh.abstract):
        with pytest.raises(ValueError, match="mesh dimension ep=0 must be at least 1"):
            create(ep=0)
    monkeypatch.setattr(processes, "world_size", lambda: 8)
    with pytest.raises(ValueError, match="needs 4 processes and this job has 8"):
        Mesh(dp=4)
    with pytest.raises(ValueError, match="needs 1 processes and this job has 8"):
        Mesh()


def test_one_process_needs_nothing() -> None:
    mesh = Mesh()
    assert (mesh.rank, mesh.device, mesh.size) == (0, torch.device("cpu"), 1)
    assert [mesh.coordinate(name) for name in DIMENSIONS] == [0, 0, 0, 0]
    assert all(mesh.group(*subset) is None for subset in SUBSETS)
    assert not dist.is_initialized()


def test_an_abstract_mesh_runs_nothing() -> None:
    mesh = Mesh.abstract(pp=2, dp=128, ep=4)
    assert (mesh.rank, mesh.device, mesh.index_in("dp", "ep")) == (0, torch.device("cpu"), 0)
    assert mesh.group("tp") is None
    with pytest.raises(RuntimeError, match=r"the abstract mesh .* has no process group dp\+ep@2x128x4x1"):
        mesh.group("dp", "ep")


@pytest.fixture
def fake_world() -> Iterator[Callable[[int, int], None]]:
    """Makes this process one rank of a world in which nobody communicates."""

    def join(rank: int, size: int) -> None:
        processes.stop()
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

    yield join
    processes.stop()


def test_places_and_groups_of_every_rank(fake_world: Callable[[int, int], None]) -> None:
    shape = (2, 3, 2, 2)
    for rank, place in enumerate(product(*(range(size) for size in shape))):
        fake_world(rank, 24)
        mesh = Mesh(*shape)
        assert mesh.rank == rank
        assert tuple(mesh.coordinate(name) for name in DIMENSIONS) == place
        for subset in SUBSETS:
            group = mesh.group(*subset)
            assert group is not None
            ranks = expected_ranks(shape, rank, subset)
            assert dist.get_process_group_ranks(group) == mesh.ranks_in(*subset) == ranks
            assert (group.rank(), group.size()) == (mesh.index_in(*subset), mesh.size_of(*subset))
            assert ranks.index(rank) == mesh.index_in(*reversed(subset))


def test_a_rank_of_12288_makes_only_its_own_groups(
    fake_world: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    new_group = dist.new_group

    def counted(ranks: list[int], **options: Any) -> Any:
        made.append(len(ranks))
        return new_group(ranks, **options)

    monkeypatch.setattr(dist, "new_group", counted)
    fake_world(1234, 12288)
    mesh = Mesh(pp=8, dp=128, ep=12)
    assert made == [8, 128, 12, 1536]
    assert mesh.group(*DIMENSIONS) is dist.group.WORLD
    assert mesh.ranks_in("ep") == list(range(1224, 1236))
    assert copy.deepcopy(mesh).group("pp") is mesh.group("pp")
    with pytest.raises(ValueError, match="needs 1536 processes and this job has 12288"):
        Mesh(dp=128, ep=12)


def gather(x_N: Tensor, size: int, name: str) -> Tensor:
    """sin(2 x) of all ranks of the named group."""
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(2 * x_N, size, name)
    return torch.ops._c10d_functional.wait_tensor(gathered).sin()


def see_shapes(made: list[list[str]]) -> dict[str, Any]:
    """Per shape: what this rank knows of its groups, and the sum of ranks that each of them gives."""
    seen: dict[str, Any] = {}
    for shape in SHAPES:
        made.append([])
        mesh = Mesh(*shape)
        groups = {}
        for subset in SUBSETS:
            group = mesh.group(*subset)
            if group is not None:
                total = torch.tensor(float(mesh.rank))
                dist.all_reduce(total, group=group)
                groups["+".join(subset)] = [dist.get_process_group_ranks(group), group.rank(), total.item()]
        seen[str(mesh)] = {"coordinates": [mesh.coordinate(name) for name in DIMENSIONS], "groups": groups}
    return seen


def see_more_meshes() -> list[bool]:
    """Whether meshes of equal sizes share their groups, and meshes of other sizes do not."""
    first, second, other = Mesh(dp=2, ep=2), Mesh(dp=2, ep=2), Mesh(dp=2, tp=2)
    return [first.group("ep") is second.group("ep"), first.group("ep") is other.group("tp")]


def see_collective_by_name() -> dict[str, list[float]]:
    """The functional collective over ep, eager and lowered by AOTAutograd on rank 0: its values and the gradient."""
    mesh = Mesh(dp=2, ep=2)
    seen = {}
    for backend in ("eager", "aot_eager"):
        compiled = backend == "aot_eager" and mesh.rank == 0  # its peers need not compile too, which takes seconds
        run = torch.compile(gather, backend=backend, fullgraph=True) if compiled else gather
        x_N = torch.full((1,), float(mesh.rank), requires_grad=True)
        y_N = run(x_N, mesh.size_of("ep"), mesh.group_name("ep"))
        y_N.sum().backward()
        assert x_N.grad is not None
        seen[backend] = [*y_N.tolist(), x_N.grad.item()]
    return seen


def see_refusals() -> list[str]:
    """The messages of a mesh that does not fit, and of one after groups that only some ranks belong to."""
    messages = []
    for create in (lambda: Mesh(dp=3), lambda: dist.new_group([0, 1]) and Mesh(tp=4)):
        try:
            create()
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    return messages


def see_second_start(folder: Path) -> list[Any]:
    """Old groups after stop(), and new ones in a world that the user made, with its timeout."""
    mesh = Mesh(dp=2, ep=2)
    rank = mesh.rank
    dist.barrier()
    processes.stop()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4, timeout=timedelta(seconds=99)
    )
    try:
        mesh.group("ep")
        stale = "none"
    except RuntimeError as error:
        stale = str(error)
    group = Mesh(dp=2, ep=2).group("ep")
    assert group is not None
    total = torch.ones(())
    dist.all_reduce(total, group=group)
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    return [stale, total.item(), mesh.group("ep") is group, timeout.total_seconds()]


def run_process(folder: Path) -> None:
    """One of the processes under torchrun."""
    made: list[list[str]] = []  # descriptions of the groups made, by mesh
    new_group = dist.new_group

    def recorded(ranks: list[int], **options: Any) -> Any:
        made[-1].append(options.get("group_desc", ""))
        return new_group(ranks, **options)

    dist.new_group = recorded  # type: ignore[assignment]
    seen: dict[str, Any] = {"shapes": see_shapes(made)}
    made.append([])
    seen["more meshes"] = see_more_meshes()
    seen["made"] = copy.deepcopy(made)
    seen["collective"] = see_collective_by_name()
    seen["refusals"] = see_refusals()
    seen["second start"] = see_second_start(folder)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(seen))
    processes.stop()


def torchrun(count: int, *arguments: str) -> None:
    """Runs this file in `count` processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_four_processes(tmp_path: Path) -> None:
    torchrun(4, str(tmp_path))
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for rank, shape in product(range(4), SHAPES):
        mesh = Mesh.abstract(*shape)
        known = seen[rank]["shapes"][str(mesh)]
        assert known["coordinates"] == list(list(product(*(range(size) for size in shape)))[rank])
        ranks = {"+".join(s): expected_ranks(shape, rank, s) for s in SUBSETS if mesh.size_of(*s) > 1}
        assert known["groups"] == {s: [own, own.index(rank), sum(own)] for s, own in ranks.items()}
    # one order on all ranks; the group of all four ranks is the world's own
    assert seen[0]["made"][:4] == [
        ["dp@1x2x2x1", "ep@1x2x2x1"],
        ["pp@2x1x2x1", "ep@2x1x2x1"],
        ["dp@1x2x1x2", "tp@1x2x1x2"],
        ["ep@1x1x2x2", "tp@1x1x2x2"],
    ]
    assert seen[0]["made"][-3:] == [[], [], []]  # dp=4, pp=4, and meshes made before
    assert all(one["made"] == seen[0]["made"] for one in seen)
    for rank, one in enumerate(seen):
        assert one["more meshes"] == [True, False]
        members = expected_ranks((1, 2, 2, 1), rank, ("ep",))
        # the gather's backward sums over both members: 2 ranks * d/dx sin(2 x)
        values = [*(math.sin(2 * member) for member in members), 2 * 2 * math.cos(2 * rank)]
        assert one["collective"] == {backend: pytest.approx(values, abs=1e-6) for backend in ("eager", "aot_eager")}
        assert one["refusals"] == [
            "the mesh pp=1 x dp=3 x ep=1 x tp=1 needs 3 processes and this job has 4: "
            "change the sizes in [mesh], or start 3 processes",
            "some ranks of this job have made 11 process groups and others 12: "
            "create the Mesh before groups that only some ranks belong to",
        ]
        stale = "the process group ep@1x2x2x1 is gone: create the Mesh again once processes have started"
        assert one["second start"] == [stale, 2.0, True, 99.0]


@pytest.mark.slow
def test_inductor_finds_a_group_by_name(tmp_path: Path) -> None:
    torchrun(2, str(tmp_path), "inductor")
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["0.0000 0.9093", "0.0000 0.9093"]


def run_inductor(folder: Path) -> None:
    """One of two processes that compile the collective."""
    mesh = Mesh(ep=2)
    x_N = torch.full((1,), float(mesh.rank))
    y_N = torch.compile(gather, backend="inductor", fullgraph=True)(x_N, 2, mesh.group_name("ep"))
    (folder / f"{mesh.rank}.txt").write_text(" ".join(f"{y:.4f}" for y in y_N.tolist()))
    processes.stop()


if __name__ == "__main__":
    (run_inductor if "inductor" in sys.argv else run_process)(Path(sys.argv[1]))
