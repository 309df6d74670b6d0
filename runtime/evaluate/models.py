"""Models that can be scored: a plain module on each process, and a compiled model in whatever layout it trains."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from optimus_compiler.compiled import CompiledModel
from optimus_compiler.mesh import Mesh
from optimus_compiler.runtime.likelihood import row_log_likelihoods

TOKENS_AT_ONCE = 4096  # of a plain model: with a vocabulary of 50,304 their logits take 0.8 GiB in fp32


class PlainModel:
    """A causal language model (ids [B, S] -> .logits [B, S, V]), whole on every process of `mesh`, all of them dp."""

    def __init__(self, module: nn.Module, mesh: Mesh, max_length: int) -> None:
        self.module = module
        self.mesh = mesh
        self.max_length = max_length

    def rows_at_once(self, length: int) -> int:
        """As many rows as have TOKENS_AT_ONCE tokens together, or one."""
        return max(1, TOKENS_AT_ONCE // length)

    @torch.no_grad()
    def log_likelihoods(self, ids_BS: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
        """See score.Scored."""
        ids_BS, targets_BS = ids_BS.to(self.mesh.device), targets_BS.to(self.mesh.device)
        if not len(ids_BS):
            return torch.zeros(0), torch.zeros(0, dtype=torch.bool)
        return row_log_likelihoods(self.module(ids_BS).logits, targets_BS)


class TrainedModel:
    """A compiled model between two steps of its training: every call runs one step's micro-batches at full length."""

    def __init__(self, compiled: CompiledModel) -> None:
        self._compiled = compiled
        self.mesh = compiled.program.mesh
        self.max_length = compiled.program.sequence_length

    def rows_at_once(self, length: int) -> int:
        """The rows of a step of one (dp, ep) rank."""
        return self._compiled.micro_batches * self._compiled.program.micro_batch_size

    def log_likelihoods(self, ids_BS: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
        """See score.Scored. Each row is one document."""
        positions_BS = torch.arange(ids_BS.shape[1]).expand_as(ids_BS)
        single = {
            "attention_mask": torch.ones_like(ids_BS),
            "document_ids": torch.zeros_like(ids_BS),
            "position_ids": positions_BS,
        }
        declared = {name: value for name, value in single.items() if name in self._compiled.program.inputs}
        return self._compiled.log_likelihoods(ids_BS, targets_BS, **declared)
