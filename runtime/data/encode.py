"""Encodes texts by tiktoken where it provably gives the ids of the Hugging Face tokenizer, by the latter elsewhere."""

import json
import os
from collections.abc import Iterator
from itertools import zip_longest

from tokenizers import Tokenizer

from optimus_compiler.runtime.data.byte_level import AddedTokens, FastEncoder, Unprovable, check_pieces
from optimus_compiler.runtime.data.errors import DataError


class Encoder:
    """Gives the ids that `tokenizer.encode_batch_fast(texts, add_special_tokens=False)` gives, several times faster.

    `fast` says whether any document may take the fast path and `why_not` why none may ("" if fast).
    `fast_documents` and `reference_documents` count the texts that took each path.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.why_not = ""
        self.fast_documents = self.reference_documents = 0
        self._tokenizer = tokenizer
        self._cuts = False
        self._fast: FastEncoder | None = None
        config = json.loads(tokenizer.to_str())
        try:
            check_pieces(config)
            added = AddedTokens(tokenizer, config)
            self._cuts = True
            self._fast = FastEncoder(tokenizer, config, added)
        except Unprovable as unprovable:
            self.why_not = f"tiktoken may encode differently from this tokenizer: {unprovable}"
        except ImportError:
            self.why_not = "tiktoken is not installed: pip install 'optimus-compiler[tiktoken]'"

    @property
    def fast(self) -> bool:
        return self._fast is not None

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, no token added, specials read as the tokenizer is set to read them."""
        ids = [self._fast.encode(text) if self._fast else None for text in texts]
        left = [text for text, known in zip(texts, ids, strict=True) if known is None]
        self.fast_documents += len(texts) - len(left)
        self.reference_documents += len(left)
        rest: Iterator[list[int]] = iter(self.reference(left))
        return [next(rest) if known is None else known for known in ids]

    def reference(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text by the Hugging Face tokenizer alone."""
        # One worker is one core; and threads of the library would not survive a later fork of this process.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def check(self, text: str, ids: list[int]) -> None:
        """Raises DataError unless `ids` are those that the reference gives for `text`."""
        expected = self.reference([text])[0]
        if ids != expected:
            where = next(n for n, (a, b) in enumerate(zip_longest(ids, expected)) if a != b)
            raise DataError(
                f"tiktoken and the tokenizer disagree from token {where} on about a text that begins {text[:40]!r}: "
                f"uninstall tiktoken, delete what was tokenised and run again"
            )

    def safe_cut(self, text: str, limit: int) -> int | None:
        """The last position in 1..limit where `text` may be cut: the ids of both parts are those of the whole.

        That is before a space or newline which follows anything but whitespace: no piece, added token or composed
        character of this family of tokenizers crosses it, nor does what stands behind it change the pieces before.
        None where there is no such position, or the tokenizer is not of the family.
        """
        if not self._cuts:
            return None
        positions = range(min(limit, len(text) - 1), 0, -1)
        return next((p for p in positions if text[p] in " \n" and not _is_whitespace(text[p - 1])), None)


def _is_whitespace(character: str) -> bool:
    return character.isspace() or character == "\u180e"  # whitespace before Unicode 6.3
