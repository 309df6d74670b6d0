"""A run small enough to be saved many times a second; every value of the model says at which step it was saved."""

from functools import partial
from pathlib import Path

import torch

import optimus_compiler as optimus
from optimus_compiler.config import CheckpointSection
from optimus_compiler.runtime.checkpoint.contents import parameter_table
from optimus_compiler.runtime.checkpoint.folder import Checkpoint, CheckpointFolder
from optimus_compiler.runtime.checkpoint.load import StoredTensors, load_masters, load_moments, load_weights
from optimus_compiler.runtime.checkpoint.manifest import CheckpointManifest, Kind, Progress, StoredFile, StoredParameter
from optimus_compiler.runtime.checkpoint.saver import CheckpointSaver
from tests.layouts import B, S, small_model


def progress(step: int) -> Progress:
    """So many steps, and nothing else."""
    return Progress(step=step, tokens=0, epoch=0, offset=0, updates=step, random_state="")


def plain_manifest(
    kind: Kind,
    progress: Progress,
    number: int,
    files: dict[str, StoredFile],
    mesh: dict[str, int] | None = None,
    parameters: dict[str, StoredParameter] | None = None,
) -> CheckpointManifest:
    """A manifest that says little of the run."""
    return CheckpointManifest(
        kind=kind,
        number=number,
        progress=progress,
        config="",
        model={},
        data_sha256="0" * 64,
        mesh=mesh or {},
        parameters=parameters or {},
        files=files,
    )


def saver(
    folder: CheckpointFolder,
    compiled: optimus.CompiledModel,
    optimizer: optimus.ShardedAdamW,
    settings: CheckpointSection,
) -> CheckpointSaver:
    """What saves these two."""
    mesh, parameters = compiled.program.mesh.sizes(), parameter_table(compiled.program)
    describe = partial(plain_manifest, mesh=mesh, parameters=parameters)
    return CheckpointSaver(folder, settings, compiled, optimizer, describe, lambda sentence: None)


class SmallRun:
    """A small OLMoE in one process, its optimizer and the directory they are saved in."""

    def __init__(self, directory: Path) -> None:
        self.compiled = optimus.compile(
            small_model("olmoe").bfloat16(), sequence_length=S, micro_batch_size=B, backend="eager"
        )
        self.optimizer = optimus.ShardedAdamW(self.compiled, lr=1e-3)
        self.move(directory)

    def move(self, directory: Path) -> None:
        """Goes on in another directory."""
        self.directory = directory
        self.folder = CheckpointFolder(directory)

    def fill(self, value: float) -> None:
        """Sets every weight, master and moment; value is a small integer, exact in bf16."""
        for bucket in self.compiled.buckets:
            for entry in bucket.entries:
                entry.view(bucket.weights).fill_(value)
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.fill_(value)

    def values(self) -> set[float]:
        """All values that weights, masters and moments have."""
        held = list(self.compiled.full_state_dict().values())
        held += [tensor for tensors in self.optimizer.full_state().values() for tensor in tensors.values()]
        return {float(value) for tensor in held for value in tensor.unique()}

    def saving(self, settings: CheckpointSection | None = None) -> CheckpointSaver:
        """A saver of this run."""
        return saver(self.folder, self.compiled, self.optimizer, settings or CheckpointSection())

    def save(self, step: int, *kinds: Kind) -> None:
        """Saves the step's values."""
        self.fill(step)
        with self.saving() as saving:
            saving.save(list(kinds or ("full",)), progress(step))

    def load(self, checkpoint: Checkpoint) -> None:
        """Loads over NaN."""
        self.fill(torch.nan)
        stored = StoredTensors(checkpoint.path)
        load_weights(self.compiled, stored, "broadcast")
        load_masters(self.compiled, self.optimizer, stored)
        load_moments(self.compiled, self.optimizer, stored)
