"""Where a continuation begins among the tokens, and what is cut."""

from __future__ import annotations

import pytest

from optimus_compiler.runtime.evaluate.encode import encode, encode_tasks, refuse_long
from optimus_compiler.runtime.evaluate.tasks import Question, Request, Task

EOS = 0


def tokenize(text: str) -> list[int]:
    """A token for each word with the spaces before it: its length; "ab" ends no word."""
    ids: list[int] = []
    word = ""
    for character in text:
        if character == " " and word.strip() and not word.endswith("ab"):
            ids.append(len(word))
            word = ""
        word += character
    return [*ids, len(word)] if word else ids


def rows(context: str, continuation: str, max_length: int = 50) -> tuple[list[int], list[int]]:
    (row,) = encode([Request(context, continuation)], tokenize, eos_id=EOS, max_length=max_length)
    return list(row.ids), list(row.targets)


def test_the_last_target_is_not_read() -> None:
    assert rows("a bb", " ccc d") == ([1, 3, 4], [4, 2])


def test_spaces_that_end_a_context_go_with_the_continuation() -> None:
    assert rows("a bb  ", "ccc") == ([1, 3], [5])


def test_a_token_across_the_border_belongs_to_neither() -> None:
    """The context alone has tokens [1, 3], the text [1, 7, 2]: the 7 holds some of the answer, so it is not read."""
    assert rows("a ab", " ccc d") == ([1, 3], [2])


def test_an_empty_context_is_an_end_of_text() -> None:
    assert rows("", " ccc d") == ([EOS, 4], [4, 2])
    assert rows("  ", "ccc") == ([EOS], [5])


def test_the_end_of_a_long_context_stays() -> None:
    assert rows("a bb ccc dddd", " eeeee ff", max_length=3) == ([4, 5, 6], [6, 3])
    assert rows("a bb ccc dddd", " eeeee ff", max_length=2) == ([5, 6], [6, 3])


def test_a_continuation_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="a choice has 2 tokens, and the model takes 1 to 1"):
        rows("a", " eeeee ff", max_length=1)
    with pytest.raises(ValueError, match="a choice has 0 tokens"):
        rows("a", "")
    long = Task("piqa", (Question((Request("a", " b"), Request("a", " eeeee ff")), (), 0),))
    sentence = "piqa: a choice has 2 tokens, and the model takes 1 to 1: leave that task out"
    with pytest.raises(ValueError, match=sentence):
        encode_tasks([long], tokenize, eos_id=EOS, max_length=1)
    with pytest.raises(ValueError, match=sentence):
        refuse_long([long], tokenize, 1)
    refuse_long([long], tokenize, 2)


def test_each_distinct_context_is_encoded_once() -> None:
    asked: list[str] = []

    def count(text: str) -> list[int]:
        asked.append(text)
        return tokenize(text)

    requests = [Request("a bb", " c"), Request("a bb", " dd"), Request("a", " dd")]
    encode(requests, count, eos_id=EOS, max_length=9)
    assert asked == ["a bb", "a bb c", "a bb dd", "a", "a dd"]
