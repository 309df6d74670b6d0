"""The loss of a compiled model on held-out text, and the perplexity that it means."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from optimus_compiler.compiled import CompiledModel
from optimus_compiler.runtime.collectives import from_all
from optimus_compiler.runtime.data.dataset import PreparedData
from optimus_compiler.runtime.data.labels import documents_of, labels_of
from optimus_compiler.runtime.likelihood import IGNORED_LABEL


def validation_loss(
    compiled: CompiledModel,
    data: PreparedData,
    *,
    document_mask: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> float:
    """Cross entropy in nats, the mean over all tokens of `data` that have one before them; the same on every rank.

    Every token weighs the same, whatever the layout and the batch: perplexity is its exponential. Every rank calls it;
    the (dp, ep) ranks take turns. progress(sequences done, sequences in all).
    """
    mesh = compiled.program.mesh
    ranks, rank = mesh.size_of("dp", "ep"), mesh.index_in("dp", "ep")
    rows = compiled.micro_batches * compiled.program.micro_batch_size
    sums: list[Tensor] = []
    tokens = 0
    for first in range(0, len(data), rows * ranks):
        mine = np.arange(first + rank * rows, first + (rank + 1) * rows)
        ids_BS = data.read(mine[mine < len(data)])
        targets_BS = F.pad(labels_of(ids_BS, data.manifest.eos_id)[:, 1:], (0, 1), value=IGNORED_LABEL)
        inputs: dict[str, Tensor] = {}
        if document_mask:
            inputs["document_ids"], inputs["position_ids"] = documents_of(ids_BS, data.manifest.eos_id)
        sums_B, _ = compiled.log_likelihoods(ids_BS, targets_BS, **inputs)
        sums.append(sums_B)
        tokens += int((targets_BS != IGNORED_LABEL).sum())
        progress(min(first + rows * ranks, len(data)), len(data))
    own = sum(each.double().sum().item() for each in (sums_B.cpu() for sums_B in sums))
    totals = from_all((own, tokens), mesh.group("dp", "ep"))
    loss = -sum(likelihood for likelihood, _ in totals) / sum(count for _, count in totals)
    if not math.isfinite(loss):
        raise ValueError(f"the loss on {data.folder} is {loss}: the model's weights or its logits are broken")
    return loss
