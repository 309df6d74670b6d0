"""`optimus doctor` and `optimus status`."""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from optimus_compiler.cli.main import main
from optimus_compiler.runtime import doctor
from optimus_compiler.runtime.resilience.incidents import Incident, record
from tests.cli.conftest import Run


def test_doctor_checks_this_machine(optimus: Run, tmp_path: Path) -> None:
    code, out, err = optimus("doctor", tmp_path)
    assert (code, err) == (0, "")
    for what in ("versions", "device", "arithmetic", "backends", "collectives", "file system", "clock", "locks"):
        assert what in out
    assert torch.__version__ in out
    assert "wrong" not in out
    assert list(tmp_path.iterdir()) == []


def test_doctor_explains_what_does_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        version = "2.8.10"

    def distributions(name: str) -> list[Any]:
        return [Old()] if name == "intel_extension_for_pytorch" else []

    monkeypatch.setattr(metadata, "distributions", distributions)
    (finding,) = doctor._intel_packages()
    assert finding.state == "wrong"
    assert f"2.8.10 is not for torch {torch.__version__}" in finding.detail


def test_doctor_fails_where_something_is_wrong(optimus: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MAX_SKEW", -1.0)
    monkeypatch.setattr(doctor, "_collectives", lambda: iter(()))
    code, out, _ = optimus("doctor", tmp_path)
    assert code == 1
    assert "wrong" in out


def test_status_of_a_run(optimus: Run, tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ["--set", f"data.path={tiny / 'data'}", "--set", "checkpoint.every=2"]
    assert main(["pretrain", str(tiny / "tiny.toml"), "--output", str(run), *settings]) == 0
    optimus("plot", run)
    record(run, Incident("hang", "node1", 2, 3, ["rank 2 is stopped"], "node1 replaced by node2"))
    state = {"state": "training", "attempt": 1, "nodes": ["node0", "node2"], "spares": [], "bad": {"node1": "hung"}}
    (run / "supervisor.json").write_text(json.dumps(state))
    code, out, _ = optimus("status", run)
    assert code == 0
    for words in ("4 of 4", "done", "step-4, step-2", "training, attempt 2", "node0, node2", "node1 (hung)", "hang"):
        assert words in out
    code, _, err = optimus("status", tmp_path)
    assert code == 2
    assert "is not a run directory" in err
