"""Where a continuation begins among the tokens, and what is cut."""

from __future__ import annotations

import pytest

from optimus_compiler.runtime.evaluate.encode import Row, encode
from optimus_compiler.runtime.evaluate.tasks import Request

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


def rows(context: str, continuation: str, max_length: int = 50) -> Row:
    return encode([Request(context, continuation)], tokenize, eos_id=EOS, max_length=max_length)[0]


def test_the_last_target_is_not_read() -> None:
    assert rows("a bb", " ccc d") == Row([1, 3, 4], [4, 2])


def test_spaces_that_end_a_context_go_with_the_continuation() -> None:
    assert rows("a bb  ", "ccc") == Row([1, 3], [5])


def test_tokens_across_the_border_are_as_in_running_text() -> None:
    """The context alone has tokens [1, 3]; with what follows the second of them is longer, and is the context's."""
    assert rows("a ab", " ccc d") == Row([1, 7], [2])


def test_an_empty_context_is_an_end_of_text() -> None:
    assert rows("", " ccc d") == Row([EOS, 4], [4, 2])
    assert rows("  ", "ccc") == Row([EOS], [5])


def test_the_end_of_a_long_context_stays() -> None:
    assert rows("a bb ccc dddd", " eeeee ff", max_length=3) == Row([4, 5, 6][-3:], [6, 3])
    assert rows("a bb ccc dddd", " eeeee ff", max_length=2) == Row([5, 6], [6, 3])


def test_a_continuation_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"' eeeee ff' has 2 tokens, and the model takes 1 to 1: leave that task out"):
        rows("a", " eeeee ff", max_length=1)
    with pytest.raises(ValueError, match="has 0 tokens"):
        rows("a", "")
