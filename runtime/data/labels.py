"""What a batch says beside its ids: labels without padding, and which document each token belongs to."""

import torch
from torch import Tensor

from optimus_compiler.runtime.likelihood import IGNORED_LABEL


def labels_of(ids_BT: Tensor, eos_id: int) -> Tensor:
    """Labels int64 [B, T], unshifted as in transformers: the ids, with -100 where they are padding.

    Padding is EOS after EOS: prepared documents are never empty, so nothing else looks like it. The label at t is what
    position t - 1 must predict, so the EOS that ends the last document still counts and the padding after it does not.
    """
    labels_BT = ids_BT.clone()
    padding_BT = (ids_BT[:, 1:] == eos_id) & (ids_BT[:, :-1] == eos_id)
    labels_BT[:, 1:].masked_fill_(padding_BT, IGNORED_LABEL)
    return labels_BT


def documents_of(ids_BT: Tensor, eos_id: int) -> tuple[Tensor, Tensor]:
    """Document numbers and positions in their documents, both int64 [B, T], both from 0 in each instance.

    A document ends with its EOS. One that began in an earlier instance counts from where this instance begins.
    """
    ends_BT = (ids_BT == eos_id).long()
    document_ids_BT = ends_BT.cumsum(1) - ends_BT
    offsets_T = torch.arange(ids_BT.shape[1])
    starts_BT = (offsets_T * ends_BT.roll(1, 1)).cummax(1).values  # roll: a document starts after an EOS
    return document_ids_BT, offsets_T - starts_BT
