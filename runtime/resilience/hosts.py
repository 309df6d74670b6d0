"""Which machines a launch may use: a host file, the batch system's list, or this machine under several names."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LOCAL = "localhost"


class HostsError(ValueError):
    """A list of hosts that cannot be used; the message says where it came from."""


@dataclass(frozen=True)
class Node:
    """A node by the name that incidents give it, and the host that it is."""

    name: str
    host: str


def find_nodes(wanted: int, hostfile: Path | None = None, environment: Mapping[str, str] | None = None) -> list[Node]:
    """`wanted` nodes: of the host file, else of PBS_NODEFILE, else of the Slurm job; without any: node0, ... here.

    Raises HostsError where the list has fewer hosts.
    """
    environment = os.environ if environment is None else environment
    if hostfile is not None:
        hosts, source = _read(hostfile), str(hostfile)
    elif node_file := environment.get("PBS_NODEFILE"):
        hosts, source = _read(Path(node_file)), f"PBS_NODEFILE ({node_file})"
    elif node_list := environment.get("SLURM_JOB_NODELIST"):
        hosts, source = _expand(node_list), f"SLURM_JOB_NODELIST ({node_list})"
    else:
        return [Node(f"node{number}", LOCAL) for number in range(wanted)]
    if len(hosts) < wanted:
        raise HostsError(
            f"{source} has {len(hosts)} hosts and --nodes and --spares ask for {wanted}: ask for fewer, or a larger job"
        )
    return [Node(host, host) for host in hosts[:wanted]]


def address_for(nodes: list[Node]) -> str:
    """The address of this machine as the nodes reach it."""
    others = [node.host for node in nodes if node.host not in (LOCAL, socket.gethostname())]
    if not others:
        return "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((others[0], 9))  # sends nothing: it asks which interface leads there
            return str(probe.getsockname()[0])
    except OSError:  # a node's name need not be a host's: our own name must do
        return socket.gethostbyname(socket.gethostname())


def _read(path: Path) -> list[str]:
    """The hosts of a file, one a line, each once; what follows the name ("slots=2") and comments are left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise HostsError(f"{path} cannot be read ({error.strerror}): name a file with a host a line") from None
    return list(dict.fromkeys(line.split()[0] for line in lines if line.strip() and not line.startswith("#")))


def _expand(node_list: str) -> list[str]:
    """The hosts of Slurm's compressed list (nid[001-004,007]), as Slurm itself expands it."""
    command = ["scontrol", "show", "hostnames", node_list]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise HostsError(f"scontrol cannot expand {node_list} ({error}): give a --hostfile") from None
