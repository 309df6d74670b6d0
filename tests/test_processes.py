"""Processes: what each launcher's variables say, the order of device and process group, older Intel packages."""

import os
import shutil
import socket
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from optimus_compiler import processes
from optimus_compiler.processes import Launch, launch, start, stop, world_size

LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "TORCHELASTIC_",
    "PMI",
    "PALS_",
    "PBS_",
    "MPI_",
    "OMPI_",
    "SLURM",
)

SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
PALS = {"PALS_RANKID": "13", "PALS_LOCAL_RANKID": "1", "PMI_RANK": "13", "PMI_SIZE": "24", "PMI_LOCAL_RANK": "1"}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
BY_HAND = {"RANK": "3", "WORLD_SIZE": "4"}


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """No launcher's variable from outside; what start() exports is taken back."""
    saved = dict(os.environ)
    for name in saved:
        if name.startswith(LAUNCHERS):
            del os.environ[name]
    processes._import_intel_extensions.cache_clear()
    yield
    processes._import_intel_extensions.cache_clear()
    os.environ.clear()
    os.environ.update(saved)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Launch(0, 1, 0, "none")),
        (TORCHRUN, Launch(5, 8, 1, "torchrun")),
        (PALS, Launch(13, 24, 1, "mpiexec")),
        ({"PALS_RANKID": "13", "PALS_LOCAL_RANKID": "1", "PMI_SIZE": "24"}, Launch(13, 24, 1, "mpiexec")),
        (HYDRA, Launch(3, 4, 1, "mpiexec")),
        (OPEN_MPI, Launch(2, 4, 0, "mpiexec")),
        (SRUN, Launch(5, 8, 1, "srun")),
        (BY_HAND | {"LOCAL_RANK": "0"}, Launch(3, 4, 0, "environment")),
        (BY_HAND, Launch(3, 4, 3, "environment")),
        # torchrun, started once a node by srun or mpiexec
        (TORCHRUN | SRUN | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, Launch(5, 8, 1, "torchrun")),
        (TORCHRUN | PALS, Launch(5, 8, 1, "torchrun")),
        # mpiexec in a Slurm job, its daemons started by srun, one a node
        (HYDRA | SRUN | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, Launch(3, 4, 1, "mpiexec")),
        # srun --mpi=pmi2, and a wrapper that copies mpiexec's numbers: both agree, one knows the rank on the node
        (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"}, Launch(5, 8, 1, "mpiexec")),
        (HYDRA | BY_HAND, Launch(3, 4, 1, "mpiexec")),
        # not a step: a batch script, a shell of salloc (a special step, and one that keeps the job's SLURM_NTASKS)
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}, Launch(0, 1, 0, "none")),
        (SRUN | {"SLURM_STEP_ID": "4294967290"}, Launch(0, 1, 0, "none")),
        (SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}, Launch(0, 1, 0, "srun")),
        ({"RANK": "", "WORLD_SIZE": ""}, Launch(0, 1, 0, "none")),
    ],
)
def test_launch_reads_every_launcher(variables: dict[str, str], expected: Launch) -> None:
    os.environ.update(variables)
    assert launch() == expected
    assert world_size() == expected.world_size


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"WORLD_SIZE": "4"},
            r"^WORLD_SIZE is set but RANK is not: start the processes with torchrun, mpiexec or srun",
        ),
        ({"RANK": "0"}, "^RANK is set but WORLD_SIZE is not"),
        ({"LOCAL_RANK": "0"}, "^LOCAL_RANK is set but RANK is not"),
        ({"PALS_RANKID": "1"}, "^PALS_RANKID is set but PMI_SIZE or OMPI_COMM_WORLD_SIZE is not"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is set but PALS_RANKID or PMI_RANK or OMPI_COMM_WORLD_R"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, "^SLURM_PROCID is set but SLURM_NTASKS is not"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "^the environment variable RANK='one' is not a number"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "^environment says rank 4 of 4 processes: ranks count from 0"),
        (PALS | {"PMI_RANK": "12"}, "^PALS_RANKID=13 and PMI_RANK=12 contradict each other"),
        (BY_HAND | PALS, "^mpiexec says rank 13 of 24 and environment says rank 3 of 4: unset the variables"),
        (BY_HAND | SRUN, "^srun says rank 5 of 8 and environment says rank 3 of 4"),
    ],
)
def test_half_set_and_contradictory_variables_are_refused(variables: dict[str, str], message: str) -> None:
    os.environ.update(variables)
    with pytest.raises(ValueError, match=message) as error:
        launch()
    assert str(error.value).count("\n") == 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What start() does, in order; no process group is made."""
    calls: list[str] = []

    def init(backend: str, timeout: timedelta | None = None) -> None:
        calls.append(f"process group {backend} {timeout}")

    monkeypatch.setattr(dist, "init_process_group", init)
    return calls


def use_device(monkeypatch: pytest.MonkeyPatch, calls: list[str], kind: str, count: int) -> None:
    """Stands in for the device functions of torch.cuda or torch.xpu."""
    module = getattr(torch, kind)

    def available() -> bool:
        calls.append(f"{kind}?")
        return True

    monkeypatch.setattr(module, "is_available", available)
    monkeypatch.setattr(module, "device_count", lambda: count)
    monkeypatch.setattr(module, "current_device", lambda: 1)
    monkeypatch.setattr(module, "set_device", lambda index: calls.append(f"{kind}:{index}"))
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: backend in ("nccl", "xccl", "ccl"))


def test_one_process_gets_its_device_and_no_group(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert start() == torch.device("cpu")
    assert calls == []
    use_device(monkeypatch, calls, "cuda", 4)
    assert start() == torch.device("cuda", 1)  # its user's choice stays
    assert calls == ["cuda?", "cuda:1"]


@pytest.mark.parametrize(("kind", "backend"), [("cuda", "nccl"), ("xpu", "xccl")])
def test_the_device_is_set_before_the_process_group(
    kind: str, backend: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_device(monkeypatch, calls, kind, 12)
    os.environ.update(PALS | {"PALS_LOCAL_RANKID": "7", "PMI_LOCAL_RANK": "7", "MASTER_ADDR": "head"})
    assert start(timedelta(seconds=5)) == torch.device(kind, 7)
    assert calls == [f"{kind}?", f"{kind}:7", f"process group {backend} 0:00:05"]


def test_devices_are_taken_modulo_the_visible_ones(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ.update(PALS | {"MASTER_ADDR": "head"})
    use_device(monkeypatch, calls, "xpu", 1)  # a tile a rank, by ZE_AFFINITY_MASK
    with warnings.catch_warnings(action="error"):
        assert start() == torch.device("xpu", 0)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 12)
    os.environ.update(PALS_LOCAL_RANKID="14", PMI_LOCAL_RANK="14")
    with pytest.warns(UserWarning, match="rank 13 shares xpu:2 with another rank: 15 processes or more run on a node"):
        assert start() == torch.device("xpu", 2)


def test_a_torch_without_the_backend_is_refused(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    use_device(monkeypatch, calls, "xpu", 12)
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: backend == "gloo")
    os.environ.update(PALS | {"MASTER_ADDR": "head"})
    with pytest.raises(RuntimeError, match="has no xccl backend, which 24 processes on xpu:1 need"):
        start()
    assert calls == ["xpu?", "xpu:1"]


def rendezvous(variables: dict[str, str]) -> tuple[str, str]:
    """MASTER_ADDR and MASTER_PORT after start() under these variables."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    start()
    return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]


