"""What this machine can do, and what is wrong with it: the checks of `optimus doctor`."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from optimus_compiler import processes
from optimus_compiler.runtime.files import synced_file
from optimus_compiler.runtime.kernels.cpu import compiles
from optimus_compiler.runtime.kernels.triton.probe import problem

State = Literal["ok", "note", "wrong"]
MEGABYTES = 64
MAX_SKEW = 1.0  # seconds between this node's clock and the file system's


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    what: str
    state: State
    detail: str


def examine(folder: Path) -> Iterator[Finding]:
    """All checks, in order; `folder` is where runs are to be written. Under a launcher the ranks work together."""
    yield _versions()
    yield from _optional_packages()
    yield from _intel_packages()
    yield _device()
    yield _expert_kernels()
    yield _compute()
    yield from _guarded("collectives", _collectives)
    yield from _guarded("file system", lambda: _file_system(folder))


def _guarded(what: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except (OSError, RuntimeError, ValueError) as error:
        yield Finding(what, "wrong", " ".join(str(error).split()))


def _versions() -> Finding:
    supported = (2, 10) <= tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 14)
    detail = f"Python {sys.version.split()[0]}, torch {torch.__version__}"
    return Finding(
        "versions", "ok" if supported else "wrong", detail if supported else f"{detail}: 2.10 to 2.13 is needed"
    )


def _optional_packages() -> Iterator[Finding]:
    for name, purpose in (
        ("transformers", "models of transformers"),
        ("safetensors", "reading Hugging Face folders"),
        ("triton", "Triton kernels"),
        ("tiktoken", "fast tokenising"),
        ("zstandard", "reading .zst"),
        ("pyarrow", "reading parquet"),
        ("py-spy", "stacks of hung processes from outside"),
    ):
        versions = [found.version for found in metadata.distributions(name=name)]
        yield Finding(name, "ok" if versions else "note", versions[0] if versions else f"not installed: {purpose}")


def _intel_packages() -> Iterator[Finding]:
    """The older packages, where they are installed: they must match torch."""
    for name in ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"):
        for found in metadata.distributions(name=name):
            matches = found.version.split(".")[:2] == torch.__version__.split(".")[:2]
            explained = found.version if matches else (
                f"{found.version} is not for torch {torch.__version__}: it is not used, torch's own xpu and xccl are; "
                "uninstall it, or install the version for this torch"
            )  # fmt: skip
            yield Finding(name, "ok" if matches else "wrong", explained)


def _device() -> Finding:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        device = processes.device()
    if device.type == "cpu":
        name = f"cpu, {os.cpu_count()} cores, {torch.get_num_threads()} threads a process"
    else:
        name = f"{device}: {torch.get_device_module(device).get_device_name(device)}"
    return Finding("device", "note" if caught else "ok", "; ".join([name, *(str(each.message) for each in caught)]))


def _expert_kernels() -> Finding:
    """Which implementation of the experts runs on the device."""
    device = processes.device()
    if device.type == "cpu":
        if compiles(torch.empty(1, dtype=torch.bfloat16)):
            return Finding("experts", "ok", "C++ kernels")
        return Finding("experts", "note", "the slow reference runs: install g++")
    reason = problem(device)
    if reason:
        return Finding("experts", "note", f"the slow reference runs, no Triton kernels: {reason}")
    from optimus_compiler.runtime.kernels.triton.tiles import tuned_file, tuned_tiles

    tuned = (
        f"{len(tuned_tiles())} tuned tiles of {tuned_file()}" if tuned_tiles() else "default tiles; --tune tunes them"
    )
    return Finding("experts", "ok", f"Triton kernels, {tuned}")


def _compute() -> Finding:
    """A product of small integers is exact, and a larger one says how fast it is."""
    device = processes.device()
    if not is_exact(device):
        return Finding(
            "arithmetic", "wrong", "a product of small integers came out differently: do not use this device"
        )
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device)
    for _ in range(2):
        began = time.perf_counter()
        a @ a
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - began
    return Finding(
        "arithmetic", "ok", f"exact; {2 * size**3 / seconds / 1e9:,.0f} GFLOP/s in a product of {size} x {size}, fp32"
    )


def is_exact(device: torch.device) -> bool:
    """Whether a product of small integers comes out right on a device."""
    x = torch.arange(64).view(8, 8)
    return torch.equal((x.float().to(device) @ x.float().to(device)).long().cpu(), x @ x)


def _collectives() -> Iterator[Finding]:
    """Sums over all ranks of the job; in one process, over two that are started here."""
    if processes.world_size() > 1:
        device = processes.start()
        yield measure_all_reduce(device)
        return
    backends = [name for name in ("gloo", "nccl", "xccl", "ccl", "mpi") if dist.is_backend_available(name)]
    yield Finding("backends", "ok", ", ".join(backends))
    yield _two_processes()


def _two_processes() -> Finding:
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with _free_port() as port:
        workers = [context.Process(target=_worker, args=(rank, port, results), daemon=True) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    if any(worker.exitcode for worker in workers):
        return Finding(
            "collectives", "wrong", "two gloo processes on this machine did not sum: check the network of lo"
        )
    finding: Finding = results.get()
    return finding


def _worker(rank: int, port: int, results: torch.multiprocessing.SimpleQueue[Finding]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    finding = measure_all_reduce(torch.device("cpu"))
    if rank == 0:
        results.put(finding)
    dist.destroy_process_group()


@contextmanager
def _free_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def measure_all_reduce(device: torch.device) -> Finding:
    """Whether an all-reduce of MEGABYTES over all ranks sums right, and how fast it is."""
    ranks = dist.get_world_size()
    values = torch.empty(MEGABYTES * 2**18, device=device)
    for _ in range(2):
        values.fill_(dist.get_rank() + 1.0)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(values)
        right = bool((values == ranks * (ranks + 1) / 2).all())
        seconds = time.perf_counter() - began
    what = f"all-reduce over {ranks} {dist.get_backend()} processes"
    if not right:
        return Finding("collectives", "wrong", f"{what} sums wrong")
    rate = 2 * (ranks - 1) / ranks * values.nbytes / seconds / 1e9
    return Finding("collectives", "ok", f"{what}: right, {rate:.1f} GB/s a process ({MEGABYTES} MiB)")


def _file_system(folder: Path) -> Iterator[Finding]:
    """Writing to the disk, renaming, locking, and the clock of whoever keeps the files."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".doctor-{socket.gethostname()}-{os.getpid()}"
    try:
        data = os.urandom(2**20)
        began = time.perf_counter()
        with synced_file(probe) as file:
            for _ in range(MEGABYTES):
                file.write(data)
        seconds = time.perf_counter() - began
        renamed = probe.replace(probe.with_suffix(".renamed"))
        yield Finding(
            "file system", "ok", f"{folder.absolute()}: {MEGABYTES / seconds:,.0f} MiB/s to the disk, with checksums"
        )
        skew = renamed.stat().st_mtime - time.time()
        yield Finding("clock", "ok" if abs(skew) < MAX_SKEW else "wrong", f"{skew:+.2f} s from the file system's")
        probe = renamed
        yield _locks(folder)
    finally:
        probe.unlink(missing_ok=True)


def _locks(folder: Path) -> Finding:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Finding("locks", "ok", "a run is using this folder")
    except OSError as error:
        return Finding("locks", "note", f"none ({error.strerror}): two runs may write to one directory unnoticed")
    finally:
        os.close(handle)
    return Finding("locks", "ok", "two runs cannot write to one directory")
