"""Processes: which process of its job this one is, the device it computes on, and the process group it joins."""

import os
import re
import socket
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Literal
from zlib import crc32

import torch
import torch.distributed as dist

Launcher = Literal["torchrun", "mpiexec", "srun", "environment", "none"]

# Rank, number of processes and rank on the node; of several names for one number, those that are set must agree.
_MPIEXEC = (
    ("PALS_RANKID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK"),
)
_ENVIRONMENT = (("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",))
# Processes on this node: where that is all of them, rank 0 is here.
_LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "PALS_LOCAL_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
_SLURM_SPECIAL_STEPS = 0xFFFFFFFA  # from here on a step id means the batch script or a shell of salloc

# Only the device's own backend: gloo beside it would connect every pair of the world's hosts for nothing.
_BACKENDS = {"xpu": "xccl", "cuda": "nccl", "cpu": "gloo"}


@dataclass(frozen=True)
class Launch:
    """One process of a job, as its launcher describes it; a plain process is rank 0 of 1, launcher "none"."""

    rank: int
    world_size: int
    local_rank: int  # rank on its node
    launcher: Launcher


def launch() -> Launch:
    """Reads the launcher's environment; ValueError, in one sentence, where it is half set or contradicts itself.

    Where no rank on the node is given, the global rank stands for it: ranks fill the nodes one after the other.
    """
    # torchrun's own workers look no further: torchrun may have been started once a node by mpiexec or srun, whose
    # variables then number the nodes. RANK and WORLD_SIZE alone may be left over in a shell, so they must agree with
    # mpiexec and srun. mpiexec beats srun: inside a Slurm job it starts its daemons by srun, one a node, and their
    # variables reach the ranks. Slurm counts only in a step: a batch script sees SLURM_NTASKS too, and is one process.
    environment = _read("environment", _ENVIRONMENT)
    if environment and "TORCHELASTIC_RUN_ID" in os.environ:
        return _complete([replace(environment, launcher="torchrun")])
    mpiexec = _read("mpiexec", _MPIEXEC)
    step = _read("srun", _slurm_names()) if _in_slurm_step() else None
    if mpiexec and step and _place(mpiexec) != _place(step):
        step = None
    found = [one for one in (mpiexec, step, environment) if one]
    for one in found[1:]:
        if _place(one) != _place(found[0]):
            raise ValueError(
                f"{found[0].launcher} says rank {found[0].rank} of {found[0].world_size} and {one.launcher} says rank "
                f"{one.rank} of {one.world_size}: unset the variables of the one that did not start this process"
            )
    return _complete(found) if found else Launch(0, 1, 0, "none")


def world_size() -> int:
    """Processes in this job: the process group's size where one exists, else what the launcher says."""
    return dist.get_world_size() if _initialized() else launch().world_size


def device() -> torch.device:
    """The device of this process: its process group's kind where there is one, else an accelerator, else the cpu.

    Before a process group exists, the accelerator with this process's rank on the node is made current.
    """
    if _initialized():
        return _device_of_group()
    _import_intel_extensions()
    return _choose_device(launch())


def start(timeout: timedelta | None = None) -> torch.device:
    """Chooses this process's device, makes it current, then joins the job's process group; returns the device.

    timeout bounds a collective (torch's default otherwise). A process group that exists already is used as it is, so
    that a second call changes nothing; a job of one process gets none. Raises ValueError when the environment
    contradicts itself or does not say where rank 0 runs, RuntimeError when this torch lacks the device's backend.
    """
    chosen = device()
    if _initialized() or (process := launch()).world_size == 1:
        return chosen
    backend = "ccl" if chosen.type == "xpu" and _import_intel_extensions() else _BACKENDS[chosen.type]
    if not (dist.is_available() and dist.is_backend_available(backend)):
        raise RuntimeError(
            f"torch {torch.__version__} has no {backend} backend, which {process.world_size} processes on {chosen} "
            "need: install a torch built with it"
        )
    _export_rendezvous(process)
    dist.init_process_group(backend, timeout=timeout)
    return chosen


def stop() -> None:
    """Leaves the process group, where there is one."""
    if _initialized():
        dist.destroy_process_group()


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _read(launcher: Launcher, names: tuple[tuple[str, ...], ...]) -> Launch | None:
    """What one launcher's variables say; local_rank is -1 where it is not given. None where nothing is set."""
    rank, size, local_rank = (_number(alternatives) for alternatives in names)
    if rank is None and size is None and local_rank is None:
        return None
    if rank is None or size is None:
        given = next(name for alternatives in names for name in alternatives if os.environ.get(name))
        raise ValueError(
            f"{given} is set but {' or '.join(names[0] if rank is None else names[1])} is not: start the processes "
            f"with torchrun, mpiexec or srun, or unset {given}"
        )
    if rank >= size:
        raise ValueError(f"{launcher} says rank {rank} of {size} processes: ranks count from 0")
    return Launch(rank, size, -1 if local_rank is None else local_rank, launcher)


def _number(names: tuple[str, ...]) -> int | None:
    found = {name: os.environ[name] for name in names if os.environ.get(name)}
    for name, value in found.items():
        if not value.isdecimal():
            raise ValueError(f"the environment variable {name}={value!r} is not a number: set or unset it")
    if len({int(value) for value in found.values()}) > 1:
        raise ValueError(f"{' and '.join(f'{name}={value}' for name, value in found.items())} contradict each other: "
                         "unset those of the launcher that did not start this process")  # fmt: skip
    return next((int(value) for value in found.values()), None)


def _place(process: Launch) -> tuple[int, int]:
    return process.rank, process.world_size