def test_ranks_are_exported_for_env(calls: list[str]) -> None:
    assert rendezvous(OPEN_MPI | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}) == ("10.0.0.1", "1234")
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["2", "4", "0"]
    assert launch() == Launch(2, 4, 0, "mpiexec")  # still
    assert calls == ["process group gloo None"]


def test_the_host_of_rank_0_from_pbs(calls: list[str], tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("x4407c6s2b0n0.hostmgmt2407.cm.aurora.alcf.anl.gov\nother\n")
    address, port = rendezvous(PALS | {"PBS_NODEFILE": str(nodes), "PBS_JOBID": "1.aurora", "PALS_APID": "a"})
    assert address == "x4407c6s2b0n0.hsn.cm.aurora.alcf.anl.gov"
    assert 10000 <= int(port) < 30000
    nodes.write_text("first\nsecond\n")
    assert rendezvous({"PALS_RANKID": "0", "PMI_RANK": "0"}) == ("first", port)  # another rank, the same port
    assert rendezvous({"PALS_APID": "b"})[1] != port  # another mpiexec of the same job


def test_the_host_of_rank_0_from_slurm(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    step = SRUN | {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[0-9]", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: [])
    address, port = rendezvous(step | {"SLURM_STEP_NODELIST": "rack0n[001-003,007],b1"})
    assert address == "rack0n001"
    assert rendezvous({"SLURM_STEP_NODELIST": "b1,c[4-5]", "SLURM_STEP_ID": "1"})[0] == "b1"
    assert os.environ["MASTER_PORT"] != port

    def unknown(host: str, port: None) -> None:
        raise socket.gaierror(host)

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert rendezvous({})[0] == "10.0.0.9"
    assert rendezvous({"SLURM_STEP_NUM_NODES": "1"})[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "variables",
    [
        HYDRA | {"MPI_LOCALNRANKS": "4"},
        OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
        BY_HAND | {"LOCAL_WORLD_SIZE": "4"},
    ],
)
def test_on_one_node_rank_0_is_here(variables: dict[str, str], calls: list[str]) -> None:
    assert rendezvous(variables) == ("127.0.0.1", "29500")


@pytest.mark.parametrize("variables", [BY_HAND, HYDRA | {"MPI_LOCALNRANKS": "2"}])
def test_an_unknown_host_of_rank_0_is_refused(variables: dict[str, str], calls: list[str]) -> None:
    with pytest.raises(ValueError, match=r"nothing says where rank 0 of the 4 processes runs .*: export MASTER_ADDR"):
        rendezvous(variables)
    assert calls == []


def test_an_existing_process_group_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ.update(TORCHRUN)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        use_device(monkeypatch, [], "cuda", 4)
        assert (start(), world_size()) == (torch.device("cpu"), 1)
        monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
        assert start() == torch.device("cuda", 1)
        monkeypatch.setattr(torch.xpu, "current_device", lambda: 3)
        monkeypatch.setattr(dist, "get_backend_config", lambda: "xpu:ccl")
        assert start() == torch.device("xpu", 3)
    finally:
        stop()
    assert not dist.is_initialized()
    stop()  # nothing to leave


MATCHING = ".".join(torch.__version__.split(".")[:2]) + ".10+xpu"
Install = Callable[[str, str, str], None]


@pytest.fixture
def install(calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a stand-in package: a module that records its import, and raises as the real one does on a mismatch."""
    recorder = types.ModuleType("standin")
    recorder.calls = calls  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "standin", recorder)
    monkeypatch.syspath_prepend(tmp_path)
    modules = []

    def install(module: str, distribution: str, version: str) -> None:
        fails = "" if version == MATCHING else "\nraise AttributeError('made for another torch')"
        (tmp_path / f"{module}.py").write_text(f"import standin\nstandin.calls.append({module!r}){fails}\n")
        folder = tmp_path / f"{distribution}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        modules.append(module)

    yield install
    for module in modules:
        sys.modules.pop(module, None)


@pytest.fixture
def xpu_job(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    use_device(monkeypatch, calls, "xpu", 12)
    os.environ.update(PALS | {"MASTER_ADDR": "head"})


@pytest.mark.usefixtures("xpu_job")
@pytest.mark.parametrize("distribution", ["oneccl_bind_pt", "oneccl_bindings_for_pytorch"])
def test_matching_intel_packages_come_first(distribution: str, install: Install, calls: list[str]) -> None:
    install("oneccl_bindings_for_pytorch", distribution, MATCHING)
    install("intel_extension_for_pytorch", "intel_extension_for_pytorch", MATCHING)
    assert start() == torch.device("xpu", 1)
    assert calls == [
        "intel_extension_for_pytorch", "oneccl_bindings_for_pytorch", "xpu?", "xpu:1", "process group ccl None",
    ]  # fmt: skip


@pytest.mark.usefixtures("xpu_job")
def test_the_extension_alone_uses_torchs_own_backend(install: Install, calls: list[str]) -> None:
    install("intel_extension_for_pytorch", "intel_extension_for_pytorch", MATCHING)
    start()
    assert calls == ["intel_extension_for_pytorch", "xpu?", "xpu:1", "process group xccl None"]


@pytest.mark.usefixtures("xpu_job")
@pytest.mark.parametrize("version", ["2.8.10+xpu", "1.13"])
def test_a_mismatch_is_said_once_and_never_imported(version: str, install: Install, calls: list[str]) -> None:
    install("intel_extension_for_pytorch", "intel_extension_for_pytorch", version)
    install("oneccl_bindings_for_pytorch", "oneccl_bind_pt", MATCHING)
    with pytest.warns(UserWarning, match="intel_extension_for_pytorch .* does not match torch .* and is not used"):
        start()
    assert calls == ["xpu?", "xpu:1", "process group xccl None"]
    with warnings.catch_warnings(action="error"):
        start()


@pytest.mark.usefixtures("xpu_job")
def test_mismatched_bindings_leave_the_extension(install: Install, calls: list[str]) -> None:
    install("intel_extension_for_pytorch", "intel_extension_for_pytorch", MATCHING)
    install("oneccl_bindings_for_pytorch", "oneccl_bind_pt", "2.8.0+xpu")
    with pytest.warns(UserWarning, match=r"oneccl_bindings_for_pytorch 2.8.0\+xpu does not match torch"):
        start()
    assert calls == ["intel_extension_for_pytorch", "xpu?", "xpu:1", "process group xccl None"]


RANKS = """
import torch, torch.distributed as dist
from optimus_compiler.processes import launch, start, stop
start()
total = torch.tensor(float(dist.get_rank()))
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} under {launch().launcher}: {total.item():g}\\n", end="")
stop()
"""


@pytest.mark.parametrize(
    "command",
    [
        "mpiexec.hydra -n 2",
        "mpiexec.openmpi --allow-run-as-root --oversubscribe -n 2",
        "srun -n 2",
    ],
)
def test_real_launchers(command: str) -> None:
    name, *options = command.split()
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    if name == "srun" and subprocess.run(["scontrol", "ping"], capture_output=True).returncode:
        pytest.skip("no Slurm controller answers")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])  # torch's own may be in use by another test
    done = subprocess.run(
        [name, *options, sys.executable, "-c", RANKS],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": port},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    launcher = "srun" if name == "srun" else "mpiexec"
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2 under {launcher}: 1" for rank in range(2)]
