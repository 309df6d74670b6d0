"""Compile time against depth: segments with one key are compiled once, so 16 layers take as long as 2.

Each depth is compiled by Inductor in a process of its own with empty caches: captured, through the passes, lowered, one
training step run. Prints the table; run with `pytest bench/test_compile_depth.py -s`.
"""

import json
import os
import subprocess
import sys
import tempfile

DEPTHS = (2, 8, 16)

CHILD = """
import json, sys, time
import torch
import optimus_compiler as optimus
from optimus_compiler.models import build, from_name

model = build(from_name("olmoe-tiny", num_hidden_layers=int(sys.argv[1])))
start = time.perf_counter()
compiled = optimus.compile(model, sequence_length=128, backend="inductor", seed=0)
captured = time.perf_counter()
ids = torch.randint(0, 50304, (1, 128))
compiled.train_step(ids, ids.clone())
end = time.perf_counter()
nodes = sum(report.seconds for report in compiled.program.history)
print(json.dumps([captured - start - nodes, nodes, end - captured, len(compiled._executor._functions)]))
"""


def measure(layers: int) -> tuple[float, float, float, int]:
    """Seconds to capture, to run the passes, to lower and take the first step; the number of functions compiled."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(layers)], env=environment, capture_output=True, text=True, check=True
        )
    capture, passes, lower, functions = json.loads(done.stdout.splitlines()[-1])
    return capture, passes, lower, functions


def test_compile_time_does_not_grow_with_depth() -> None:
    """Prints the table; what is asserted is the count of functions, not the clock."""
    print(f"\n{'layers':>6}  {'capture s':>9}  {'passes s':>8}  {'Inductor + first step s':>23}  {'functions':>9}")
    for layers in DEPTHS:
        capture, passes, lower, functions = measure(layers)
        print(f"{layers:>6}  {capture:>9.1f}  {passes:>8.1f}  {lower:>23.1f}  {functions:>9}")
        assert functions == 3
