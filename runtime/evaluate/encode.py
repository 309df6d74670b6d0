"""Requests as token ids: where the context ends and the continuation begins, and what is cut from long ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from optimus_compiler.runtime.evaluate.tasks import Request, Task

Encode = Callable[[str], list[int]]  # text to ids, without special tokens


def encoder(tokenizer: Tokenizer) -> Encode:
    """A tokenizer's ids of running text: no special tokens."""
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


@dataclass(frozen=True)
class Row:
    """Token ids that a model reads, and those that it should predict after the last len(targets) of them."""

    ids: list[int]
    targets: list[int]


def encode(requests: Sequence[Request], tokenize: Encode, *, eos_id: int, max_length: int) -> list[Row]:
    """A row for each request, at most `max_length` tokens long.

    The text is encoded whole, so that tokens which cross the border come out as in running text; those after the
    context's own count as the continuation's (spaces that end the context go with it). Of a context that is too long
    the end stays; an empty one is an end of text. As lm-eval does it: the same requests give the same likelihoods.
    Raises ValueError for a continuation without tokens, or longer than `max_length`.
    """
    return [_row(*_divide(request, tokenize, eos_id), request, max_length) for request in requests]


def refuse_long(tasks: Sequence[Task], tokenize: Encode, max_length: int) -> None:
    """Raises the ValueError that `encode` will, without encoding more than what may be too long."""
    for task in tasks:
        for request in (request for question in task.questions for request in question.requests):
            if len(request.continuation.encode()) > max_length:  # a token has one byte at least
                encode([request], tokenize, eos_id=-1, max_length=max_length)


def row_of(context: Sequence[int], continuation: Sequence[int], max_length: int) -> Row:
    """The row of a continuation that has tokens, at most `max_length`, after a context that may be cut."""
    read = [*context, *continuation][-(max_length + 1) : -1]
    return Row(read, list(continuation))


def _divide(request: Request, tokenize: Encode, eos_id: int) -> tuple[list[int], list[int]]:
    whole = tokenize(request.context + request.continuation)
    context = request.context.rstrip()
    if not context:
        return ([eos_id], whole) if whole[:1] != [eos_id] else (whole[:1], whole[1:])
    before = len(tokenize(context))
    return whole[:before], whole[before:]


def _row(context: list[int], continuation: list[int], request: Request, max_length: int) -> Row:
    if not 0 < len(continuation) <= max_length:
        raise ValueError(
            f"the continuation {request.continuation[:40]!r} has {len(continuation)} tokens, and the model takes 1 to "
            f"{max_length}: leave that task out"
        )
    return row_of(context, continuation, max_length)
