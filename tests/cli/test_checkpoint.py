"""`optimus checkpoint verify`, `optimus export` and the flags of `optimus pretrain` that continue a run."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.conftest import Run


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps, with checkpoints of each second step and weights alone of the third."""
    from optimus_compiler.cli.main import main

    run = tmp_path_factory.mktemp("finished") / "run"
    settings = [f"data.path={tiny / 'data'}", "checkpoint.every=2", "checkpoint.persistent_every=3"]
    assert main(["pretrain", str(tiny / "tiny.toml"), "--output", str(run), *flags(settings)]) == 0
    return run


def flags(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "run")


def test_verify_lists_every_checkpoint(optimus: Run, run: Path) -> None:
    code, out, err = optimus("checkpoint", "verify", run)
    assert (code, err) == (0, "")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    assert [(row[0], row[1], row[2], row[-1]) for row in rows] == [
        ("step-4", "4", "full", "whole"),
        ("step-2", "2", "full", "whole"),
        ("model-4", "4", "model", "whole"),
        ("model-3", "3", "model", "whole"),
    ]


def test_verify_names_what_is_damaged(optimus: Run, run: Path) -> None:
    file = run / "checkpoints" / "step-4" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    (run / "checkpoints" / "model-3" / "manifest.json").write_text("{}")
    (run / "checkpoints" / ".step-6.partial").mkdir()
    code, out, err = optimus("checkpoint", "verify", run)
    assert code == 2
    assert err == f"optimus: error: {run}: damaged checkpoints: 2 of 4: delete or restore them\n"
    assert f"{run}/checkpoints/step-4 is damaged: __0_0.distcp has" in out
    assert f"{run}/checkpoints/model-3/manifest.json: " in out
    assert "half-written, never loaded" in out


def test_verify_one_checkpoint(optimus: Run, run: Path) -> None:
    assert optimus("checkpoint", "verify", run / "checkpoints" / "step-2")[0] == 0
    (run / "checkpoints" / "step-2" / ".metadata").unlink()
    code, out, _ = optimus("checkpoint", "verify", run / "checkpoints" / "step-2")
    assert code == 2
    assert ".metadata is missing" in out


def test_verify_of_no_run(optimus: Run, tmp_path: Path) -> None:
    code, _, err = optimus("checkpoint", "verify", tmp_path)
    assert code == 2
    assert err == f"optimus: error: {tmp_path} is not a checkpoint: it has no manifest.json\n"


def test_export_takes_a_checkpoint_or_the_newest_of_a_run(optimus: Run, run: Path, tmp_path: Path, tiny: Path) -> None:
    code, out, err = optimus("export", run, tmp_path / "newest")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"{tmp_path}/newest: {run}/checkpoints/step-4 as a Hugging Face folder"
    assert optimus("export", run / "checkpoints" / "model-4", tmp_path / "model", "--max-file-size", "50KB")[0] == 0
    newest = load_file(tmp_path / "newest" / "model.safetensors")
    for file in (tmp_path / "model").glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert tensor.equal(newest.pop(name))
    assert not newest
    assert (tmp_path / "newest" / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
    config = json.loads((tmp_path / "newest" / "config.json").read_text())
    assert (config["architectures"], config["torch_dtype"]) == (["OlmoeForCausalLM"], "float32")


def test_export_says_what_is_wrong(optimus: Run, run: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for arguments, sentence in (
        ((tmp_path, tmp_path / "out"), "is not a checkpoint: it has no manifest.json"),
        ((run, tmp_path / "full"), "full exists and is not empty: name another folder"),
        ((run, tmp_path / "out", "--max-file-size", "5 parsecs"), "--max-file-size '5 parsecs' is no size"),
        ((run, tmp_path / "out", "--tokenizer", tmp_path / "nowhere"), "nowhere does not exist: name a tokenizer.json"),
    ):
        code, _, err = optimus("export", *arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert sentence in err
    file = run / "checkpoints" / "step-4" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[::-1])
    code, _, err = optimus("export", run / "checkpoints" / "step-4", tmp_path / "out")
    assert code == 2
    assert "step-4 is damaged: __0_0.distcp is not what was written" in err
    assert not (tmp_path / "out").exists()
    code, out, _ = optimus("export", run, tmp_path / "out")  # of a run: the newest whole one
    assert code == 0
    assert "step-4 is damaged and skipped" in out


def test_pretrain_continues_and_stops_at_the_end(optimus: Run, run: Path, tiny: Path) -> None:
    def pretrain(*arguments: str) -> tuple[int, str, str]:
        settings = flags([f"data.path={tiny / 'data'}", "checkpoint.every=2"])
        return optimus("pretrain", tiny / "tiny.toml", "--output", run, *settings, *arguments)

    code, out, _ = pretrain()
    assert code == 0
    assert out.splitlines() == [
        f"continuing after step 4 from {run}/checkpoints/step-4",
        f"{run}: all 4 steps are done: raise train.steps to go on",
    ]
    code, out, _ = pretrain("--set", "train.steps=6")
    assert code == 0
    assert out.splitlines()[-1] == f"{run}: 6 steps done; curves: optimus plot {run}"
    code, _, err = pretrain("--set", "train.steps=8", "--set", "optimizer.lr=1e-3")
    assert code == 2
    assert "optimizer.lr (was 0.0004, now 0.001): set them back, or pass --allow-changed optimizer.lr" in err
    lr = ("--set", "train.steps=8", "--set", "optimizer.lr=1e-3", "--allow-changed", "optimizer.lr")
    code, out, _ = pretrain(*lr, "--from", "model-3")
    assert code == 0
    assert "step-6 is set aside as" in out
    assert "moments start from zero" in out
