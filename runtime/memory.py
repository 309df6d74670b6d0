"""What training keeps in memory for the parameters: bytes per bucket, printable as a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BucketMemory:
    """What one bucket occupies on this rank, in bytes, and how many parameters it holds (padding not counted)."""

    name: str
    parameters: int
    shards: int  # ranks that the optimizer state is divided over
    formula: float  # bytes by the rule: 16 a parameter in bf16 or fp32 alike, what is divided counted by its share
    weights: int
    gradients: int
    master: int
    moments: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.master + self.moments


@dataclass(frozen=True)
class MemoryReport:
    """Memory of the model's weights, gradients and optimizer state, counted from the tensors."""

    buckets: tuple[BucketMemory, ...]

    @property
    def parameters(self) -> int:
        return sum(bucket.parameters for bucket in self.buckets)

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return sum(bucket.total for bucket in self.buckets)

    @property
    def formula(self) -> int:
        """Bytes by the paper's rule: 2 weight + 2 gradient + 4 master + 8 moments a parameter in bf16, the state (and
        with zero=2 the gradients) divided by the ranks that share it."""
        return round(sum(bucket.formula for bucket in self.buckets))

    def __str__(self) -> str:
        columns = ("parameters", "shards", "weights", "gradients", "master", "moments", "total")
        rows: list[tuple] = [(b.name, *(getattr(b, column) for column in columns)) for b in self.buckets]
        totals = [sum(row[i] for row in rows) for i in range(1, len(columns) + 1)]
        rows.append(("all", totals[0], max(b.shards for b in self.buckets), *totals[2:]))
        width = max(len(str(row[0])) for row in rows)
        header = "bucket".ljust(width) + "".join(column.rjust(17) for column in columns)
        lines = [str(row[0]).ljust(width) + "".join(f"{value:17,}" for value in row[1:]) for row in rows]
        rule = f"{self.total / self.parameters:.2f} bytes a parameter; the rule gives {self.formula:,} bytes"
        return "\n".join([header, *lines, rule])
