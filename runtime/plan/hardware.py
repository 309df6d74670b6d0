"""A machine as planning sees it: constants of a device and of its links, each with the source it comes from."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from optimus_compiler.bundled import load_toml

UNITS = {
    "GiB": 2**30,
    "TFLOP/s": 1e12,
    "TB/s": 1e12,
    "GB/s": 1e9,
    "us": 1e-6,
    "s": 1.0,
    "h": 3600.0,
    "W": 1.0,
    "of matmul": 1.0,
    "of the traffic": 1.0,
    "of a step": 1.0,
}


class Constant(BaseModel):
    """A number with its unit and its source."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: Annotated[float, Field(gt=0)]
    unit: str
    source: Annotated[str, Field(min_length=1)]

    @field_validator("unit")
    @classmethod
    def _is_known(cls, unit: str) -> str:
        if unit not in UNITS:
            raise ValueError(f"{unit!r} is no unit here: choose one of {', '.join(UNITS)}")
        return unit

    @property
    def si(self) -> float:
        """In bytes, seconds, FLOP/s, watts."""
        return self.value * UNITS[self.unit]


class Link(BaseModel):
    """How fast a device sends to others that are at most `within` places away, counted along the ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    within: int
    bandwidth: Constant
    latency: Constant


class Hardware(BaseModel):
    """A device, its node and its network."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    devices_per_node: Annotated[int, Field(ge=1)]
    memory: Constant
    matmul: Constant
    matmul_fp32: Constant
    peak: Constant  # what MFU is a share of
    memory_bandwidth: Constant
    grouped_matmul: Constant
    fusion: Constant
    launch: Constant
    power: Constant
    node_mtbf: Constant  # time between two failures of one node
    checkpoint: Constant  # what a node writes a second
    restart: Constant
    jitter: Constant  # standard deviation of the logarithm of a rank's step time
    links: Annotated[tuple[Link, ...], Field(min_length=1)]

    def link(self, span: int) -> Link:
        """The link between ranks of which the last is `span` places after the first, blocks of that size aligned."""
        return next((link for link in self.links if span <= link.within), self.links[-1])


def load_hardware(name: str) -> Hardware:
    """A bundled machine ("aurora", "h200") or a TOML file. Raises ValueError, naming file and key."""
    unknown = f"--hardware {name} is neither a file nor a known machine: choose one of"
    return load_toml(Hardware, name, "hardware", unknown, ValueError)
