"""How likely a model finds given tokens: sums of log-probabilities, row by row."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED_LABEL = -100  # as in transformers: no loss for this label


def row_log_likelihoods(logits_BSV: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row: the log-probability of its targets, summed, fp32 [B]; whether each is the likeliest token, bool [B].

    The logits at s say how likely targets[:, s] is; -100 does not count. Row by row, so that beside the logits one row
    of them is in memory in fp32.
    """
    sums_B, likeliest_B = [], []
    for logits_SV, targets_S in zip(logits_BSV, targets_BS, strict=True):
        counted_S = targets_S != IGNORED_LABEL
        logits_NV, targets_N = logits_SV[counted_S].float(), targets_S[counted_S]
        sums_B.append(-F.cross_entropy(logits_NV, targets_N, reduction="sum"))
        likeliest_B.append((logits_NV.argmax(dim=-1) == targets_N).all())
    if not sums_B:
        return logits_BSV.new_zeros(0, dtype=torch.float32), logits_BSV.new_zeros(0, dtype=torch.bool)
    return torch.stack(sums_B), torch.stack(likeliest_B)
