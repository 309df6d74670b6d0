"""`optimus plan` on a small model."""

from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.tiny_run import CONFIG


@pytest.fixture
def run_toml(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    text = CONFIG.replace("global_batch_size = 4\n", "sequence_length = 16\n")
    file.write_text(text + "\n[mesh]\npp = 2\ndp = 2\nep = 2\n")
    return file


def test_plan_prints_memory_traffic_and_time(optimus: Run, run_toml: Path) -> None:
    code, out, err = optimus("plan", run_toml, "--world-size", 16, "--hardware", "h200")
    assert (code, err) == (0, "")
    for words in (
        "pp=2 x dp=4 x ep=2",
        "all_gather",
        "reduce_scatter",
        "pipeline bubble",
        "tokens/s",
        "MFU",
        "131 GiB",
    ):
        assert words in out


def test_plan_of_what_does_not_fit_ends_with_2(optimus: Run, run_toml: Path, tmp_path: Path) -> None:
    bundle = Path(__file__).parents[2] / "optimus_compiler" / "hardware" / "aurora.toml"
    (tmp_path / "small.toml").write_text(bundle.read_text().replace("value = 64,", "value = 0.0001,"))
    code, out, err = optimus("plan", run_toml, "--hardware", tmp_path / "small.toml")
    assert code == 2
    assert "of 0.0001 GiB for weights, gradients and optimizer state" in err
    assert "computing" in out


def test_plan_scale_draws_a_curve(optimus: Run, run_toml: Path, tmp_path: Path) -> None:
    code, out, err = optimus("plan", run_toml, "--scale", "8,16,32", "--png", tmp_path / "curve.png")
    assert (code, err) == (0, "")
    assert "pp=2 x dp x ep=2" in out
    assert "100.0%" in out
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    code, _, err = optimus("plan", run_toml, "--scale", "8;16")
    assert code == 2
    assert "--scale 8;16 is no list of numbers" in err
