"""What a launch is asked to do."""

from dataclasses import dataclass
from pathlib import Path

from optimus_compiler.runtime.resilience.engines import Launcher
from optimus_compiler.runtime.resilience.hosts import Node


@dataclass(frozen=True)
class Plan:
    """What to run and where."""

    arguments: tuple[str, ...]  # of the training process: ("pretrain", CONFIG, "--output", RUN, ...)
    run: Path
    nodes: tuple[Node, ...]  # those that train first, then the spares
    training: int  # how many of them train
    per_node: int
    launcher: Launcher = "local"
    launcher_arguments: tuple[str, ...] = ()
    injections: tuple[str, ...] = ()
    max_restarts: int = 100
    heartbeat_timeout: float | None = None  # seconds; None: from the measured time of a step
    on_divergence: str = "stop"

    @property
    def names(self) -> list[str]:
        """Of all nodes, in order."""
        return [node.name for node in self.nodes]
