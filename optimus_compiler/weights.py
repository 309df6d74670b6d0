"""The weights of a compiled model: drawn, sliced or received as this rank's shards, and gathered into full ones."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from optimus_compiler.mesh import DIMENSIONS
from optimus_compiler.program import ParameterSpec, Program
from optimus_compiler.runtime.buckets import Bucket
from optimus_compiler.runtime.collectives import Transfer, gather_shards, share, share_over_stages
from optimus_compiler.runtime.initialise import draw_box


class Weights:
    """Every parameter of a program by name: the local shard, and how it comes from and goes back to the full one."""

    def __init__(
        self, program: Program, model: nn.Module, buckets: tuple[Bucket, ...], device: torch.device, seed: int | None
    ) -> None:
        """Sets every parameter: drawn from the seed, or this rank's part of the model's own.

        Raises ValueError for a weight on the meta device that no seed draws.
        """
        self.program = program
        self.seed = seed
        self.loads = 0  # how often they were replaced: masters of an optimizer start anew then
        self.std = float(getattr(model.config, "initializer_range", 0.02))
        self._device = device
        self._state_names = tuple(model.state_dict())
        # a padding row gets no gradient: Hugging Face keeps it zero
        self._padding_rows = {f"{path}.weight": module.padding_idx for path, module in model.named_modules()
                              if isinstance(module, nn.Embedding) and module.padding_idx is not None}  # fmt: skip
        self.parameters = {entry.name: entry.parameter for bucket in buckets for entry in bucket.entries}
        state = {**dict(model.named_parameters()), **program.constants}
        for name, spec in program.parameters.items():
            if not program.is_here(spec):
                continue
            drawn = seed is not None and isinstance(state[spec.source.names[0]], nn.Parameter)
            if not drawn and any(state[source].is_meta for source in spec.source.names):
                raise ValueError(f"parameter {name} is on the meta device and has no value: give compile a seed")
            value = self._draw(spec) if drawn else spec.source.build(state, spec.shape)[spec.box(program.mesh)]
            if name in self.parameters:
                with torch.no_grad():
                    self.parameters[name].copy_(value)
            else:
                frozen = value.to(device, spec.dtype, copy=True)
                self.parameters[name] = nn.Parameter(frozen, requires_grad=False)

    def _draw(self, spec: ParameterSpec) -> Tensor:
        """This rank's shard of a parameter, fp32 on cpu; bitwise the same numbers in every layout."""
        assert self.seed is not None
        box = spec.box(self.program.mesh)
        drawn = draw_box(spec.name, spec.shape, self.seed, self.std, box)
        row = self._padding_rows.get(spec.name)
        if row is not None and box[0].start <= row < box[0].stop:
            drawn[row - box[0].start] = 0
        return drawn

    def fp32(self, bucket: Bucket, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a bucket in fp32: the fp32 draw where weights were drawn, else the weights."""
        flat = bucket.weights[start:stop].to(torch.float32, copy=True)
        if self.seed is not None and bucket.weights.dtype != torch.float32:
            for entry in bucket.entries:
                first, last = max(entry.offset, start), min(entry.offset + entry.numel, stop)
                if first < last:
                    drawn = self._draw(self.program.parameters[entry.name]).flatten()
                    drawn = drawn[first - entry.offset : last - entry.offset].to(flat.device)
                    weights = flat[first - start : last - start]
                    weights.copy_(torch.where(drawn.to(bucket.weights.dtype) == weights, drawn, weights))
        return flat

    def full(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors of local ones, by the names and in the shapes of the model that was compiled; a collective."""
        parameters, mesh = self.program.parameters, self.program.mesh
        here = {name: gather_shards(tensor, parameters[name].placement, mesh) for name, tensor in local.items()}
        return self.in_model_names(share_over_stages(here, mesh))

    def in_model_names(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole parameters under the names and in the shapes of the model that was compiled."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            found.update(self.program.parameters[name].source.split(tensor))
        for alias, name in self.program.aliases.items():
            if name in found:
                found[alias] = found[name]
        return {name: found[name] for name in self._state_names if name in found}

    def load(self, state_dict: Mapping[str, Tensor] | None, transfer: Transfer | None) -> None:
        """Sets every weight from full ones; see CompiledModel.load_state_dict."""
        if transfer is None and state_dict is None:
            raise ValueError("there is no state dict to load: give one, or say how rank 0 sends it (transfer=)")
        fault = None
        try:
            if state_dict is not None:
                self._check(state_dict)
        except ValueError as error:
            fault = error
        if transfer is not None:
            # all ranks give up together: one that waits for rank 0 would wait for ever
            failed = torch.tensor([fault is not None], dtype=torch.uint8, device=self._device)
            share(failed, 0, transfer, self.program.mesh.group(*DIMENSIONS))
            if fault is None and failed.item():
                raise ValueError("rank 0 has no state dict that fits this model: its own message says why")
        if fault is not None:
            raise fault
        with torch.no_grad():
            for name, shard in self._shards(state_dict, transfer):
                self.parameters[name].copy_(shard)
        self.loads += 1

    def _check(self, state_dict: Mapping[str, Tensor]) -> None:
        needed = {name for spec in self.program.parameters.values() for name in spec.source.names}
        missing, unknown = needed - set(state_dict), set(state_dict) - set(self._state_names)
        if missing or unknown:
            raise ValueError(f"the state dict lacks {sorted(missing)[:3]} and has unknown {sorted(unknown)[:3]}")
        for spec in self.program.parameters.values():
            spec.source.check(state_dict)

    def _shards(
        self, state_dict: Mapping[str, Tensor] | None, transfer: Transfer | None
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, this rank's shard) of every parameter, one full parameter in memory at a time."""
        mesh = self.program.mesh
        for name, spec in self.program.parameters.items():
            if transfer is None:
                assert state_dict is not None
                full = spec.source.build(state_dict, spec.shape)
            else:
                full = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
                if state_dict is not None:
                    full.copy_(spec.source.build(state_dict, spec.shape))
                share(full, 0, transfer, mesh.group(*DIMENSIONS))
            if self.program.is_here(spec):
                yield name, full[spec.box(mesh)]
