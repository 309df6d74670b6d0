"""Requests as token ids: where the context ends and the continuation begins, and what is cut from long ones."""

from __future__ import annotations

from array import array
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

    ids: array[int]
    targets: array[int]


@dataclass(frozen=True)
class EncodedTask:
    """A task, and a row for each of its requests in order."""

    task: Task
    rows: list[Row]


def encode_tasks(
    tasks: Sequence[Task],
    tokenize: Encode,
    *,
    eos_id: int,
    max_length: int,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> list[EncodedTask]:
    """All tasks as rows of at most `max_length` tokens; progress("reading questions", tasks done, tasks in all).

    Raises ValueError, naming the task, for a choice that is longer than the model reads at once.
    """
    encoded = []
    for number, task in enumerate(tasks):
        progress("reading questions", number, len(tasks))
        requests = [request for question in task.questions for request in question.requests]
        try:
            encoded.append(EncodedTask(task, encode(requests, tokenize, eos_id=eos_id, max_length=max_length)))
        except ValueError as error:
            raise ValueError(f"{task.name}: {error}: leave that task out") from None
    return encoded


def encode(requests: Sequence[Request], tokenize: Encode, *, eos_id: int, max_length: int) -> list[Row]:
    """A row for each request, at most `max_length` tokens long.

    The continuation is what the whole text's tokens have beyond the number of the context's; spaces that end the
    context go with it. Of a context that is too long the end stays; an empty one is an end of text. As lm-eval does it:
    the same requests give the same rows. Raises ValueError for a continuation without tokens, or longer than
    `max_length`.
    """
    rows = []
    before: tuple[str, list[int]] = ("", [])  # choices of a question share their context
    for request in requests:
        context = request.context.rstrip()
        if before[0] != context:
            before = (context, tokenize(context))
        whole = tokenize(request.context + request.continuation)
        if context:
            read, continuation = before[1], whole[len(before[1]) :]
        elif whole[:1] == [eos_id]:
            read, continuation = whole[:1], whole[1:]
        else:
            read, continuation = [eos_id], whole
        rows.append(row_of(read, continuation, max_length))
    return rows


def row_of(context: Sequence[int], continuation: Sequence[int], max_length: int) -> Row:
    """The row of a continuation after a context (of one token at least), which may be cut.

    Raises ValueError for a continuation without tokens, or longer than `max_length`.
    """
    if not 0 < len(continuation) <= max_length:
        raise ValueError(f"a choice has {len(continuation)} tokens, and the model takes 1 to {max_length}")
    read = [*context, *continuation][-(max_length + 1) : -1]
    return Row(array("i", read), array("i", continuation))


def refuse_long(tasks: Sequence[Task], tokenize: Encode, max_length: int) -> None:
    """Raises the ValueError that `encode_tasks` will, encoding only what may be too long: a token has one byte at
    least."""
    for task in tasks:
        for question in task.questions:
            if any(len(request.continuation.encode()) > max_length for request in question.requests):
                encode_tasks([Task(task.name, (question,))], tokenize, eos_id=-1, max_length=max_length)
