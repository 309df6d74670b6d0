"""A job script for PBS: what it says, and that a batch system's stand-in runs it to the end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from optimus_compiler.runtime.resilience.hosts import HostsError, Node, address_for, find_nodes
from optimus_compiler.runtime.resilience.job import JobError, load_profile, pbs_script
from tests.cli.conftest import Run, optimus  # noqa: F401  a fixture
from tests.runtime.resilience.conftest import Launch
from tests.runtime.resilience.test_launchers import PALS, executable


def script(nodes: int = 66, walltime: str = "6:00:00", queue: str | None = None, profile: str = "aurora") -> str:
    arguments = ["launch", "run.toml", "--output", "my run"]
    return pbs_script(
        load_profile(profile), arguments, name="r", nodes=nodes, project="MINE", walltime=walltime, queue=queue
    )


def test_a_job_on_aurora() -> None:
    text = script(nodes=258)
    for line in (
        "#PBS -A MINE", "#PBS -q prod", "#PBS -l select=258", "#PBS -l walltime=6:00:00", "#PBS -l filesystems=flare",
        "#PBS -l place=scatter", "module load frameworks", "export TMPDIR=/tmp", "export CCL_PROCESS_LAUNCHER=pmix",
        "export FI_MR_CACHE_MONITOR=userfaultfd",
        "timeout --signal=TERM 21000 optimus launch run.toml --output 'my run'",
    ):  # fmt: skip
        assert line in text.splitlines()
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("nodes", "walltime", "queue"),
    [
        (2, "1:00:00", "debug"),
        (16, "1:00:00", "debug-scaling"),
        (16, "24:00:00", "capacity"),
        (400, "12:00:00", "prod"),
    ],
)
def test_the_queue_that_takes_the_job(nodes: int, walltime: str, queue: str) -> None:
    assert f"#PBS -q {queue}\n" in script(nodes, walltime)
    assert "#PBS -q mine\n" in script(nodes, walltime, "mine")


def test_jobs_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"no queue takes 100 nodes for 12 h \(debug: 1 to 2 nodes, 1 h; "):
        script(100, "12:00:00")
    with pytest.raises(JobError, match=r"--walltime '1h': write HH:MM:SS"):
        script(2, "1h")
    with pytest.raises(JobError, match=r"--walltime 0:10:00 leaves nothing beside the 10 minutes"):
        script(2, "0:10:00")
    with pytest.raises(JobError, match=r"nowhere is neither a file nor a profile .*: aurora"):
        load_profile("nowhere")
    (tmp_path / "mine.toml").write_text('procs_per_node = 4\nlauncher = "mpiexec"\nqueue = 1\n')
    with pytest.raises(JobError, match=r"mine.toml: queues: Field required"):
        load_profile(str(tmp_path / "mine.toml"))


def test_the_command_writes_it(optimus: Run, tmp_path: Path) -> None:  # noqa: F811
    arguments = ("launch", "mula-1b", "--output", tmp_path / "run", "--nodes", 2, "--write-job", "pbs")
    code, _, err = optimus(*arguments)
    assert code == 2
    assert "name the project" in err
    assert not (tmp_path / "run").exists()
    code, out, _ = optimus(*arguments, "--project", "MINE", "--set", "train.steps=10")
    assert code == 0
    assert "submit it with qsub" in out
    text = (tmp_path / "run" / "job.sh").read_text()
    assert "--nodes 2 --spares 0 --procs-per-node 12 --launcher mpiexec --launcher-args=--cpu-bind=list:4-7:" in text
    assert "--set train.steps=10" in text


QSUB = """\
#!{python}
# A stand-in for qsub: runs the script at once, on hosts that are all this machine.
import os, re, subprocess, sys
text = open(sys.argv[1]).read()
count = int(re.search(r"#PBS -l select=([0-9]+)", text)[1])
assert "#PBS -A " in text
hosts = ["localhost", "127.0.0.1", "127.0.0.2"][:count]
open("nodes", "w").write("".join(f"{{host}}\\n" for host in hosts))
job = {{"PBS_NODEFILE": os.path.abspath("nodes"), "PBS_O_WORKDIR": os.getcwd(), "PBS_JOBID": "1.here"}}
raise SystemExit(subprocess.run(["bash", sys.argv[1]], env={{**os.environ, **job}}).returncode)
"""

PROFILE = """\
procs_per_node = 2
launcher = "mpiexec"
launcher_args = "--cpu-bind=list:0:1"
save_minutes = 1
queues = [{name = "here", max_nodes = 3, max_hours = 1}]
environment = {OMP_NUM_THREADS = "1"}
"""


@pytest.mark.slow
def test_a_batch_system_runs_it(launch: Launch, tmp_path: Path, optimus: Run) -> None:  # noqa: F811
    """A node dies in the job, a spare takes over, and the job ends well."""
    (tmp_path / "site.toml").write_text(PROFILE)
    settings = [f"data.path={launch.tiny / 'data'}", "checkpoint.every=4", "train.steps=8", "mesh.dp=4"]
    settings += ["train.global_batch_size=4", "train.micro_batch_size=1"]
    overrides = [word for setting in settings for word in ("--set", setting)]
    sizes = ("--nodes", 2, "--spares", 1, "--inject", "step=6,node=127.0.0.1,kind=kill")
    site = ("--write-job", "pbs", "--job-profile", tmp_path / "site.toml", "--project", "MINE", "--walltime", "0:10:00")
    code, _, err = optimus("launch", launch.tiny / "tiny.toml", "--output", launch.run, *sizes, *site, *overrides)
    assert code == 0, err
    path = executable(tmp_path / "bin", PALS.format(python=sys.executable))
    qsub = tmp_path / "bin" / "qsub"
    qsub.write_text(QSUB.format(python=sys.executable))
    qsub.chmod(0o755)
    path = f"{path}:{Path(sys.executable).parent}"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{path}",
        "PALS_LOG": str(tmp_path / "pals.log"),
    }
    job = subprocess.run(
        ["qsub", str(launch.run / "job.sh")], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert launch.told == [("hard", "127.0.0.1", "127.0.0.1 replaced by 127.0.0.2")]
    assert launch.metrics[-1].step == 8
    assert launch.left_over() == []


def test_hosts(tmp_path: Path) -> None:
    assert find_nodes(2, environment={}) == [Node("node0", "localhost"), Node("node1", "localhost")]
    (tmp_path / "hosts").write_text("# mine\na slots=2\n\nb\na\nc\n")
    assert [node.name for node in find_nodes(2, tmp_path / "hosts")] == ["a", "b"]
    assert find_nodes(3, environment={"PBS_NODEFILE": str(tmp_path / "hosts")})[2] == Node("c", "c")
    with pytest.raises(HostsError, match=r"hosts has 3 hosts and --nodes and --spares ask for 4"):
        find_nodes(4, tmp_path / "hosts")
    with pytest.raises(HostsError, match="cannot be read"):
        find_nodes(1, tmp_path / "nowhere")
    assert address_for([Node("a", "localhost")]) == "127.0.0.1"
    assert address_for([Node("a", "127.0.0.2")]).startswith("127.")
