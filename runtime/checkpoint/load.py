"""Fills a compiled model and its optimizer: weights read by one dp index and sent to the others, state by its owner."""

from pathlib import Path
from typing import Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from optimus_compiler.compiled import CompiledModel
from optimus_compiler.runtime.checkpoint.contents import MASTER, Parts, owned_state, weights_to_read, writer_of
from optimus_compiler.runtime.checkpoint.manifest import CheckpointError
from optimus_compiler.runtime.checkpoint.storage import CheckpointReader
from optimus_compiler.runtime.collectives import Transfer, share, together
from optimus_compiler.runtime.optimizer import ShardedAdamW


class WeightSource(Protocol):
    """Where weights come from: a checkpoint, or a Hugging Face folder."""

    def read(self, parts: Parts) -> None:
        """Fills the boxes of `parts`, whose names are those of parameters, cast to their dtype: from the most precise
        values there are for fp32 boxes."""
        ...


class StoredTensors:
    """The tensors of a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = CheckpointReader(path)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the checkpoint holds, and its shape."""
        stored = self._reader.read_metadata().state_dict_metadata
        return {name: tuple(value.size) for name, value in stored.items() if isinstance(value, TensorStorageMetadata)}

    def read(self, parts: Parts) -> None:
        """Fills weights by parameter name; fp32 ones from the master copy where there is one."""
        stored = self.shapes()

        def key(name: str) -> str:
            master = f"{name}.{MASTER}"
            return master if parts[name].dtype == torch.float32 and master in stored else name

        self.read_exactly({key(name): part for name, part in parts.items()})

    def read_exactly(self, parts: Parts) -> None:
        """Fills tensors by their names in the checkpoint; raises CheckpointError where one is missing or of another
        shape."""
        stored = self.shapes()
        for name, part in parts.items():
            if name not in stored:
                raise CheckpointError(f"{self.path} holds no {name}: it is of another model")
            if stored[name] != (shape := tuple(part.size())):
                raise CheckpointError(f"{self.path} holds {name} as {stored[name]} and the model has {shape}")
        if parts:
            try:
                dcp.load(dict(parts), storage_reader=self._reader, no_dist=True)
            except CheckpointException as error:
                cause, _ = min(error.failures.items())[1]
                raise CheckpointError(f"{self.path} could not be read ({type(cause).__name__}: {cause})") from error


def load_weights(compiled: CompiledModel, source: WeightSource, transfer: Transfer) -> None:
    """Fills every weight. Of the replicas of a shard one reads, bucket by bucket, in place; the others receive.

    A collective. Beside the model a rank holds one box of what it reads.
    """
    mesh = compiled.program.mesh
    reader = writer_of(mesh, scattered=True)
    reads = mesh.coordinate("dp") == reader
    sender = mesh.ranks_in("dp")[reader]
    with together(mesh):
        for parts, values in weights_to_read(compiled):
            with together(mesh, "dp"):
                if reads:
                    source.read(parts)
            share(values, sender, transfer, mesh.group("dp"))


def load_masters(compiled: CompiledModel, optimizer: ShardedAdamW, source: WeightSource) -> None:
    """Fills the fp32 masters of the slices that this rank owns, from masters or else from weights."""
    with together(compiled.program.mesh):
        masters = owned_state(compiled.program, optimizer, (MASTER,))
        source.read({name.removesuffix(f".{MASTER}"): part for name, part in masters.items()})


def load_moments(compiled: CompiledModel, optimizer: ShardedAdamW, stored: StoredTensors) -> None:
    """Fills the moments of the slices that this rank owns."""
    with together(compiled.program.mesh):
        stored.read_exactly(owned_state(compiled.program, optimizer, ("exp_avg", "exp_avg_sq")))
