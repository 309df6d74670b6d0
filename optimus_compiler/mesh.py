"""Mesh: the sizes of the four parallel dimensions, outermost first: pp, dp, ep, tp."""

import os
from dataclasses import dataclass

import torch.distributed as dist

DIMENSIONS = ("pp", "dp", "ep", "tp")


def world_size() -> int:
    """Processes in this job: the process group's size where one exists, else what the launcher says, else 1."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Mesh:
    """How the processes of a job are arranged; an omitted dimension has size 1.

    dp and ep ranks see different data (a batch is sharded over dp*ep), tp ranks the same data, pp ranks hold
    different layers. Raises ValueError when the sizes do not multiply to the number of processes.
    """

    pp: int = 1
    dp: int = 1
    ep: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name in DIMENSIONS:
            if getattr(self, name) < 1:
                raise ValueError(f"mesh dimension {name}={getattr(self, name)} must be at least 1")
        if self.size != world_size():
            raise ValueError(
                f"the mesh {self} needs {self.size} processes and this job has {world_size()}: "
                f"change the sizes in [mesh], or start {self.size} processes"
            )

    @property
    def size(self) -> int:
        """Number of processes of the mesh."""
        return self.pp * self.dp * self.ep * self.tp

    def sizes(self) -> dict[str, int]:
        """Size of every dimension by name, outermost first."""
        return {name: getattr(self, name) for name in DIMENSIONS}

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in self.sizes().items())
