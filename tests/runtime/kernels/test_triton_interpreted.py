"""The tests of the Triton kernels where there is no GPU: Triton interprets in a process of its own.

Triton decides between compiling and interpreting when it is imported, and torch imports it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FILES = sorted((Path(__file__).parent / "triton").glob("test_*.py"))
HALVES = {"blocks": FILES[:1], "others": FILES[1:]}  # which take about as long


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the same tests run compiled on this machine's GPU")
@pytest.mark.parametrize("half", HALVES)
def test_interpreted(half: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [str(file) for file in HALVES[half]]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert run.returncode == 0, run.stdout[-20000:] + run.stderr[-5000:]
    assert " passed" in run.stdout
