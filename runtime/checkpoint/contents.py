"""What a checkpoint is made of: the tensors of a model and its optimizer, by the ranges that this rank writes or reads.

<parameter>               the weight, in its own dtype
<parameter>.master        its fp32 master copy, where the weight is bf16
<parameter>.exp_avg       the moments, fp32
<parameter>.exp_avg_sq
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from optimus_compiler.compiled import CompiledModel
from optimus_compiler.mesh import Mesh
from optimus_compiler.program import Program
from optimus_compiler.runtime.buckets import Bucket
from optimus_compiler.runtime.checkpoint.manifest import Kind, StoredParameter
from optimus_compiler.runtime.checkpoint.shards import PartOfParameter, part_of_parameter
from optimus_compiler.runtime.optimizer import ShardedAdamW

MASTER = "master"

Parts = dict[str, PartOfParameter]


class Snapshot:
    """The tensors that this rank writes. Every element of the job is written by one rank.

    staged: `take` copies them to host memory, so that training may go on while they are written; otherwise they are the
    live ones. The host memory is taken once.
    """

    def __init__(self, compiled: CompiledModel, optimizer: ShardedAdamW, *, scattered: bool, staged: bool) -> None:
        self._staged = staged
        self._weights: Parts = {}
        self._state: Parts = {}
        self._copies: dict[Kind, list[tuple[Tensor, Tensor]]] = {"model": [], "full": []}  # (on the host, live)
        program = compiled.program
        for bucket, values, start in _written_weights(compiled, scattered):
            held = self._host(values, "model")
            self._weights |= parts_of_bucket(program, bucket, held, start, None)
        for name, values in _frozen(compiled).items():
            spec = program.parameters[name]
            start, stop = written_range(values.numel(), program.mesh, spec.replicated(), scattered)
            if program.ranks_of(spec)[0] == program.mesh.coordinate("pp") and start < stop:
                self._weights[name] = part_of_parameter(spec, program.mesh, values[start:stop], start)
        for key, bucket, values, start in _written_state(optimizer, program.mesh, scattered):
            self._state |= parts_of_bucket(program, bucket, self._host(values, "full"), start, key)

    def take(self, kind: Kind) -> None:
        """Copies to the host what the model holds now of what a checkpoint of this kind needs, where it is staged."""
        copies = [*self._copies["model"], *(self._copies["full"] if kind == "full" else ())]
        for host, live in copies:
            host.copy_(live, non_blocking=True)
        if any(live.device.type != "cpu" for _, live in copies):
            torch.accelerator.synchronize()

    def parts(self, kind: Kind) -> Parts:
        """What this rank writes of a checkpoint of this kind."""
        return self._weights | self._state if kind == "full" else dict(self._weights)

    def _host(self, live: Tensor, kind: Kind) -> Tensor:
        if not self._staged:
            return live
        host = torch.empty_like(live, device="cpu", pin_memory=live.device.type == "cuda")
        self._copies[kind].append((host, live))
        return host


def weights_to_read(compiled: CompiledModel) -> Iterator[tuple[Parts, Tensor]]:
    """This rank's shards of all weights, bucket by bucket, each with the tensor that the parts are views of."""
    program = compiled.program
    for bucket in compiled.buckets:
        yield parts_of_bucket(program, bucket, bucket.weights, 0, None), bucket.weights
    for name, values in _frozen(compiled).items():
        yield {name: part_of_parameter(program.parameters[name], program.mesh, values, 0)}, values


def owned_state(program: Program, optimizer: ShardedAdamW, keys: Iterable[str]) -> Parts:
    """The optimizer state that this rank owns, to be read: of `keys` those that there are."""
    parts: Parts = {}
    for shard in optimizer.shards:
        for key, values in shard.tensors().items():
            if key in keys:
                parts |= parts_of_bucket(program, shard.reduction.bucket, values, shard.reduction.start_at, key)
    return parts


def parts_of_bucket(program: Program, bucket: Bucket, values: Tensor, start: int, key: str | None) -> Parts:
    """The parts of a bucket's parameters of which `values` hold the bucket's elements from `start` on."""
    parts: Parts = {}
    for entry in bucket.entries:
        first, last = max(entry.offset, start), min(entry.offset + entry.numel, start + len(values))
        if first < last:
            name = entry.name if key is None else f"{entry.name}.{key}"
            held = values[first - start : last - start]
            parts[name] = part_of_parameter(program.parameters[entry.name], program.mesh, held, first - entry.offset)
    return parts


def parameter_table(program: Program) -> dict[str, StoredParameter]:
    """The weights of a program as a manifest lists them."""
    return {
        name: StoredParameter(
            shape=spec.shape,
            dtype=str(spec.dtype).removeprefix("torch."),
            placement=dict(spec.placement),
            stages=spec.stages,
        )
        for name, spec in program.parameters.items()
    }


def written_range(length: int, mesh: Mesh, copies: tuple[str, ...], scattered: bool) -> tuple[int, int]:
    """Of `length` elements that all ranks over `copies` hold: the range [start, stop) that this rank writes.

    ep and tp ranks take equal parts. Of dp's replicas one writes: the first, or, scattered, that of index m mod dp for
    model-parallel shard m, so that writes spread over the nodes (arXiv 2604.00785, DP-scattered checkpoints).
    """
    if "dp" in copies and mesh.coordinate("dp") != writer_of(mesh, scattered):
        return 0, 0
    model = [name for name in copies if name != "dp"]
    part, parts = mesh.index_in(*model), mesh.size_of(*model)
    return part * length // parts, (part + 1) * length // parts


def writer_of(mesh: Mesh, scattered: bool) -> int:
    """The dp index that writes, and reads, the weights of this rank's model-parallel shard."""
    return mesh.index_in("pp", "ep", "tp") % mesh.dp if scattered else 0


def _written_weights(compiled: CompiledModel, scattered: bool) -> Iterator[tuple[Bucket, Tensor, int]]:
    """(bucket, flat tensor, its first element in the bucket) of the weights that this rank writes."""
    mesh = compiled.program.mesh
    for bucket in compiled.buckets:
        if mesh.coordinate("pp") == bucket.stage_ranks[0]:
            start, stop = written_range(bucket.weights.numel(), mesh, bucket.replicated, scattered)
            yield bucket, bucket.weights[start:stop], start


def _written_state(optimizer: ShardedAdamW, mesh: Mesh, scattered: bool) -> Iterator[tuple[str, Bucket, Tensor, int]]:
    """(key, bucket, flat tensor, its first element in the bucket) of the optimizer state that this rank writes."""
    for shard in optimizer.shards:
        part = shard.reduction
        if mesh.coordinate("pp") == part.bucket.stage_ranks[0]:
            start, stop = written_range(part.stop_at - part.start_at, mesh, part.copied_over, scattered)
            for key, values in shard.tensors().items():
                yield key, part.bucket, values[start:stop], part.start_at + start


def _frozen(compiled: CompiledModel) -> dict[str, Tensor]:
    """This rank's shards, flat, of the weights that are not trained: they are in no bucket."""
    trained = {entry.name for bucket in compiled.buckets for entry in bucket.entries}
    return {name: parameter.detach().view(-1) for name, parameter in compiled.weights.parameters.items()
            if name not in trained}  # fmt: skip
