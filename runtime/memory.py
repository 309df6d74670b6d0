"""What training keeps in memory for the parameters: bytes per bucket, printable as a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BucketMemory:
    """What one bucket occupies, in bytes, and how many parameters it holds (padding not counted)."""

    name: str
    parameters: int
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
        """Bytes by the paper's rule for bf16: 2 weight + 2 gradient + 4 master + 8 moments a parameter."""
        return 16 * self.parameters

    def __str__(self) -> str:
        columns = ("parameters", "weights", "gradients", "master", "moments", "total")
        rows = [(b.name, *(getattr(b, column) for column in columns)) for b in self.buckets]
        rows.append(("all", *(sum(row[i] for row in rows) for i in range(1, len(columns) + 1))))
        width = max(len(str(row[0])) for row in rows)
        header = "bucket".ljust(width) + "".join(column.rjust(17) for column in columns)
        lines = [str(row[0]).ljust(width) + "".join(f"{value:17,}" for value in row[1:]) for row in rows]
        rule = f"{self.total / self.parameters:.2f} bytes a parameter; the 16-byte rule gives {self.formula:,} bytes"
        return "\n".join([header, *lines, rule])
