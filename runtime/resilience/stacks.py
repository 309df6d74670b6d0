"""Stacks of this process's main thread, and whether it waits for its peers there."""

import linecache
import re
import sys
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
    lines: list[str] = []
    while frame is not None and (depth is None or len(lines) < depth):
        file, number = frame.f_code.co_filename, frame.f_lineno
        # not by way of traceback, which asks the file system about every file, every time
        source = linecache.getline(file, number, frame.f_globals).strip()
        lines.append(f"{file}:{number} {frame.f_code.co_name}: {source}")
        frame = frame.f_back
    return lines[::-1]


def waits_for_peers(stack: Sequence[str]) -> bool:
    """Whether a stack ends inside a collective."""
    return any(_COLLECTIVE.search(line) for line in stack[-INNERMOST:])
