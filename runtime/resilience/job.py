"""A ready job script for a batch system: `optimus launch` in it, with what the site's profile says."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from pydantic import Field

from optimus_compiler.bundled import load_toml
from optimus_compiler.runtime.records import Record


class JobError(ValueError):
    """A job that cannot be written; the message says what to change."""


class Queue(Record):
    """What a queue takes."""

    name: str
    min_nodes: int = Field(default=1, ge=1)
    max_nodes: int = Field(ge=1)
    max_hours: float = Field(gt=0)


class Profile(Record):
    """How jobs run at a site. No user and no project is in it."""

    procs_per_node: int = Field(ge=1)
    launcher: str
    launcher_args: str = ""
    filesystems: str = ""
    modules: tuple[str, ...] = Field(default=(), strict=False)
    save_minutes: int = Field(default=10, ge=1)
    queues: tuple[Queue, ...] = Field(strict=False)
    environment: dict[str, str] = Field(default_factory=dict)


def load_profile(source: str) -> Profile:
    """A profile that comes with the package ("aurora"), or a TOML file; raises JobError naming what is wrong in it."""
    unknown = f"--job-profile {source} is neither a file nor a profile that comes with the package:"
    return load_toml(Profile, source, "profiles", unknown, JobError)


def pbs_script(
    profile: Profile,
    arguments: Sequence[str],
    *,
    name: str,
    nodes: int,
    project: str,
    walltime: str,
    queue: str | None = None,
) -> str:
    """A PBS script that runs `optimus` with these arguments on so many nodes, spares among them.

    walltime: "HH:MM:SS". Some minutes before it ends the run gets SIGTERM, saves and ends. Raises JobError.
    """
    seconds = _seconds(walltime)
    save = 60 * profile.save_minutes
    if seconds <= save:
        raise JobError(f"--walltime {walltime} leaves nothing beside the {profile.save_minutes} minutes for saving")
    chosen = queue or _queue_for(profile, nodes, seconds / 3600)
    header = [f"-N {name}", f"-A {project}", f"-q {chosen}", f"-l select={nodes}", f"-l walltime={walltime}"]
    header += [f"-l filesystems={profile.filesystems}"] if profile.filesystems else []
    header += ["-l place=scatter", "-j oe"]
    lines = ["#!/bin/bash -l", *(f"#PBS {line}" for line in header), "", 'cd "$PBS_O_WORKDIR"']
    lines += [f"module load {module}" for module in profile.modules]
    lines += [f"export {key}={shlex.quote(value)}" for key, value in profile.environment.items()]
    before = f"{profile.save_minutes} minutes before the walltime ends"
    lines += ["", f"# SIGTERM {before}: the run saves, and goes on in the next job"]
    lines += [f"timeout --signal=TERM {seconds - save} optimus {shlex.join(arguments)}"]
    return "\n".join(lines) + "\n"


def _queue_for(profile: Profile, nodes: int, hours: float) -> str:
    for queue in profile.queues:
        if queue.min_nodes <= nodes <= queue.max_nodes and hours <= queue.max_hours:
            return queue.name
    offered = "; ".join(f"{q.name}: {q.min_nodes} to {q.max_nodes} nodes, {q.max_hours:g} h" for q in profile.queues)
    raise JobError(f"no queue takes {nodes} nodes for {hours:g} h ({offered}): change them, or name one with --queue")


def _seconds(walltime: str) -> int:
    parts = walltime.split(":")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise JobError(f"--walltime {walltime!r}: write HH:MM:SS")
    hours, minutes, seconds = map(int, parts)
    return 3600 * hours + 60 * minutes + seconds
