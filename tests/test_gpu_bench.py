"""bench/gpu.py runs from end to end at tiny sizes, interpreted: GPU time is too dear to find its mistakes with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="on a GPU the benchmark itself can run")
def test_every_part_of_the_gpu_benchmark_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu", "--smoke", "--output", str(tmp_path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert run.returncode == 0, run.stdout + run.stderr
    results = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(results) == {"gpu-peak", "gpu-errors", "gpu-products-16", "gpu-layer", "gpu-block"}
    assert [row[0] for row in results["gpu-layer"]["rows"]] == ["ours", "HF eager", "HF grouped_mm"]
    for kind in ("balanced", "skewed", "FUR"):
        variants = [row[1] for row in results["gpu-block"]["rows"] if row[0] == f"smoke, 16, {kind}"]
        assert variants == ["ours", "HF eager", "HF grouped_mm"]
    assert len(results["gpu-products-16"]["rows"]) == 6
    for row in results["gpu-errors"]["rows"]:
        assert max(map(float, row[1:])) < (1e-2 if "bfloat16" in row[0] else 1e-5)
    left_out = [line for line in run.stdout.splitlines() if line.startswith("left out: ")]
    assert {line.split(":")[1].strip() for line in left_out} <= {"HF sonicmoe", "ScatterMoE", "MegaBlocks"}
