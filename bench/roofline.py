"""How many operations and bytes each stage of the SparseMoE block takes, and the least time a device needs for them."""

from typing import NamedTuple


class Stage(NamedTuple):
    """One kernel of the block's forward or backward."""

    name: str
    flops: float
    bytes: float


class Device(NamedTuple):
    """What a device can do at best: operations and bytes a second."""

    name: str
    flops: float
    bytes: float


PVC = Device("PVC tile", 207e12, 1.0e12)  # bf16 GEMM with all 12 tiles of a node busy; triad
H200 = Device("H200", 989e12, 4.8e12)  # dense bf16 and HBM by the data sheet


def stages(
    tokens: int, top_k: int, hidden: int, width: int, experts: int, item: int = 2, sum_item: int = 2
) -> list[Stage]:
    """Each stage reads its operands and writes its result once; item: bytes of an element, sum_item: of a gradient's.

    A row is read where it lies: gathered from x, whose tokens stay in the cache.
    """
    R = tokens * top_k
    xs, rows, widths = tokens * hidden * item, R * hidden * item, R * width * item
    table, gradient = experts * hidden * width * item, 2 * experts * hidden * width * sum_item  # read and written
    product = 2.0 * R * hidden * width
    return [
        Stage("index", 0, 3 * 8 * R + 8 * R),
        Stage("gate, up, SwiGLU", 2 * product, xs + 2 * table + 3 * widths),
        Stage("down", product, widths + table + rows),
        Stage("sum of rows", 0, rows + xs),
        Stage("dy of rows", 0, xs + rows),
        Stage("dh, SwiGLU backward", product, rows + table + 2 * widths + 3 * widths),
        Stage("ddown", product, rows + widths + gradient),
        Stage("dgate, dup", 2 * product, 2 * widths + xs + 2 * gradient),
        Stage("dx of rows", 2 * product, 2 * widths + 2 * table + rows),
        Stage("sum of dx", 0, rows + xs),
    ]


def least_seconds(stage: Stage, device: Device) -> float:
    """Computing and copying overlap: the longer of the two."""
    return max(stage.flops / device.flops, stage.bytes / device.bytes)


def table(tokens: int = 4096, top_k: int = 8, hidden: int = 2048, width: int = 1024, experts: int = 64) -> str:
    """The stages of a layer, OLMoE-7B's by default, in bf16: GFLOP, MB and milliseconds."""
    lines = ["stage                  GFLOP     MB   PVC ms  H200 ms"]
    found = stages(tokens, top_k, hidden, width, experts)
    flops, size = sum(stage.flops for stage in found), sum(stage.bytes for stage in found)
    times = [[1e3 * least_seconds(stage, device) for device in (PVC, H200)] for stage in found]
    totals = [sum(column) for column in zip(*times, strict=True)]
    for (name, *counts), (pvc, h200) in zip([*found, ("all", flops, size)], [*times, totals], strict=True):
        lines.append(f"{name:<20} {counts[0] / 1e9:>7.0f} {counts[1] / 1e6:>6.0f} {pvc:>8.2f} {h200:>8.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
