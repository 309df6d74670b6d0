"""Choosing tiles: what `optimus doctor --tune` times, keeps and later launches use; and the probe."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from optimus_compiler.cli.main import main
from optimus_compiler.runtime import doctor
from optimus_compiler.runtime.kernels.triton import probe, products, tiles, tune
from tests.runtime.kernels.triton.device import DEVICE
from tests.tiny_run import CONFIG

SIZES = (4, 32, 16, 64)  # of the tiny run: 2 x 16 tokens, 2 of 4 experts each


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tiles.tuned_tiles.cache_clear()
    yield
    tiles.tuned_tiles.cache_clear()


def test_the_fastest_tile_is_kept_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The timer is a stand-in for which narrow tiles are fast, and which has no room for three stages."""

    products_run: list[object] = []

    def seconds(run: Any, device: torch.device) -> float | None:
        tile = run.args[0]
        if run.func not in products_run:
            run()
            products_run.append(run.func)
        return None if tile.stages == 3 else float(tile.n)

    monkeypatch.setattr(tune, "_seconds", seconds)
    monkeypatch.setattr(doctor, "_collectives", lambda: iter(()))  # tests/cli/test_doctor.py has them
    (tmp_path / "run.toml").write_text(CONFIG + "sequence_length = 16\n")
    x = torch.empty(64, 32, device=DEVICE)
    before = tiles.default("gate_up", x)
    assert tiles.tile_for("gate_up", x, SIZES) == before
    assert main(["doctor", str(tmp_path), "--tune", str(tmp_path / "run.toml")]) == 0
    after = before._replace(n=before.n // 2)
    assert f"gate_up: {after.n}000.000 ms, by default {before.n}000.000 ms; {after}" in capsys.readouterr().out
    assert len(products_run) == len(tune.PRODUCTS)
    kept = json.loads(tiles.tuned_file().read_text())
    assert len(kept) == len(tune.PRODUCTS)
    assert tiles.tile_for("gate_up", x, SIZES) == after
    assert tiles.tile_for("gate_up", x, (4, 32, 16, 33)) == after  # rows of the same power of two
    assert tiles.tile_for("gate_up", x, (4, 32, 16, 65)) == before
    assert tiles.tile_for("gate_up", x.half(), SIZES) == tiles.default("gate_up", x.half())


def test_a_tile_without_room_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        raise OutOfResources(300_000, 232_448, "shared memory")

    assert tune._seconds(run, DEVICE) is None


def test_a_tile_is_timed() -> None:
    calls: list[int] = []
    spent = tune._seconds(lambda: calls.append(1), torch.device("cpu"))
    assert spent is not None
    assert spent >= 0
    assert len(calls) == 1 + 3 * tune.REPEATS


def test_a_damaged_file_is_named() -> None:
    tiles.tuned_file().parent.mkdir(parents=True)
    tiles.tuned_file().write_text("{")
    with pytest.raises(ValueError, match=r"triton_tiles\.json is not JSON: delete it"):
        tiles.tuned_tiles()


def test_the_probe_runs_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe.problem(DEVICE) is None
    assert probe._failure(DEVICE) is None
    monkeypatch.setattr(products, "multiply", lambda a_RC, *_, **__: a_RC)
    assert probe._failure(DEVICE) == "a small product came out wrong"

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel\nimage")

    monkeypatch.setattr(products, "multiply", fail)
    assert probe._failure(DEVICE) == "a small product failed: no kernel image"
