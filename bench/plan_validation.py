"""What `optimus plan` says of the paper's five runs, and beside the paper's published figures. `make plan-validation`.

Nothing was fitted to the paper: the constants are those of optimus_compiler/hardware/aurora.toml. The paper's
FastSparseMoE speed-ups compare with transformers' block, which the plan does not model.
"""

import time
from pathlib import Path

from bench.tables import RESULTS, keep, show
from optimus_compiler.config import Config, load_config
from optimus_compiler.runtime.plan.deepen import planned_program
from optimus_compiler.runtime.plan.estimate import Plan, estimate
from optimus_compiler.runtime.plan.hardware import load_hardware
from optimus_compiler.runtime.plan.scale import dirichlet, draw, scale

AURORA = load_hardware("aurora")
MULA = ("mula-1b", "mula-7b-a1b", "mula-20b-a2b", "mula-100b-a7b", "mula-220b-a10b")
PAPER_SCALING = {384: "100", 768: "97", 1536: "about 90", 3072: "about 90", 6144: "about 90", 12288: "about 90"}
PAPER_EPSO = {"mula-20b-a2b": ("1.36", "1.19"), "mula-100b-a7b": ("1.23", "1.06"), "mula-220b-a10b": ("1.07", "1.01")}
CONCENTRATION = 20.0  # of tokens over experts, as `optimus plan --scale` assumes


def planned(config: Config) -> Plan:
    """The plan on Aurora."""
    return estimate(planned_program(config), config, AURORA)


def publish(name: str, title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Prints a table and keeps it."""
    show(title, "", columns, rows)
    keep(name, title, f"planned with the constants of {AURORA.name}, nothing measured there", columns, rows)


def mula_layouts() -> None:
    """The paper's layouts on 3,072 tiles of 64 GiB."""
    rows = []
    for name in MULA:
        began = time.perf_counter()
        plan = planned(load_config(name))
        worst = max(plan.memory, key=lambda memory: memory.peak)
        parts = (worst.weights, worst.gradients, worst.optimizer, worst.activations, worst.peak)
        rows.append(
            [
                name,
                f"{plan.mesh.pp} x {plan.mesh.dp} x {plan.mesh.ep}",
                *(f"{part / 2**30:.1f}" for part in parts),
                "yes" if worst.peak <= AURORA.memory.si else "no",
                f"{plan.time.total:.2f}",
                f"{100 * plan.mfu:.1f}",
                f"{time.perf_counter() - began:.0f}",
            ]
        )
    columns = ["run", "pp x dp x ep", "weights", "gradients", "optimizer", "activations", "peak GiB", "fits 64 GiB",
               "step s", "MFU %", "planned in s"]  # fmt: skip
    publish("plan-mula", "The paper's five runs on 3,072 tiles: GiB of the fullest rank", columns, rows)


def scaling() -> None:
    """Mula-220B on 384 to 12,288 tiles, the same batch a tile."""
    config = load_config("mula-220b-a10b")
    points = scale(planned_program(config), config, AURORA, list(PAPER_SCALING), dirichlet(240, CONCENTRATION))
    draw(points, RESULTS / "plan-scale.png")
    rows = []
    for point in points:
        size = point.plan.mesh.size
        predicted, uniform = point.rate / points[0].rate, point.rate_uniform / points[0].rate_uniform
        figures = [f"{point.step:.2f}", f"{100 * predicted:.1f}", f"{100 * uniform:.1f}", PAPER_SCALING[size]]
        rows.append([f"{size:,}", *figures, f"{100 * point.goodput.share:.1f}"])
    columns = ["tiles", "step s", "efficiency %", "under FUR %", "paper %", "goodput %"]
    publish("plan-scale", "Mula-220B, the same batch a tile; efficiency against 384 tiles", columns, rows)


def epso() -> None:
    """Optimizer step and whole step with SO over those with EPSO."""
    rows = []
    for name, (paper_optimizer, paper_step) in PAPER_EPSO.items():
        config = load_config(name)
        so = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"sharding": "so"})})
        a, b = planned(so), planned(config)
        ratios = (a.time.optimizer / b.time.optimizer, a.time.total / b.time.total)
        rows.append([name, f"{ratios[0]:.2f}", paper_optimizer, f"{ratios[1]:.2f}", paper_step])
    columns = ["run", "optimizer, SO / EPSO", "paper", "step, SO / EPSO", "paper"]
    publish("plan-epso", "EPSO against SO on 3,072 tiles", columns, rows)


if __name__ == "__main__":
    Path(RESULTS).mkdir(exist_ok=True)
    mula_layouts()
    scaling()
    epso()
