"""Stacks of this process's main thread, and whether it waits for its peers there."""

import re
import sys
import traceback
from collections.abc import Sequence

# Lines of a stack in which a process waits for others.
_COLLECTIVE = re.compile(
    r"wait_tensor|all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|barrier|batch_isend_irecv|"
    r"\bwork\.wait\(|\b(irecv|isend|recv|send)\b|gather_object|_wait\b"
)
INNERMOST = 6  # lines of a stack that say what a process does now


def stack_of(thread: int | None, depth: int | None = None) -> list[str]:
    """The Python stack of a thread (its `depth` innermost calls, or all), innermost last: "file:line name: source"."""
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return []
    summaries = traceback.extract_stack(frame, limit=depth)
    return [f"{each.filename}:{each.lineno} {each.name}: {each.line}" for each in summaries]


def waits_for_peers(stack: Sequence[str]) -> bool:
    """Whether a stack ends inside a collective."""
    return any(_COLLECTIVE.search(line) for line in stack[-INNERMOST:])
