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
PAPER_FUSED = {"mula-7b-a1b": "1.71", "mula-20b-a2b": "1.35", "mula-100b-a7b": "1.41", "mula-220b-a10b": "1.51"}
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


def scaling() -> list[list[str]]:
    """Mula-220B on 384 to 12,288 tiles, the same batch a tile; the rows for the paper's figures."""
    config = load_config("mula-220b-a10b")
    points = scale(planned_program(config), config, AURORA, list(PAPER_SCALING), dirichlet(240, CONCENTRATION))
    draw(points, RESULTS / "plan-scale.png")
    rows, beside = [], []
    for point in points:
        tiles = f"{point.plan.mesh.size:,}"
        predicted, uniform = point.rate / points[0].rate, point.rate_uniform / points[0].rate_uniform
        shares = [f"{100 * share:.1f}" for share in (predicted, uniform, point.goodput.share)]
        rows.append([tiles, f"{point.step:.2f}", *shares, f"{point.goodput.failures_a_day:.2f}"])
        beside.append([f"efficiency on {tiles} tiles, %", shares[0], PAPER_SCALING[point.plan.mesh.size]])
    columns = ["tiles", "step s", "efficiency %", "under FUR %", "goodput %", "failures a day"]
    publish("plan-scale", "Mula-220B, the same batch a tile; efficiency against 384 tiles", columns, rows)
    return beside[1:]


def epso() -> list[list[str]]:
    """Optimizer step and whole step with SO over those with EPSO."""
    rows = []
    for name, (paper_optimizer, paper_step) in PAPER_EPSO.items():
        config = load_config(name)
        so = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"sharding": "so"})})
        a, b = planned(so), planned(config)
        optimizer, step = a.time.optimizer / b.time.optimizer, a.time.total / b.time.total
        rows.append([f"{name}: optimizer step, SO / EPSO", f"{optimizer:.2f}", paper_optimizer])
        rows.append([f"{name}: whole step, SO / EPSO", f"{step:.2f}", paper_step])
    return rows


def beside_the_paper() -> None:
    """Every published figure in one table."""
    rows = [*scaling(), *epso()]
    rows += [[f"{name}: whole step, HF block / fused", "not modelled", paper] for name, paper in PAPER_FUSED.items()]
    publish("plan-paper", "Planned beside published; fitted: nothing", ["figure", "planned", "paper"], rows)


if __name__ == "__main__":
    Path(RESULTS).mkdir(exist_ok=True)
    mula_layouts()
    beside_the_paper()
