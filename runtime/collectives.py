"""The collectives of the runtime: flat tensors in place, asynchronous, SUM only (never AVG)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from optimus_compiler.mesh import DIMENSIONS, Mesh

Transfer = Literal["broadcast", "all_reduce"]
T = TypeVar("T")


def reduce_scatter(flat: Tensor, own: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Starts summing `flat` over the group into `own`, this rank's slice of `flat`; the rest of it stays as it is."""
    collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
    return collective(own, flat, group=group, async_op=True)


def all_gather(flat: Tensor, own: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Starts filling `flat` with every rank's `own`, which may be this rank's slice of `flat`."""
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return collective(flat, own, group=group, async_op=True)


def all_reduce(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sums a tensor over a group in place; None is a group of one rank."""
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor


def add_from_peers(tensor: Tensor, ranks: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Sums a tensor over two global ranks of a group in place, bit by bit the same on both; one rank: nothing to do."""
    if len(ranks) > 1:
        (peer,) = (rank for rank in ranks if rank != dist.get_rank())
        received = torch.empty_like(tensor)
        exchange = [dist.P2POp(dist.isend, tensor, peer, group), dist.P2POp(dist.irecv, received, peer, group)]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        tensor += received
    return tensor


@contextmanager
def together(mesh: Mesh, *names: str) -> Iterator[None]:
    """A block that fails on every rank of a group when it fails on one: nobody waits for a rank that gave up.

    names: the dimensions of the group, by default all.

    The rank that failed raises its own error, the others a RuntimeError that names it.
    """
    fault: Exception | None = None
    try:
        yield
    except Exception as error:
        fault = error
    names = names or DIMENSIONS
    failed = torch.zeros(mesh.size_of(*names), dtype=torch.int32, device=mesh.device)
    failed[mesh.index_in(*names)] = fault is not None
    indices = all_reduce(failed, mesh.group(*names)).nonzero().flatten().tolist()
    if fault is not None:
        raise fault
    if indices:
        raise RuntimeError(f"rank {mesh.ranks_in(*names)[indices[0]]} failed: its own message says why")


def from_first(value: T, group: dist.ProcessGroup | None) -> T:
    """Rank 0's value, on every rank of a group that has it."""
    if group is None:
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0, group=group)
    return held[0]


def to_first(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Every rank's value, in the order of the group's ranks, on its rank 0; nothing on the others."""
    if group is None:
        return [value]
    held: list[T] | None = [value] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(value, held, group=group, group_dst=0)
    return held or []


def from_all(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Every rank's value, in the order of the group's ranks, on all of them."""
    if group is None:
        return [value]
    held: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(held, value, group=group)
    return held


def gather_shards(local: Tensor, placement: Mapping[str, int], mesh: Mesh) -> Tensor:
    """The full parameter from every rank's shard, on every rank; a collective over the dimensions it is sharded on."""
    full = local.detach().contiguous()
    for dimension, axis in placement.items():
        group = mesh.group(dimension)
        if group is not None:
            parts = [torch.empty_like(full) for _ in range(mesh.size_of(dimension))]
            dist.all_gather(parts, full, group=group)
            full = torch.cat(parts, dim=axis)
    return full


def share_over_stages(tensors: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """The tensors that any rank of pp holds, on all of them; a collective. Of two holders the first one sends."""
    group = mesh.group("pp")
    if group is None:
        return dict(tensors)
    held: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{} for _ in range(mesh.pp)]
    dist.all_gather_object(held, {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}, group=group)
    found: dict[str, Tensor] = {}
    for source, named in zip(mesh.ranks_in("pp"), held, strict=True):
        for name, (shape, dtype) in named.items():
            if name not in found:
                own = tensors.get(name)
                found[name] = torch.empty(shape, dtype=dtype, device=mesh.device) if own is None else own
                share(found[name], source, "broadcast", group)
    return found


def share(tensor: Tensor, source: int, transfer: Transfer, group: dist.ProcessGroup | None) -> None:
    """Copies `tensor` from global rank `source` to all ranks of the group, in place, bit by bit.

    "all_reduce" is for stacks where broadcast fails: the other ranks add zeros, as bytes, so that no bit changes.
    """
    if group is None:
        return
    if transfer == "broadcast":
        dist.broadcast(tensor, source, group=group)
        return
    if dist.get_rank() != source:
        tensor.zero_()
    dist.all_reduce(tensor.view(-1).view(torch.uint8), group=group)
