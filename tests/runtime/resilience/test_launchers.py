"""Real launchers start the slots: Open MPI, MPICH, Slurm and torchrun; and a stand-in for PALS."""

import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.resilience.conftest import Launch, Undisturbed, numbers

pytestmark = pytest.mark.slow
FAULT = ("--inject", "step=6,node=1,kind=kill")
SIZES = {"nodes": 2, "spares": 1, "per_node": 2}
DP4 = ("mesh.dp=4", "train.global_batch_size=8")


def mpiexec_only(folder: Path, program: str) -> str:
    """A PATH on which this is mpiexec."""
    return executable(folder, f'#!/bin/sh\nexec {shutil.which(program)} "$@"\n')


def executable(folder: Path, text: str) -> str:
    """A PATH on which mpiexec is this script."""
    folder.mkdir()
    script = folder / "mpiexec"
    script.write_text(text)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return f"{folder}:{os.environ['PATH']}"


def assert_recovers(launch: Launch, undisturbed: Undisturbed, *flags: str, replaced: str = "node1") -> None:
    launch.overrides = DP4
    code, out = launch.wait(*flags, **SIZES)
    assert code == 0, out
    (incident,) = launch.incidents
    assert (incident["kind"], incident["node"], incident["rank"]) == ("hard", replaced, 2)
    assert numbers(launch.metrics) == numbers(undisturbed.metrics(*DP4, nodes=2, per_node=2))


def test_torchrun(launch: Launch, undisturbed: Undisturbed) -> None:
    assert_recovers(launch, undisturbed, *FAULT, "--launcher", "torchrun")


@pytest.mark.skipif(shutil.which("mpiexec.hydra") is None, reason="mpiexec.hydra is not installed")
def test_mpich(launch: Launch, undisturbed: Undisturbed, tmp_path: Path) -> None:
    launch.environment["PATH"] = mpiexec_only(tmp_path / "bin", "mpiexec.hydra")
    assert_recovers(launch, undisturbed, *FAULT, "--launcher", "mpiexec")


@pytest.mark.skipif(shutil.which("mpiexec.openmpi") is None, reason="mpiexec.openmpi is not installed")
def test_open_mpi(launch: Launch, undisturbed: Undisturbed, tmp_path: Path) -> None:
    launch.environment["PATH"] = mpiexec_only(tmp_path / "bin", "mpiexec.openmpi")
    flags = ("--launcher", "mpiexec", "--launcher-args", "--allow-run-as-root --oversubscribe")
    assert_recovers(launch, undisturbed, *FAULT, *flags)


PALS = """\
#!{python}
# A stand-in for PALS' mpiexec: sets its variables and starts killable processes on this machine.
import os, signal, subprocess, sys
if "--version" in sys.argv:
    print("mpiexec version: PALS 1.4.0 (stand-in)")
    raise SystemExit
arguments = sys.argv[1:]
count, host = 1, ""
while arguments and arguments[0].startswith("-"):
    flag = arguments.pop(0)
    if flag == "-n":
        count = int(arguments.pop(0))
    elif flag == "--hosts":
        host = arguments.pop(0)
    elif "=" not in flag:
        raise SystemExit(f"mpiexec: unknown option {{flag}}")
open(os.environ["PALS_LOG"], "a").write(f"{{host}} {{count}}\\n")
processes = []
for rank in range(count):
    own = {{"PALS_RANKID": str(rank), "PMI_RANK": str(rank), "PMI_SIZE": str(count), "PALS_LOCAL_RANKID": str(rank)}}
    processes.append(subprocess.Popen(arguments, env={{**os.environ, **own, "PALS_APID": f"stand-in-{{host}}"}}))
signal.signal(signal.SIGTERM, lambda *_: [process.kill() for process in processes])
raise SystemExit(max(process.wait() for process in processes))
"""


