"""A JSON line read in pieces is accepted, refused and decoded as json.loads does it, wherever the pieces are cut."""

import io
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimus_compiler.runtime.data.json_line import LONGEST_NUMBER, MOST_NESTED, TextFieldError, copy_text, text_of


def in_pieces(pieces: Sequence[str], field: str = "text") -> str:
    """The text that is copied, or the class of the fault: "JSON", or the words of a TextFieldError."""
    copy = io.BytesIO()
    try:
        assert copy_text(iter([piece for piece in pieces if piece]), field, copy)
    except TextFieldError as error:
        return str(error)
    except ValueError:
        return "JSON"
    return "text: " + copy.getvalue().decode("utf-8")


def whole(line: str, field: str = "text") -> str:
    try:
        return "text: " + text_of(line, field)
    except TextFieldError as error:
        return str(error).split(" (found")[0]
    except (ValueError, RecursionError):
        return "JSON"


GOOD = [
    '{"text": "plain"}',
    ' \t{ "id" : "1" , "text" : "a\\n\\"b\\" \\\\ \\/ \\b\\f\\r\\t" }\r\n',
    r'{"text": "\\\\", "a": "\\"}',
    r'{"text": "\\ud83d\ude00 \\"}'.replace(r"\ude00", ""),
    r'{"text": "pair \ud83d\ude00 and \uD83D\uDE00\u00e9\u0000"}',
    '{"text": "raw 😀 漢字 é\u2028 \x7f"}',
    '{"text": "", "other": "\\ud800"}',
    '{"text": "first", "text": "last"}',
    '{"text": "\\ud800", "text": "last"}',
    '{"te\\u0078t": "an escaped name"}',
    '{"texts": 1, "tex": 2, "text": "x", "meta": {"text": "inner", "a": {}, "b": []}}',
    '{"n": [0, -1, 1.5, -0.5e+10, 1E-3, true, false, null, NaN, Infinity, -Infinity, {"a": [[], [{}]]}], "text": "x"}',
]
BAD = [
    '{"text": null}',
    '{"text": 3}',
    '{"text": {"text": "x"}}',
    '{"text": ["x"], "a": 1}',
    '{"text": true}',
    '{"text": "first", "text": 1}',
    '{"other": "x"}',
    "{}",
    '{"text": "a\\ud800"}',
    '{"text": "\\udc00\\ud800"}',
    '{"text": "\\ud83d\\ud83d\\ude00"}',
    '"text"',
    "[1, 2]",
    "12",
    "null",
    '{"text": "half',
    '{"text": "half\\',
    '{"text": "half\\u12',
    '{"text": "half\\ud83d',
    '{"text": "whole"',
    '{"text": "whole",',
    '{"text": "whole",}',
    '{"text": "whole"} x',
    '{"text": "whole"}{}',
    '{"text" "whole"}',
    '{text: "whole"}',
    "{'text': 'whole'}",
    '{"text": "a\nb"}',
    '{"text": "a\x00b"}',
    '{"text": "a\\xb"}',
    '{"text": "a\\u12g4"}',
    '{"n": 01, "text": "x"}',
    '{"n": 1., "text": "x"}',
    '{"n": -, "text": "x"}',
    '{"n": +1, "text": "x"}',
    '{"n": tru, "text": "x"}',
    '{"n": truefalse, "text": "x"}',
    '{"n": 1 2, "text": "x"}',
    '{"n": [1 2], "text": "x"}',
    '{"n": [1,], "text": "x"}',
    '{"n": [1}, "text": "x"}',
    '{"n": {1: 2}, "text": "x"}',
    '{"n": {"a"}, "text": "x"}',
    '{"n": , "text": "x"}',
    '{"n": \x0c1, "text": "x"}',
    '{"n": ٣, "text": "x"}',
    "{",
    "nul",
]


@pytest.mark.parametrize("line", GOOD + BAD)
def test_every_cut_gives_what_json_gives(line: str) -> None:
    expected = whole(line)
    assert expected.startswith("text: ") == (line in GOOD)
    assert in_pieces(list(line)) == expected
    for cut in range(len(line)):
        assert in_pieces([line[:cut], line[cut:]]) == expected


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(
    record=st.dictionaries(st.sampled_from(["text", "id", "a\\b", "é"]), st.text() | _VALUES, max_size=4),
    ascii_only=st.booleans(),
    damage=st.none()
    | st.tuples(st.integers(0, 200), st.sampled_from(['"', "\\", "{", "}", "]", ",", "\\u", "\n", "0", ""])),
    size=st.integers(1, 9),
)
def test_generated_and_damaged_lines_give_what_json_gives(
    record: dict, ascii_only: bool, damage: tuple[int, str] | None, size: int
) -> None:
    line = json.dumps(record, ensure_ascii=ascii_only)
    if damage:
        at = damage[0] % (len(line) + 1)
        line = line[:at] + damage[1] + line[at + 1 :]
    assert in_pieces([line[i : i + size] for i in range(0, len(line), size)]) == whole(line)


def test_a_blank_line_is_no_document() -> None:
    assert copy_text(iter([" ", "\t\r", "\n"]), "text", io.BytesIO()) is False
    assert copy_text(iter([]), "text", io.BytesIO()) is False


def test_nesting_and_numbers_are_bounded() -> None:
    """What json.loads refuses for its depth or its digits is refused without holding it."""
    deep = "[" * MOST_NESTED + "]" * MOST_NESTED
    assert in_pieces([f'{{"n": {deep}, "text": "x"}}']) == "text: x"
    assert in_pieces([f'{{"n": [{deep}], "text": "x"}}']) == "JSON"
    assert in_pieces(['{"n": ', "[" * 100_000]) == whole('{"n": ' + "[" * 100_000) == "JSON"
    digits = "9" * (LONGEST_NUMBER - 1)
    for number, expected in ((digits, "text: x"), ("-" + digits, "text: x"), (digits + "9", "JSON")):
        assert in_pieces(['{"n": ', number[:7], number[7:], ', "text": "x"}']) == expected
        assert whole(f'{{"n": {number}, "text": "x"}}') == expected


def test_the_found_fields_are_named() -> None:
    with pytest.raises(TextFieldError, match=r"field 'body' is absent \(found: id, text\)"):
        text_of('{"id": 1, "text": "x"}', "body")
    with pytest.raises(TextFieldError, match="field 'text' must be a string and is an array"):
        text_of('{"text": []}', "text")
