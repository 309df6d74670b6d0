"""ShardedAdamW: AdamW over the flat buckets of a compiled model, its state divided over the ranks that share it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optimus_compiler.mesh import DIMENSIONS
from optimus_compiler.runtime.buckets import Bucket, Entry
from optimus_compiler.runtime.collectives import all_gather, all_reduce
from optimus_compiler.runtime.memory import BucketMemory, MemoryReport
from optimus_compiler.runtime.reduction import BucketReduction, GradientReduction, Sharding

# Elements updated by one kernel call. It bounds the temporary of a scaled gradient to 16 MiB, small enough for the CPU
# allocator to recycle instead of mapping fresh pages (50 M parameters with clipping: 0.07 s, in one call 0.20 s).
_CHUNK = 2**22
# Elements summed before a partial norm is taken: one fp32 sum over 50 M squares is off by 3e-3, in two levels by 1e-7.
_NORM_ROW = 4096


class BucketedModel(Protocol):
    """What the optimizer needs of a compiled model."""

    @property
    def reduction(self) -> GradientReduction: ...
    @property
    def weight_loads(self) -> int:
        """How often the weights were replaced from outside."""
        ...

    def fp32_weights(self, bucket: Bucket, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a bucket's weights in fp32, a tensor of its own: what a master copy starts from."""
        ...

    def full_tensors(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors shaped like this rank's parameters, gathered and named as the model's; a collective."""
        ...


@dataclass(frozen=True)
class OwnedShard:
    """A bucket with the optimizer state of the slice that this rank owns: fp32, flat, laid out like the slice."""

    reduction: BucketReduction
    master: Tensor | None  # None when the weights are fp32 themselves
    exp_avg: Tensor
    exp_avg_sq: Tensor
    chunks: tuple[tuple[int, int, int], ...]  # (param group, start, stop) in the slice, the elements of a kernel call

    @property
    def weights(self) -> Tensor:
        """The owned slice of the model's weights."""
        return self.reduction.bucket.weights[self.reduction.start_at : self.reduction.stop_at]

    def part_of(self, entry: Entry) -> slice:
        """Where the slice holds elements of an entry; an empty slice where it holds none."""
        length = self.exp_avg.numel()
        start = min(max(entry.offset - self.reduction.start_at, 0), length)
        stop = min(max(entry.offset + entry.numel - self.reduction.start_at, 0), length)
        return slice(start, stop)

    def state_of(self, entry: Entry) -> dict[str, Tensor]:
        """Views of the entry's state: in the parameter's shape when the slice holds all of it, else flat."""
        part = self.part_of(entry)
        shape = entry.parameter.shape if part.stop - part.start == entry.numel else (part.stop - part.start,)
        return {key: value[part].view(shape) for key, value in self.tensors().items()}

    def tensors(self) -> dict[str, Tensor]:
        """The flat state of the slice."""
        state = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return state if self.master is None else {**state, "master": self.master}


class ShardedAdamW(torch.optim.Optimizer):
    """AdamW (decoupled weight decay) that adopts the buckets of a compiled model, with the defaults of the paper
    (arXiv 2604.00785, training set-up).

    bf16 weights get an fp32 master copy; moments are always fp32. `no_decay` holds name patterns (fnmatch) of the
    parameters that are not decayed. Gradients are clipped to the global norm `clip_norm` (`math.inf`: never) once
    `clip_after` steps have been taken. `reduce_dtype` is the dtype of the gradient buffers of bf16 weights; fp32
    weights keep fp32 gradients.

    `sharding` says over which ranks a parameter's state is divided: "epso" (section 3.2) over every rank that holds a
    replica, "so" over the data-parallel ones, "none" over nobody. `zero` says whether gradients are kept whole (1) or
    divided too (2). A step is: gradients reduce-scattered (started during backward), the owned slices updated, weights
    all-gathered, bucket by bucket. In one process nothing is replicated, so all of them are the same optimizer.

    Learning-rate schedulers of torch.optim work: `param_groups` holds the real parameters. Raises ValueError for a
    setting outside its range and for a `no_decay` pattern that matches no parameter.
    """

    def __init__(
        self,
        compiled: BucketedModel,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        no_decay: Sequence[str] = (),
        clip_norm: float = 1.0,
        clip_after: int = 0,
        sharding: Sharding = "epso",
        zero: int = 1,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        _check_settings(lr, betas, eps, weight_decay, clip_norm, clip_after, sharding, zero, reduce_dtype)
        self.clip_norm = clip_norm
        self.clip_after = clip_after

        self._compiled = compiled
        self._loads_seen = compiled.weight_loads
        self.reduction = compiled.reduction
        self.reduction.shard(sharding, zero, reduce_dtype)
        buckets = [part.bucket for part in self.reduction.parts]
        entries = [entry for bucket in buckets for entry in bucket.entries if entry.parameter.requires_grad]
        exempt = _names_matching([entry.name for entry in entries], no_decay)
        self._names = {entry.parameter: entry.name for entry in entries}
        groups = [
            {"params": [e.parameter for e in entries if (e.name in exempt) == without], "weight_decay": decay}
            for without, decay in ((False, weight_decay), (True, 0.0))
        ]
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__([group for group in groups if group["params"]], defaults)

        group_of = {parameter: g for g, group in enumerate(self.param_groups) for parameter in group["params"]}
        self.shards = [_shard(part, compiled, group_of) for part in self.reduction.parts]
        for shard in self.shards:
            for entry in shard.reduction.bucket.entries:
                if entry.parameter.requires_grad:
                    self.state[entry.parameter] = shard.state_of(entry)

        self.steps_taken = 0
        device = self.shards[0].exp_avg.device
        self._step = torch.zeros((), dtype=torch.float32, device=device)  # the fused kernel reads the count here

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """The L2 norm of the global mean gradients: 0-d fp32, on the device, equal on all ranks, no host sync.

        Every element counts once, whichever ranks hold copies of it. A collective: it waits for the reduction.
        """
        self.reduction.finish()
        partial_norms = [
            _norm(shard.reduction.owned[start:stop])
            for shard in self.shards
            if shard.reduction.is_first_copy
            for _, start, stop in shard.chunks
        ]
        squares = torch.zeros_like(self._step)
        if partial_norms:
            squares = torch.linalg.vector_norm(torch.stack(partial_norms)).square()
        return all_reduce(squares, self.reduction.mesh.group(*DIMENSIONS)).sqrt()

    @torch.no_grad()
    def step(self, *, gradient_norm: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Update every weight once; returns the gradient norm before clipping (0-d fp32, on the device).

        `gradient_norm` is the result of `gradient_norm()` where the caller has it already. Gradients are left
        unscaled. Raises RuntimeError when a `.grad` no longer points into its bucket.
        """
        self._check_gradients()
        self._follow_loaded_weights()
        norm = self.gradient_norm() if gradient_norm is None else gradient_norm
        clips = self.steps_taken >= self.clip_after and self.clip_norm != float("inf")
        factor = torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0) if clips else None
        self.steps_taken += 1
        self._step.fill_(self.steps_taken)
        gathers = [self._update(shard, factor) for shard in self.shards]
        for work in gathers:
            if work is not None:
                work.wait()
        return norm

    def _update(self, shard: OwnedShard, factor: Tensor | None) -> dist.Work | None:
        """Updates the owned slice of a bucket and starts sending it to the others."""
        weights = shard.weights if shard.master is None else shard.master
        for g, start, stop in shard.chunks:
            group = self.param_groups[g]
            gradient = shard.reduction.owned[start:stop].float()
            torch._fused_adamw_(
                [weights[start:stop]],
                [gradient if factor is None else gradient * factor],
                [shard.exp_avg[start:stop]],
                [shard.exp_avg_sq[start:stop]],
                [],
                [self._step],
                lr=float(group["lr"]),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
            if shard.master is not None:
                shard.weights[start:stop].copy_(weights[start:stop])
        if shard.reduction.group is None:
            return None
        return all_gather(shard.reduction.bucket.weights, shard.weights, shard.reduction.group)

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero the gradient buffers in place. Gradients are views of them, so `set_to_none=True` is a ValueError."""
        if set_to_none:
            raise ValueError("zero_grad(set_to_none=True) would cut the gradients off their buckets: call zero_grad()")
        self.reduction.zero()

    def state_dict(self) -> dict[str, Any]:
        """Step count, state and settings, keyed by parameter name; the tensors are views of the live state.

        It is this rank's part: a parameter of which the rank owns a range has that range, flat (perhaps empty).
        """
        return {
            "step": self.steps_taken,
            "state": {name: dict(self.state[parameter]) for parameter, name in self._names.items()},
            "param_groups": [
                {**group, "params": [self._names[parameter] for parameter in group["params"]]}
                for group in self.param_groups
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy in what `state_dict` returned; training then continues bitwise. Weights are not part of it.

        Raises ValueError, before anything is changed, when parameters, shapes or settings do not fit this optimizer.
        """
        own = self.state_dict()
        _check_state_fits(own, state_dict)
        for name, tensors in own["state"].items():
            for key, tensor in tensors.items():
                tensor.copy_(state_dict["state"][name][key])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        self.steps_taken = int(state_dict["step"])

    def full_state(self) -> dict[str, dict[str, Tensor]]:
        """Copies of exp_avg, exp_avg_sq and, for bf16 weights, master: whole, by the model's names; a collective."""
        local: dict[str, dict[str, Tensor]] = {}
        for shard in self.shards:
            for key, owned in shard.tensors().items():
                whole = shard.reduction.gathered(owned)
                named = {entry.name: entry.view(whole) for entry in shard.reduction.bucket.entries}
                local.setdefault(key, {}).update(named)
        return {key: self._compiled.full_tensors(tensors) for key, tensors in local.items()}

    def memory_report(self) -> MemoryReport:
        """Bytes of weights, gradients, masters and moments, per bucket; print it for a table."""
        return MemoryReport(tuple(_memory_of(shard) for shard in self.shards))

    def _follow_loaded_weights(self) -> None:
        """Weights that were loaded since the last step become the masters, where those are not what was rounded to
        them: else the update would undo the loading."""
        if self._loads_seen != self._compiled.weight_loads:
            self._loads_seen = self._compiled.weight_loads
            for shard in self.shards:
                if shard.master is not None:
                    part = shard.reduction
                    loaded = self._compiled.fp32_weights(part.bucket, part.start_at, part.stop_at)
                    is_same = shard.master.to(shard.weights.dtype) == shard.weights
                    shard.master.copy_(torch.where(is_same, shard.master, loaded))

    def _check_gradients(self) -> None:
        for part in self.reduction.parts:
            if not part.keeps_whole:
                continue  # there is no whole gradient to point into
            base, size = part.bucket.gradients.data_ptr(), part.bucket.gradients.element_size()
            for entry in part.bucket.entries:
                if not entry.parameter.requires_grad:
                    continue
                gradient = entry.parameter.grad
                if gradient is None or gradient.data_ptr() != base + entry.offset * size:
                    raise RuntimeError(
                        f"the gradient of {entry.name} is no longer a view of its bucket: "
                        "clear gradients with optimizer.zero_grad() and never assign .grad"
                    )


def _shard(part: BucketReduction, compiled: BucketedModel, group_of: Mapping[nn.Parameter, int]) -> OwnedShard:
    size, weights = part.stop_at - part.start_at, part.bucket.weights
    master = None
    if weights.dtype != torch.float32:
        master = compiled.fp32_weights(part.bucket, part.start_at, part.stop_at)
    exp_avg, exp_avg_sq = (weights.new_zeros(size, dtype=torch.float32) for _ in range(2))
    return OwnedShard(part, master, exp_avg, exp_avg_sq, tuple(_chunks(part, group_of)))


def _memory_of(shard: OwnedShard) -> BucketMemory:
    part = shard.reduction
    parameters = sum(entry.numel for entry in part.bucket.entries)
    gradients = part.bucket.gradients if part.keeps_whole else part.owned
    per_gradient = gradients.element_size() / (1 if part.keeps_whole else part.shards)
    per_state = (8 if shard.master is None else 12) / part.shards
    return BucketMemory(
        name=part.bucket.name,
        parameters=parameters,
        shards=part.shards,
        formula=parameters * (part.bucket.weights.element_size() + per_gradient + per_state),
        weights=part.bucket.weights.nbytes,
        gradients=gradients.nbytes,
        master=0 if shard.master is None else shard.master.nbytes,
        moments=shard.exp_avg.nbytes + shard.exp_avg_sq.nbytes,
    )


def _norm(gradient_R: Tensor) -> Tensor:
    """L2 norm of a flat tensor in fp32, in two levels, so that the error does not grow with the length."""
    gradient_R = gradient_R.float()
    whole = gradient_R.numel() // _NORM_ROW * _NORM_ROW
    rows = torch.linalg.vector_norm(gradient_R[:whole].view(-1, _NORM_ROW), dim=1)
    tail = torch.linalg.vector_norm(gradient_R[whole:])
    return torch.linalg.vector_norm(torch.cat([rows, tail[None]]))


def _chunks(part: BucketReduction, group_of: Mapping[nn.Parameter, int]) -> Iterator[tuple[int, int, int]]:
    """The trainable elements of the owned slice as (param group, start, stop), counted from its start: neighbours of
    one group are joined across the zero padding, which AdamW leaves at zero, then cut to `_CHUNK` elements."""
    runs: list[tuple[int | None, int, int]] = []
    for entry in part.bucket.entries:
        group, stop = group_of.get(entry.parameter), entry.offset + entry.numel
        if runs and runs[-1][0] == group:
            runs[-1] = (group, runs[-1][1], stop)
        else:
            runs.append((group, entry.offset, stop))
    for group, start, stop in runs:
        start, stop = max(start, part.start_at) - part.start_at, min(stop, part.stop_at) - part.start_at
        if group is not None:
            for first in range(start, stop, _CHUNK):
                yield group, first, min(first + _CHUNK, stop)


def _names_matching(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    matched: set[str] = set()
    for pattern in patterns:
        hits = {name for name in names if fnmatchcase(name, pattern)}
        if not hits:
            raise ValueError(f"no_decay pattern {pattern!r} matches no parameter: names look like {names[0]!r}")
        matched |= hits
    return matched


def _check_settings(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip_norm: float,
    clip_after: int,
    sharding: str,
    zero: int,
    reduce_dtype: torch.dtype,
) -> None:
    requirements = [
        (lr >= 0, f"lr is {lr}: it must be at least 0"),
        (all(0 <= beta < 1 for beta in betas), f"betas is {betas}: both must lie in [0, 1)"),
        (eps > 0, f"eps is {eps}: it must be greater than 0"),
        (weight_decay >= 0, f"weight_decay is {weight_decay}: it must be at least 0"),
        (clip_norm > 0, f"clip_norm is {clip_norm}: it must be greater than 0 (inf: never clip)"),
        (clip_after >= 0, f"clip_after is {clip_after}: it must be at least 0 steps"),
        (
            sharding in get_args(Sharding),
            f"sharding is {sharding!r}: it must be one of {', '.join(get_args(Sharding))}",
        ),
        (zero in (1, 2), f"zero is {zero}: it must be 1 (whole gradients) or 2 (sharded)"),
        (
            reduce_dtype in (torch.float32, torch.bfloat16),
            f"reduce_dtype is {reduce_dtype}: it must be torch.float32 or torch.bfloat16",
        ),
    ]
    for holds, sentence in requirements:
        if not holds:
            raise ValueError(sentence)


def _check_state_fits(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    missing, unknown = own["state"].keys() - saved["state"].keys(), saved["state"].keys() - own["state"].keys()
    if missing or unknown:
        what = f"lacks {min(missing)}" if missing else f"holds {min(unknown)}, which this model has not"
        raise ValueError(f"the optimizer state {what}: load the state of the same model")
    for name, tensors in own["state"].items():
        theirs = saved["state"][name]
        if tensors.keys() != theirs.keys():
            raise ValueError(
                f"the optimizer state of {name} has {sorted(theirs)} where {sorted(tensors)} is needed: "
                "it was saved by a run of another precision"
            )
        for key, tensor in tensors.items():
            if theirs[key].shape != tensor.shape:
                shapes = f"{tuple(theirs[key].shape)} where {tuple(tensor.shape)} is needed"
                raise ValueError(f"{key} of {name} has shape {shapes}: load the state of the same model")
    groups = [[group["params"] for group in state["param_groups"]] for state in (own, saved)]
    if groups[0] != groups[1]:
        raise ValueError("the optimizer state was saved with another no_decay: use the same patterns")
