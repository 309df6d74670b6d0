"""Reads the text field of a JSON object: of one that fits memory, or piece by piece of one that does not."""

import json
import re
from collections.abc import Iterator
from json import JSONDecodeError
from typing import IO

KINDS = {str: "a string", dict: "an object", list: "an array", bool: "a boolean", type(None): "null"}  # else a number
STARTS = {'"': str, "{": dict, "[": list, "t": bool, "f": bool, "n": type(None)}
MOST_NESTED = 900  # brackets open at a time: about what json.loads can follow
LONGEST_NUMBER = 4301  # characters; json.loads refuses integers above 4,300 digits


class TextFieldError(ValueError):
    """The line is JSON, and the text is not to be found in it."""

    @staticmethod
    def absent(field: str, found: str = "") -> "TextFieldError":
        """There is no such field; `found` names those that there are."""
        return TextFieldError(f"field {field!r} is absent" + (f" (found: {found})" if found else ""))

    @staticmethod
    def no_string(field: str, kind: str) -> "TextFieldError":
        """The field is something else."""
        return TextFieldError(f"field {field!r} must be a string and is {kind}")

    @staticmethod
    def surrogate(field: str) -> "TextFieldError":
        """The text is half of a character."""
        return TextFieldError(f"field {field!r} holds a lone surrogate, which is no character")


def text_of(line: str, field: str) -> str:
    """The string `field` of the JSON object `line`.

    Raises TextFieldError when there is none, and ValueError or RecursionError for a line that is not a JSON object.
    """
    record = json.loads(line)
    if not isinstance(record, dict):
        raise TextFieldError(f"a JSON object is needed, found {_kind(type(record))}")
    if field not in record:
        raise TextFieldError.absent(field, ", ".join(list(record)[:9])[:200])
    text = record[field]
    if not isinstance(text, str):
        raise TextFieldError.no_string(field, _kind(type(text)))
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TextFieldError.surrogate(field) from error
    return text


def copy_text(line: Iterator[str], field: str, copy: IO[bytes]) -> bool:
    """Writes the string `field` of the JSON object that the pieces of `line` make up to `copy`, as UTF-8.

    It accepts, refuses and decodes as `text_of` does (the last of duplicate fields counts) and holds no more than a
    piece and a number. Returns False for a blank line.
    """
    scanner = _Scanner(line)
    if not scanner.peek():
        return False
    if scanner.peek() != "{":
        kind = scanner.kind()
        scanner.skip_value()
        scanner.expect_end()
        raise TextFieldError(f"a JSON object is needed, found {kind}")
    fault: TextFieldError | None = TextFieldError.absent(field)
    scanner.expect("{")
    more = not scanner.accept("}")
    while more:
        if scanner.key(len(field) + 1) == field:
            fault = _copy_value(scanner, field, copy)
        else:
            scanner.skip_value()
        more = scanner.accept(",")
        if not more:
            scanner.expect("}")
    scanner.expect_end()
    if fault:
        raise fault
    return True


def _copy_value(scanner: "_Scanner", field: str, copy: IO[bytes]) -> TextFieldError | None:
    if scanner.peek() != '"':
        kind = scanner.kind()
        scanner.skip_value()
        return TextFieldError.no_string(field, kind)
    copy.seek(0)
    copy.truncate()
    fault = None
    for piece in scanner.string():
        try:
            copy.write(piece.encode("utf-8"))
        except UnicodeEncodeError:
            fault = TextFieldError.surrogate(field)
    return fault


def _kind(kind: type) -> str:
    return KINDS.get(kind, "a number")


class _Scanner:
    """A place in a JSON text that comes in pieces: what has been read is forgotten."""

    _BLANK = re.compile(r"[ \t\n\r]*")
    _WORD = re.compile(r"[-+.\w]*", re.ASCII)
    _OPEN_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{0,3})?\Z")
    _DECODER = json.JSONDecoder()

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces, self._held, self._at = pieces, "", 0

    def _more(self) -> bool:
        piece = next(self._pieces, "")
        self._held, self._at = self._held[self._at :] + piece, 0
        return bool(piece)

    def peek(self) -> str:
        """The next character that is not blank; "" at the end."""
        while True:
            match = self._BLANK.match(self._held, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._held):
                return self._held[self._at]
            if not self._more():
                return ""

    def accept(self, mark: str) -> bool:
        """Passes `mark` if it is next."""
        if self.peek() != mark:
            return False
        self._at += 1
        return True

    def expect(self, mark: str) -> None:
        """Passes `mark`, which must be next."""
        if not self.accept(mark):
            raise JSONDecodeError(f"Expecting {mark!r}", "", 0)

    def expect_end(self) -> None:
        """Nothing may follow."""
        if self.peek():
            raise JSONDecodeError("Extra data", "", 0)

    def kind(self) -> str:
        """What the next value looks like."""
        return _kind(STARTS.get(self.peek(), float))

    def key(self, limit: int) -> str:
        """Passes a key and its colon; returns its first `limit` characters."""
        key = ""
        for piece in self.string():
            key = (key + piece)[:limit]
        self.expect(":")
        return key

    def string(self) -> Iterator[str]:
        """Passes a string; gives it decoded, in pieces."""
        self.expect('"')
        high = ""  # the first half of a surrogate pair that a border between pieces splits
        closed = False
        while not closed:
            whole = self._held[self._at : self._whole_escapes()]
            text, end = self._DECODER.raw_decode(f'"{whole}"')
            closed = end < len(whole) + 2  # at a quote before the one put there
            self._at += end - 1 if closed else len(whole)
            if high and text:
                text = (high + text[0]).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass") + text[1:]
                high = ""
            if not closed and "\ud800" <= text[-1:] <= "\udbff":
                text, high = text[:-1], text[-1]
            yield text
            if not closed and not self._more():
                raise JSONDecodeError("Unterminated string", "", 0)
        yield high

    def _whole_escapes(self) -> int:
        """The end of what is held, less an escape that has only begun."""
        end = len(self._held)
        match = self._OPEN_ESCAPE.search(self._held, max(self._at, end - 5))
        if not match:
            return end
        before = self._held[self._at : match.start()]
        backslashes = len(before) - len(before.rstrip("\\"))
        return end if backslashes % 2 else match.start()  # an odd one escapes this backslash

    def skip_value(self) -> None:
        """Passes a value of any kind, which is checked all the same."""
        opened: list[str] = []  # the brackets that close what is open
        while True:
            start = self.peek()
            if start in ("{", "["):
                self.expect(start)
                end = "}" if start == "{" else "]"
                if len(opened) == MOST_NESTED:
                    raise JSONDecodeError(f"More than {MOST_NESTED} nested values", "", 0)
                if not self.accept(end):
                    opened.append(end)
                    if start == "{":
                        self.key(0)
                    continue
            elif start == '"':
                for _ in self.string():
                    pass
            else:
                self._skip_word()
            while opened and not self.accept(","):
                self.expect(opened.pop())
            if not opened:
                return
            if opened[-1] == "}":
                self.key(0)

    def _skip_word(self) -> None:
        """Passes a number, true, false or null."""
        word = ""
        while True:
            match = self._WORD.match(self._held, self._at)
            if match:
                word, self._at = word + match.group(), match.end()
            if len(word) > LONGEST_NUMBER:
                raise JSONDecodeError(f"A number of more than {LONGEST_NUMBER} characters", "", 0)
            if self._at < len(self._held) or not self._more():
                break
        json.loads(word)
