"""Timing on a GPU: variants in turn, a deadline, and failures that are listed and do not end the benchmark."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch import Tensor

from bench.tables import keep, show
from optimus_compiler import processes

Step = Callable[[], object]


class GpuBench:
    """Where it runs, how long it may, and where the tables go."""

    def __init__(self, output: Path, minutes: float, smoke: bool) -> None:
        self.output = output
        self.smoke = smoke
        self.ends = time.monotonic() + 60 * minutes
        self.device = processes.device()
        self.rounds = 1 if smoke else 5
        name = "CPU" if self.device.type == "cpu" else torch.get_device_module(self.device).get_device_name(self.device)
        self.machine = f"{name}, torch {torch.__version__}, triton {triton.__version__}"
        self.left_out: list[str] = []

    def has_time(self, what: str) -> bool:
        """Whether the deadline lies ahead; what is left out is noted."""
        if time.monotonic() < self.ends:
            return True
        self.left_out.append(f"{what}: no time left")
        return False

    def note(self, what: str, error: Exception) -> None:
        """Lists what failed."""
        self.left_out.append(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")

    def publish(self, name: str, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Prints a table and keeps it as gpu-name.json."""
        show(title, self.machine, columns, rows)
        keep(f"gpu-{name}", title, self.machine, columns, rows, self.output)

    def draw(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal numbers in bf16."""
        return (torch.randn(shape, device=self.device) * scale).to(torch.bfloat16)

    def wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def medians(self, variants: dict[str, Step]) -> dict[str, tuple[float, int]]:
        """(seconds, bytes allocated at the peak above what stays) of each variant that runs."""
        running: dict[str, int] = {}
        repeats: dict[str, int] = {}
        for name, step in variants.items():
            try:
                step()  # compiles
                self.wait()
                running[name] = self._peak(step)
                once = self._seconds(step, 1)
                repeats[name] = 1 if self.smoke else max(1, min(50, int(0.02 / once)))
            except Exception as error:  # one variant of a library must not take the others' figures along
                self.note(name, error)
        times: dict[str, list[float]] = {name: [] for name in running}
        for number in range(self.rounds):
            order = list(running)
            first = number % max(len(order), 1)
            for name in order[first:] + order[:first]:
                times[name].append(self._seconds(variants[name], repeats[name]))
        return {name: (statistics.median(times[name]), running[name]) for name in running}

    def _seconds(self, step: Step, repeats: int) -> float:
        self.wait()
        began = time.perf_counter()
        for _ in range(repeats):
            step()
        self.wait()
        return (time.perf_counter() - began) / repeats

    def _peak(self, step: Step) -> int:
        if self.device.type == "cpu":
            return 0
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        step()
        self.wait()
        return torch.accelerator.max_memory_allocated() - before
