"""FirstBackward: the first backward must give every parameter a gradient, or the compiled model is refused."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from optimus_compiler.runtime.buckets import Bucket


class FirstBackward:
    """Watches until one backward has been whole: a gradient that a pass or a backend lost would go unnoticed."""

    def __init__(self, buckets: Sequence[Bucket], backend: str) -> None:
        self.is_over = False
        self._entries = [entry for bucket in buckets for entry in bucket.entries]
        self._backend = backend
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def watch(self, loss: Tensor | None, buffers: Mapping[str, Tensor]) -> None:
        """Looks at the end of this loss's backward, if none has been whole yet. buffers: see `refuse_missing`."""
        if self.is_over or loss is None or not loss.requires_grad:
            return
        waiting = self.expect()
        every = set(waiting)

        def finish() -> None:
            if waiting != every:  # torch.autograd.grad accumulates nothing: wait for a backward
                self.refuse_missing(waiting, buffers)

        def begin(gradient: Tensor) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(finish)

        loss.register_hook(begin)

    def expect(self) -> set[str]:
        """The names of all trainable parameters here; each leaves the set when its gradient has come."""
        for hook in self._hooks:
            hook.remove()
        waiting = {entry.name for entry in self._entries}
        self._hooks = [entry.parameter.register_post_accumulate_grad_hook(lambda _, n=entry.name: waiting.discard(n))
                       for entry in self._entries]  # fmt: skip
        return waiting

    def refuse_missing(self, waiting: set[str], buffers: Mapping[str, Tensor]) -> None:
        """Raises RuntimeError if a gradient did not come: it is still waited for, or, where backward adds to a buffer
        itself and hooks run anyway, nothing was written there."""
        for hook in self._hooks:
            hook.remove()
        missing = waiting | {name for name, buffer in buffers.items() if buffer._version == 0}
        if missing:
            raise RuntimeError(
                f"{len(missing)} parameters got no gradient, {min(missing)} among them: the backend {self._backend} "
                "or a pass lost them"
            )
        self.is_over = True
