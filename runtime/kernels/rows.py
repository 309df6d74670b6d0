"""Values a row, from values a choice (index_tokens.py explains rows)."""

import torch
from torch import Tensor


def weight_of_rows(weights_TK: Tensor, row_TK: Tensor, num_rows: int) -> Tensor:
    """[R, 1]: the routing weight of each row in fp32 (fp64 for fp64), 0 past the last offset."""
    accumulate = torch.promote_types(weights_TK.dtype, torch.float32)
    spare_R1 = weights_TK.new_zeros(num_rows + 1, dtype=accumulate)
    spare_R1[row_TK.flatten()] = weights_TK.flatten().to(accumulate)  # row -1, no row, is the spare slot
    return spare_R1[:-1, None]
