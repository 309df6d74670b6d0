"""Mesh: the sizes of the four parallel dimensions, this process's place in them, and their process groups."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist

from optimus_compiler import processes

DIMENSIONS = ("pp", "dp", "ep", "tp")  # outermost first

# The subsets that get a process group, in the order in which every rank makes them.
SUBSETS = (
    ("pp",), ("dp",), ("ep",), ("tp",), ("dp", "ep"), ("dp", "tp"), ("ep", "tp"), ("dp", "ep", "tp"), DIMENSIONS
)  # fmt: skip


@dataclass(frozen=True)
class Mesh:
    """How the processes of a job are arranged; an omitted dimension has size 1.

    dp and ep ranks see different data (a batch is sharded over dp*ep), tp ranks the same data, pp ranks hold
    different layers. Ranks count through tp first, then ep, dp and pp. In a job of several processes the first mesh
    of given sizes joins the process group and makes the groups: every rank must create it. Meshes are equal by sizes.

    Raises ValueError when the sizes do not multiply to the number of processes.
    """

    pp: int = 1
    dp: int = 1
    ep: int = 1
    tp: int = 1
    live: bool = field(default=True, compare=False, repr=False, kw_only=True)  # False: see Mesh.abstract

    def __post_init__(self) -> None:
        for name, size in self.sizes().items():
            if size < 1:
                raise ValueError(f"mesh dimension {name}={size} must be at least 1")
        if not self.live:
            return
        processes_in_job = processes.world_size()
        if self.size != processes_in_job:
            raise ValueError(
                f"the mesh {self} needs {self.size} processes and this job has {processes_in_job}: "
                f"change the sizes in [mesh], or start {self.size} processes"
            )
        if self.size > 1:
            _make_groups(self, processes.start())

    @classmethod
    def abstract(cls, pp: int = 1, dp: int = 1, ep: int = 1, tp: int = 1) -> "Mesh":
        """A mesh on which nothing runs, of any size in any job: no groups, coordinates 0, device cpu."""
        return cls(pp, dp, ep, tp, live=False)

    @property
    def size(self) -> int:
        """Number of processes of the mesh."""
        return self.size_of(*DIMENSIONS)

    def sizes(self) -> dict[str, int]:
        """Size of every dimension by name, outermost first."""
        return {name: getattr(self, name) for name in DIMENSIONS}

    @property
    def rank(self) -> int:
        """This process's rank in the job."""
        return dist.get_rank() if self.live and self.size > 1 else 0

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""
        return processes.device() if self.live else torch.device("cpu")

    def size_of(self, *names: str) -> int:
        """Number of processes over the named dimensions together."""
        return prod(getattr(self, name) for name in _ordered(names))

    def coordinate(self, name: str) -> int:
        """This process's index in one dimension."""
        return self.rank // self._stride(name) % self.size_of(name)

    def index_in(self, *names: str) -> int:
        """This process's index in the group over the named dimensions, the outermost of them counting slowest."""
        index = 0
        for name in _ordered(names):
            index = index * self.size_of(name) + self.coordinate(name)
        return index

    def ranks_in(self, *names: str) -> list[int]:
        """The ranks of this process's group over the named dimensions, by their index in it."""
        ranks = [self.rank - sum(self.coordinate(name) * self._stride(name) for name in _ordered(names))]
        for name in _ordered(names):
            ranks = [rank + i * self._stride(name) for rank in ranks for i in range(self.size_of(name))]
        return ranks

    def group(self, *names: str) -> dist.ProcessGroup | None:
        """This process's group over the named dimensions; None where it would hold this process alone.

        Raises RuntimeError on an abstract mesh, and when the process group has been left since the mesh was made.
        """
        if self.size_of(*names) == 1:
            return None
        name = self.group_name(*names)
        if not self.live:
            raise RuntimeError(f"the abstract mesh {self} has no process group {name}: create a Mesh to run on")
        group = _registered(name)
        if group is None:
            raise RuntimeError(f"the process group {name} is gone: create the Mesh again once processes have started")
        return group

    def group_name(self, *names: str) -> str:
        """The name, equal on all ranks, by which torch.ops._c10d_functional finds `group(*names)`: "dp+ep@1x2x2x1".

        Raises ValueError where the group would hold one process, and for a subset of dimensions that has no group.
        """
        subset = self._without_ones(names)
        if subset not in {self._without_ones(made) for made in SUBSETS}:
            raise ValueError(f"the mesh {self} has no group over {' and '.join(names)}: groups are made for "
                             f"{', '.join('+'.join(made) for made in SUBSETS)}")  # fmt: skip
        if not subset:
            raise ValueError(f"the mesh {self} has no group over {' and '.join(names)}: it would hold one process")
        return "+".join(subset) + "@" + "x".join(str(size) for size in self.sizes().values())

    def _stride(self, name: str) -> int:
        return self.size_of(*DIMENSIONS[DIMENSIONS.index(name) + 1 :])

    def _without_ones(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in _ordered(names) if getattr(self, name) > 1)

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in self.sizes().items())


def _ordered(names: Iterable[str]) -> list[str]:
    """The names, outermost first; ValueError for one that is no dimension."""
    names = set(names)
    if unknown := names.difference(DIMENSIONS):
        raise ValueError(f"{min(unknown)!r} is no mesh dimension: choose from {', '.join(DIMENSIONS)}")
    return [name for name in DIMENSIONS if name in names]


# torch's registry of names is the only record of the groups: it forgets them when the process group is destroyed.


def _registered(name: str) -> dist.ProcessGroup | None:
    try:
        return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:
        return None


def _make_groups(mesh: Mesh, device: torch.device) -> None:
    """Makes this rank's group of every subset and registers them by name, the world's, which all ranks share, last.

    Each rank makes only its own groups (use_local_synchronization). For pp=8 x dp=128 x ep=12, 12,288 ranks, that is 4
    groups and 3 ms; enumerating all groups on every rank is 2,664 and 110 ms, and on a device-bound nccl group each of
    them is a collective of the world. torch offers it on every backend but mpi, and it needs no splitting, which xccl
    lacks. All ranks take the subsets in one order, so that the waits of gloo, which connects at once, do not cross.
    """
    if _registered(mesh.group_name(*DIMENSIONS)) is not None:
        return
    _check_same_number_of_groups(device)
    world = dist.group.WORLD
    assert world is not None
    for name, subset in {mesh.group_name(*subset): subset for subset in SUBSETS if mesh.size_of(*subset) > 1}.items():
        ranks = mesh.ranks_in(*subset)
        group = world
        if len(ranks) < mesh.size:
            group = dist.new_group(
                ranks, timeout=_timeout(world, device), use_local_synchronization=True, group_desc=name
            )
        torch._C._distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]


def _check_same_number_of_groups(device: torch.device) -> None:
    """Refuses a job in which ranks hold different numbers of groups: new_group's own names count them.

    Members would then wait for each other under different names until the timeout.
    """
    number = len(dist.distributed_c10d._world.pg_names)
    extremes = torch.tensor([number, -number], device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    most, least = extremes[0].item(), -extremes[1].item()
    if most != least:
        raise RuntimeError(f"some ranks of this job have made {least} process groups and others {most}: "
                           "create the Mesh before groups that only some ranks belong to")  # fmt: skip


def _timeout(world: dist.ProcessGroup, device: torch.device) -> object:
    """The world's timeout, where its backend tells: new_group would take torch's default instead."""
    if dist.get_backend(world) in ("gloo", "nccl", "xccl"):
        return world._get_backend(device).options._timeout
    return None
