"""A configuration on another number of processes, and whether it fits."""

from __future__ import annotations

from optimus_compiler.config import Config, ConfigError
from optimus_compiler.runtime.plan.estimate import Plan


def on_processes(config: Config, processes: int) -> Config:
    """The configuration with dp such that the mesh has so many processes; every (dp, ep) rank keeps its batch.

    Raises ConfigError where pp, ep and tp do not divide the number.
    """
    mesh = config.mesh
    others = mesh.pp * mesh.ep * mesh.tp
    if processes % others:
        raise ConfigError(
            f"--world-size {processes} is no multiple of pp={mesh.pp} x ep={mesh.ep} x tp={mesh.tp} = {others}: "
            "change it, or set mesh.pp, mesh.ep, mesh.tp"
        )
    dp = processes // others
    batch = config.global_batch_size() * dp // mesh.dp
    train = config.train.model_copy(update={"global_batch_size": batch})
    return config.model_copy(update={"mesh": mesh.model_copy(update={"dp": dp}), "train": train})


def refuse_what_does_not_fit(plan: Plan) -> None:
    """Raises ConfigError, with the limit that binds, for a plan whose ranks need more memory than a device has."""
    limit = plan.hardware.memory
    rank = max(range(len(plan.memory)), key=lambda each: plan.memory[each].peak)
    needed = plan.memory[rank]
    where = f"a rank of stage {rank}" if plan.mesh.pp > 1 else "a rank"
    size = f"{limit.value:g} {limit.unit}"
    if needed.state > limit.si:
        raise ConfigError(
            f"{where} needs {needed.state / 1e9:.1f} GB of {size} for weights, gradients and optimizer state, and "
            f"{needed.activations / 1e9:.1f} GB for activations on top: shard over more ranks (dp, ep, pp, tp), or ask "
            "for --layout auto"
        )
    if needed.peak > limit.si:
        raise ConfigError(
            f"{where} needs {needed.peak / 1e9:.1f} GB of {size}, {needed.activations / 1e9:.1f} GB of them for "
            "activations: recompute more (activation_checkpointing.blocks), use a smaller micro-batch, or ask for "
            "--layout auto"
        )
