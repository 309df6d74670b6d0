"""Sums gradients over the ranks that share a parameter, bucket by bucket, while backward still runs (paper, 3.2).

Within a bucket every rank owns an equal slice, the one whose optimizer state it holds:

    backward adds local gradients  ->  reduce-scatter: SUM of all ranks in the owned slice  ->  divided by dp * ep * tp

Gradients of sharded parameters (experts) were summed over their own dimension by the collectives inside the graph; what
is left is the sum over the dimensions on which the parameter is replicated; and, where a weight is tied across stages
of a pipeline, the sum of both stages' gradients.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from optimus_compiler.mesh import Mesh
from optimus_compiler.runtime.buckets import Bucket
from optimus_compiler.runtime.collectives import add_from_peers, all_gather, all_reduce, reduce_scatter

Sharding = Literal["epso", "so", "none"]


def owners(state: tuple[str, ...], sharding: Sharding) -> tuple[str, ...]:
    """Of the mesh dimensions over which a state may be divided, those over which a sharding divides it."""
    dp = tuple(name for name in state if name == "dp")
    return {"epso": state, "so": dp, "none": ()}[sharding]


class GradientReduction:
    """The reduction of all buckets of a model.

    early: whether a bucket's reduction starts as soon as backward has left its segment; otherwise it waits for
    `finish`. Until an optimizer asks for shards nothing is reduced, but for the copies that `mean` makes.
    """

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh) -> None:
        self.mesh = mesh
        self.early = True
        self.is_clean = True  # all gradients are zero, as far as this process knows without looking
        self.parts: list[BucketReduction] = [BucketReduction(bucket, mesh, ()) for bucket in buckets]
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._latest: BucketReduction | None = None

    def shard(self, sharding: Sharding, zero: int, reduce_dtype: torch.dtype) -> None:
        """Divides the buckets over ranks, and reduces them during backward from now on. Gradients there are lost.

        zero: 1 keeps whole gradients until `zero()`, 2 only the owned slices (a bucket is whole within backward only,
        and reduced after each). reduce_dtype: of the gradients of bf16 weights; those of fp32 weights are fp32.
        """
        self.zero()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for part in self.parts:
            is_fp32 = part.bucket.weights.dtype == torch.float32
            part.bucket.set_gradient_dtype(torch.float32 if is_fp32 else reduce_dtype)
        self.parts = [self._divide(part.bucket, sharding, zero) for part in self.parts]
        if all(part.is_local for part in self.parts):
            return  # one rank: nothing to start early
        for part in self.parts:
            for entry in part.bucket.entries:
                after = partial(self._after_accumulation, part)
                self._hooks.append(entry.parameter.register_post_accumulate_grad_hook(after))

    def _divide(self, bucket: Bucket, sharding: Sharding, zero: int) -> "BucketReduction":
        owned_over = owners(bucket.state, sharding)
        kind = ShardedReduction if zero == 2 and self.mesh.size_of(*owned_over) > 1 else BucketReduction
        return kind(bucket, self.mesh, owned_over)

    def _after_accumulation(self, part: "BucketReduction", parameter: Tensor) -> None:
        part.missing.discard(parameter)
        if part.missing:
            return
        part.expect_all()
        if self.early or not part.keeps_whole:
            if self._latest is not None and not self._latest.keeps_whole:
                self._latest.collect()  # so that one whole bucket is in memory at a time
            self._latest = part
            with record_function(f"optimus::reduce {part.bucket.name}"):
                part.start()

    def reopen(self) -> None:
        """To be called before a backward adds to the gradients: those that were reduced become local sums again."""
        for part in self.parts:
            part.reopen()

    def finish(self) -> None:
        """Waits until every rank holds the mean gradients of the slices it owns."""
        with record_function("optimus::finish reduction"):
            for part in self.parts:
                part.finish()

    def zero(self) -> None:
        """Zeroes all gradients."""
        self.is_clean = True
        self._latest = None
        for part in self.parts:
            part.zero()


class BucketReduction:
    """One bucket: whole local gradients in bucket.gradients, of which the owned slice [start, stop) gets reduced."""

    keeps_whole = True  # between backward passes

    def __init__(self, bucket: Bucket, mesh: Mesh, owners: tuple[str, ...]) -> None:
        rest = tuple(name for name in bucket.replicated if name not in owners)
        self.bucket = bucket
        self.copied_over = rest  # dimensions whose ranks own the same slice
        self.shards = mesh.size_of(*owners)
        size = bucket.weights.numel() // self.shards
        self.start_at = mesh.index_in(*owners) * size
        self.stop_at = self.start_at + size
        self.group, self.rest, self.everyone = (mesh.group(*names) for names in (owners, rest, bucket.replicated))
        self.tied_ranks = [mesh.ranks_in("pp")[index] for index in bucket.stage_ranks]
        # how many ranks own the same slice, and whether this is the first of them
        self.copies = mesh.size_of(*rest) * len(self.tied_ranks)
        self.is_first_copy = mesh.index_in(*rest) == 0 and mesh.coordinate("pp") == bucket.stage_ranks[0]
        self.stages = mesh.group("pp")
        self.divisor = mesh.size_of("dp", "ep", "tp")
        self.is_reduced = False
        self.missing: set[Tensor] = set()
        self._work: dist.Work | None = None
        self.expect_all()

    @property
    def is_local(self) -> bool:
        """Whether no other rank has anything to do with this bucket."""
        return self.everyone is None and self.divisor == 1 and len(self.tied_ranks) == 1

    @property
    def owned(self) -> Tensor:
        """The owned slice of the gradients, flat; the global mean once `finish` has returned."""
        return self.bucket.gradients[self.start_at : self.stop_at]

    def expect_all(self) -> None:
        """All parameters' gradients are to come in the next backward."""
        self.missing = {entry.parameter for entry in self.bucket.entries}

    def start(self) -> None:
        """Starts the sum over the ranks; backward goes on meanwhile."""
        if self.group is not None:
            self._work = reduce_scatter(self.bucket.gradients, self.owned, self.group)
        elif self.rest is not None:
            self._work = dist.all_reduce(self.owned, group=self.rest, async_op=True)

    def collect(self) -> None:
        """Waits until the sum over the ranks that own slices is in the owned one."""
        if self._work is None:
            self.start()
        self._wait()

    def finish(self) -> None:
        """Waits for the sum over all ranks, and divides it."""
        if self.is_reduced:
            return
        self.collect()
        if self.group is not None:
            all_reduce(self.owned, self.rest)
        add_from_peers(self.owned, self.tied_ranks, self.stages)
        if self.divisor > 1:
            self.owned.div_(self.divisor)
        self.is_reduced = True

    def reopen(self) -> None:
        """Before a backward adds to gradients that were reduced: the next sum must count what is there once."""
        if self._work is not None:
            self.finish()
        if self.is_reduced:
            self.bucket.gradients[: self.start_at].zero_()
            self.bucket.gradients[self.stop_at :].zero_()
            self._undo_division()

    def zero(self) -> None:
        """Zeroes the gradients, after what may be on its way."""
        self._wait()
        self.bucket.gradients.zero_()
        self.is_reduced = False
        self.expect_all()

    def mean(self) -> Tensor:
        """The global mean gradients of the whole bucket, a flat copy [numel]; a collective."""
        if self._work is not None:
            self.finish()
        if not self.is_reduced:
            whole = all_reduce(self.bucket.gradients.clone(), self.everyone)
            return add_from_peers(whole, self.tied_ranks, self.stages).div_(self.divisor)
        return self.gathered(self.owned)

    def gathered(self, owned: Tensor) -> Tensor:
        """A flat copy [numel] of what all ranks own, each a slice like this rank's `owned`; a collective."""
        if self.group is None:
            return owned.clone()
        whole = owned.new_empty(self.bucket.weights.numel())
        work = all_gather(whole, owned, self.group)
        if work is not None:
            work.wait()
        return whole

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _undo_division(self) -> None:
        self.owned.mul_(self.divisor / self.copies)
        self.is_reduced = False