def test_pals(launch: Launch, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """The host list of PBS; names of hosts are the names of nodes."""
    hosts = ["localhost", "127.0.0.1", "127.0.0.2"]
    (tmp_path / "nodes").write_text("".join(f"{host}\n" * 2 for host in hosts))
    launch.environment |= {
        "PATH": executable(tmp_path / "bin", PALS.format(python=sys.executable)),
        "PBS_NODEFILE": str(tmp_path / "nodes"),
        "PALS_LOG": str(tmp_path / "pals.log"),
    }
    flags = ("--launcher", "mpiexec", "--launcher-args", "--cpu-bind=list:0:1")
    fault = ("--inject", "step=6,node=127.0.0.1,kind=kill")
    assert_recovers(launch, undisturbed, *fault, *flags, replaced="127.0.0.1")
    assert (tmp_path / "pals.log").read_text().split() == [word for host in hosts for word in (host, "2")]


SLURM_CONF = """\
ClusterName=ci
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldPort=16817
SelectType=select/cons_tres
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=p Nodes=n[1-3] Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Slurm in one box: three nodes that are this machine; its configuration file."""
    if any(shutil.which(program) is None for program in ("slurmctld", "slurmd", "srun", "munged")) or os.geteuid():
        pytest.skip("Slurm (slurmctld, slurmd, srun, munge) is not installed, or this is not root")
    folder = tmp_path_factory.mktemp("slurm")
    host = os.uname().nodename.split(".")[0]
    nodes = "\n".join(
        f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={17000 + i} CPUs=4 State=UNKNOWN" for i in (1, 2, 3)
    )
    conf = folder / "slurm.conf"
    conf.write_text(SLURM_CONF.format(host=host, folder=folder, nodes=nodes))
    (folder / "state").mkdir()
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge")
    subprocess.run(["pkill", "munged"], check=False)
    subprocess.run(["runuser", "-u", "munge", "--", shutil.which("munged") or ""], check=True)
    subprocess.run(["slurmctld", "-c"], env=environment, check=True)
    for i in (1, 2, 3):
        (folder / f"spool.n{i}").mkdir()
        subprocess.run(["slurmd", "-N", f"n{i}"], env=environment, check=True)
    subprocess.run(
        ["bash", "-c", "for t in $(seq 80); do [ $(sinfo -h -t idle -o %D) = 3 ] && exit; sleep .25; done; exit 1"],
        env=environment,
        check=True,
    )
    yield conf
    for program in ("slurmd", "slurmctld", "munged"):
        subprocess.run(["pkill", "-9", program], check=False)


def test_srun(launch: Launch, undisturbed: Undisturbed, slurm: Path) -> None:
    """In an allocation of three nodes, as a batch script would be."""
    launch.overrides = DP4
    launch.environment["SLURM_CONF"] = str(slurm)
    launch.prefix = ["salloc", "--nodes=3", "--ntasks-per-node=2", "--quiet"]
    flags = ("--inject", "step=6,node=n2,kind=kill", "--launcher", "srun")
    assert_recovers(launch, undisturbed, *flags, replaced="n2")


NAMESPACES = """\
#!/bin/sh
# Starts its command in the network namespace of the host, twice: a node of two ranks behind a link of its own.
[ "$1" = --version ] && echo "mpiexec (namespaces)" && exit
while [ "${1#-}" != "$1" ]; do [ "$1" = -hosts ] && host=$2; shift 2; done
PMI_SIZE=2 PMI_RANK=0 PMI_LOCAL_RANK=0 ip netns exec optimus-${host##*.} "$@" &
PMI_SIZE=2 PMI_RANK=1 PMI_LOCAL_RANK=1 ip netns exec optimus-${host##*.} "$@" &
wait
"""


@pytest.fixture
def links(tmp_path: Path) -> Iterator[list[str]]:
    """Three hosts, 10.78.0.1 to 3, each a namespace behind a link to a bridge."""

    def ip(*arguments: str, check: bool = True) -> None:
        subprocess.run(["ip", *arguments], check=check, capture_output=True)

    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("network namespaces need `ip` and root")
    try:
        ip("link", "add", "optimus-br", "type", "bridge")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    ip("addr", "add", "10.78.0.254/24", "dev", "optimus-br")
    ip("link", "set", "optimus-br", "up")
    for i in ("1", "2", "3"):
        ip("netns", "add", f"optimus-{i}")
        ip("link", "add", f"optimus-v{i}", "type", "veth", "peer", "name", "eth0", "netns", f"optimus-{i}")
        ip("link", "set", f"optimus-v{i}", "master", "optimus-br", "up")
        ip("-n", f"optimus-{i}", "addr", "add", f"10.78.0.{i}/24", "dev", "eth0")
        ip("-n", f"optimus-{i}", "link", "set", "eth0", "up")
        ip("-n", f"optimus-{i}", "link", "set", "lo", "up")
    yield ["10.78.0.1", "10.78.0.2", "10.78.0.3"]
    for i in ("1", "2", "3"):
        ip("netns", "del", f"optimus-{i}", check=False)
    ip("link", "del", "optimus-br", check=False)


def test_a_cut_link_is_noticed_within_seconds(launch: Launch, links: list[str], tmp_path: Path) -> None:
    """gloo itself would wait for 30 minutes."""
    launch.overrides = (*DP4, "train.steps=400", "optimizer.decay_steps=400")
    (tmp_path / "hosts").write_text("\n".join(links))
    launch.environment |= {"PATH": executable(tmp_path / "bin", NAMESPACES), "GLOO_SOCKET_IFNAME": "eth0"}
    process = launch.start("--launcher", "mpiexec", "--hostfile", str(tmp_path / "hosts"), **SIZES)
    launch.reach(5)
    subprocess.run(["ip", "link", "set", "optimus-v2", "down"], check=True)
    cut = time.time()
    deadline = cut + 60
    while not launch.incidents and time.time() < deadline:
        time.sleep(0.1)
    (incident,) = launch.incidents
    assert (incident["node"], incident["action"]) == ("10.78.0.2", "10.78.0.2 replaced by 10.78.0.3")
    assert incident["time"] - cut < 20
    launch.reach(incident["step"] + 2)  # on the spare
    process.terminate()
    assert process.wait(timeout=60) == 0