def _complete(agreeing: list[Launch]) -> Launch:
    """The first of several that agree, with the first rank on the node that one of them knows, else the global rank."""
    known = [one.local_rank for one in agreeing if one.local_rank >= 0]
    return replace(agreeing[0], local_rank=known[0] if known else agreeing[0].rank)


def _in_slurm_step() -> bool:
    step = os.environ.get("SLURM_STEP_ID") or os.environ.get("SLURM_STEPID") or ""
    return step.isdecimal() and int(step) < _SLURM_SPECIAL_STEPS


def _slurm_names() -> tuple[tuple[str, ...], ...]:
    # salloc's shell may be a step of one task that still sees the job's SLURM_NTASKS: the step's own number is right
    size = "SLURM_STEP_NUM_TASKS" if os.environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    return ("SLURM_PROCID",), (size,), ("SLURM_LOCALID",)


@cache  # imports, and says what does not match, once
def _import_intel_extensions() -> bool:
    """Imports the older Intel packages where they are installed and match torch; True when "ccl" is to be used.

    They must come before the first use of torch.xpu. Versions are compared before any import, since
    intel_extension_for_pytorch raises AttributeError under another torch. Newer stacks have neither: torch.xpu and
    xccl are then torch's own.
    """
    extension = _matching("intel_extension_for_pytorch", ("intel_extension_for_pytorch",))
    bindings = extension and _matching("oneccl_bindings_for_pytorch", ("oneccl_bindings_for_pytorch", "oneccl_bind_pt"))
    if extension:
        import_module("intel_extension_for_pytorch")
    if bindings:
        import_module("oneccl_bindings_for_pytorch")
    return bindings


def _matching(module: str, distributions: tuple[str, ...]) -> bool:
    """Whether the module's distribution, under any of its names, is installed for this torch; warns of another's."""
    versions = [d.version for name in distributions for d in metadata.distributions(name=name)]
    if versions and versions[0].split(".")[:2] != torch.__version__.split(".")[:2]:
        warnings.warn(
            f"{module} {versions[0]} does not match torch {torch.__version__} and is not used: torch's own xpu and "
            "xccl are; uninstall it, or install the version for this torch",
            stacklevel=2,
        )
        return False
    return bool(versions)


def _choose_device(process: Launch) -> torch.device:
    """Makes this process's device current, before anything communicates, and returns it."""
    for kind in ("xpu", "cuda"):
        module = getattr(torch, kind)
        if module.is_available():
            count = module.device_count()
            # a plain process keeps the device that its user chose
            index = module.current_device() if process.launcher == "none" else process.local_rank % count
            if process.local_rank >= count > 1:  # with one visible, the launcher gave each rank its own
                warnings.warn(f"rank {process.rank} shares {kind}:{index} with another rank: {process.local_rank + 1} "
                              f"processes or more run on a node of {count} devices", stacklevel=3)  # fmt: skip
            module.set_device(index)
            return torch.device(kind, index)
    return torch.device("cpu")


def _device_of_group() -> torch.device:
    """The current device of the kind that the existing process group communicates on."""
    backends = dict(item.split(":") for item in dist.get_backend_config().split(","))
    for kind, names in (("xpu", ("xccl", "ccl")), ("cuda", ("nccl",))):
        if backends.get(kind) in names:
            return torch.device(kind, getattr(torch, kind).current_device())
    return torch.device("cpu")


def _export_rendezvous(process: Launch) -> None:
    """Sets what torch's env:// reads and the launcher did not set."""
    os.environ.update(RANK=str(process.rank), WORLD_SIZE=str(process.world_size), LOCAL_RANK=str(process.local_rank))
    if not os.environ.get("MASTER_ADDR"):
        os.environ["MASTER_ADDR"] = _host_of_rank_0(process)
    if not os.environ.get("MASTER_PORT"):
        os.environ["MASTER_PORT"] = str(_port(process))


def _host_of_rank_0(process: Launch) -> str:
    if _number(_LOCAL_SIZE) == process.world_size or (
        process.launcher == "srun" and os.environ.get("SLURM_STEP_NUM_NODES") == "1"
    ):
        return "127.0.0.1"
    node_file = Path(os.environ.get("PBS_NODEFILE", ""))
    if node_file.is_file() and (hosts := node_file.read_text(encoding="utf-8").split()):
        return re.sub(r"\.hostmgmt\d*\.", ".hsn.", hosts[0])  # on Aurora: its fast network's name for the same node
    step = os.environ.get("SLURM_STEP_NODELIST") if process.launcher == "srun" else None
    if nodes := step or os.environ.get("SLURM_JOB_NODELIST"):
        host = re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).split(",")[0]  # the first of nid[001-004,007],login1
        try:
            socket.getaddrinfo(host, None)
        except OSError:  # a node's name need not be a host's: the node that srun ran on is the next best
            return os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or host
        return host
    raise ValueError(
        f"MASTER_ADDR is not set and nothing says where rank 0 of the {process.world_size} processes runs "
        f"(launcher: {process.launcher}): export MASTER_ADDR, the host of rank 0, and MASTER_PORT, a free port there"
    )


def _port(process: Launch) -> int:
    """A port that all ranks of the job find alone, and another job on the node hardly ever."""
    if process.launcher == "srun":
        job = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"
    else:  # the first that is set, since mpiexec passes its own to every rank and the scheduler's perhaps not
        names = ("PALS_APID", "PMIX_NAMESPACE", "PBS_JOBID", "SLURM_JOB_ID")
        job = next((os.environ[name] for name in names if os.environ.get(name)), "")
    return 10000 + crc32(job.encode()) % 20000 if job else 29500  # 29500: torch's own