class ShardedReduction(BucketReduction):
    """One bucket of which only the owned slice is kept (ZeRO 2): it is whole from backward to reduce-scatter."""

    keeps_whole = False

    def __init__(self, bucket: Bucket, mesh: Mesh, owners: tuple[str, ...]) -> None:
        super().__init__(bucket, mesh, owners)
        bucket.release_gradients(bucket.gradients.dtype)
        self._owned = bucket.weights.new_zeros(self.stop_at - self.start_at, dtype=bucket.gradients.dtype)
        self._whole: Tensor | None = None  # while a sum is on its way

    @property
    def owned(self) -> Tensor:
        return self._owned

    def start(self) -> None:
        assert self.group is not None  # a bucket that nobody shares is kept whole
        self._whole = torch.zeros_like(self.bucket.weights, dtype=self._owned.dtype)
        for entry in self.bucket.entries:
            entry.view(self._whole).copy_(entry.parameter.grad)  # type: ignore[arg-type]
            entry.parameter.grad = None
        self._work = reduce_scatter(self._whole, self._whole[self.start_at : self.stop_at], self.group)

    def collect(self) -> None:
        """Adds the slice that has arrived to those of earlier backward passes, and lets the whole bucket go."""
        self._wait()
        if self._whole is not None:
            self._owned += self._whole[self.start_at : self.stop_at]
            self._whole = None

    def reopen(self) -> None:
        if self.is_reduced:
            self._undo_division()

    def zero(self) -> None:
        super().zero()
        self._whole = None
        for entry in self.bucket.entries:
            entry.parameter.grad = None
        self._owned.zero_()

    def mean(self) -> Tensor:
        self.finish()
        return self.gathered(self._owned)
