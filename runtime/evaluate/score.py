"""Likelihoods of many rows: batched by length, divided over the replicas of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from optimus_compiler.mesh import Mesh
from optimus_compiler.runtime.collectives import all_reduce, together
from optimus_compiler.runtime.evaluate.encode import Row
from optimus_compiler.runtime.likelihood import IGNORED_LABEL

Progress = Callable[[int, int], None]  # rows done, rows in all


class Scored(Protocol):
    """A model whose likelihoods can be asked for; `mesh` is that of its processes, `max_length` in tokens."""

    mesh: Mesh
    max_length: int

    def rows_at_once(self, length: int) -> int:
        """How many rows of so many tokens a call takes."""
        ...

    def log_likelihoods(self, ids_BS: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
        """The log-probability of the targets of each row, summed, [B]; whether each is the likeliest token, [B].

        targets[:, s] is what should follow ids[:, s]; -100 does not count. Every rank calls it equally often; B may be
        0.
        """
        ...


def score(
    model: Scored, rows: Sequence[Row], progress: Progress = lambda done, total: None
) -> list[tuple[float, bool]]:
    """Of each row, in the order given: the log-probability of its targets, and whether greedy decoding finds them.

    The longest rows go first, so that memory that does not suffice is noticed at once; (dp, ep) ranks take batches in
    turn, and all ranks return all results. Raises ValueError where the model gives something that is not a number.
    """
    mesh = model.mesh
    ranks, rank = mesh.size_of("dp", "ep"), mesh.index_in("dp", "ep")
    batches = _batches(model, rows)
    found = torch.zeros(2, len(rows), device=mesh.device)
    done = 0
    with together(mesh):
        for first in range(0, len(batches), ranks):
            turn = batches[first : first + ranks]
            mine = turn[rank] if rank < len(turn) else []
            sums_B, likeliest_B = model.log_likelihoods(*_padded([rows[index] for index in mine]))
            found[:, mine] = torch.stack([sums_B, likeliest_B.float()]).to(found.device)
            done += sum(map(len, turn))
            progress(done, len(rows))
    sums, likeliest = all_reduce(found, mesh.group("dp", "ep")).tolist()
    if not torch.isfinite(torch.tensor(sums)).all():
        raise ValueError("the model gives log-probabilities that are not finite: its weights or its logits are broken")
    return list(zip(sums, map(bool, likeliest), strict=True))


def _batches(model: Scored, rows: Sequence[Row]) -> list[list[int]]:
    """Numbers of rows, the longest first, as many together as the model takes."""
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index].ids))
    batches = []
    first = 0
    while first < len(order):
        end = first + model.rows_at_once(len(rows[order[first]].ids))
        batches.append(order[first:end])
        first = end
    return batches


def _padded(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Ids and targets, int64 [B, S]: ids padded on the right, where causal attention does not look."""
    length = max((len(row.ids) for row in rows), default=1)
    ids_BS = torch.zeros(len(rows), length, dtype=torch.int64)
    targets_BS = torch.full_like(ids_BS, IGNORED_LABEL)
    for ids_S, targets_S, row in zip(ids_BS, targets_BS, rows, strict=True):
        ids_S[: len(row.ids)] = torch.tensor(row.ids)
        targets_S[len(row.ids) - len(row.targets) : len(row.ids)] = torch.tensor(row.targets)
    return ids_BS, targets_BS
