"""GPT-2-style byte-level BPE in tiktoken: the conditions under which it gives the ids of the Hugging Face tokenizer."""

import re
import sys
import unicodedata
from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, pre_tokenizers

# The `ByteLevel` pre-tokenizer splits by these alternatives, then whitespace: \s+(?!\S)|\s+
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
LONGEST_PIECE = 1 << 14  # characters: tiktoken's regex gives up on a million, and older ones are quadratic
PIECE_END = re.compile(r"[^\W_]\W|\S\s")  # between these two characters a piece always ends
NOT_IN_UTF8 = (0xC0, 0xC1, *range(0xF5, 0x100))

INERT, MAY_CHANGE, UNPROVEN = 0, 1, 2  # what is known of a character: see `_characters`
EXAMINED = (range(0x80, 0xD800), range(0xE000, 0x10000), range(0x1F000, 0x1FB00))  # the last are emoji
HANGUL_VOWELS_AND_TAILS = (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))  # these compose by arithmetic, not by table


class Unprovable(Exception):
    """Says which property of a tokenizer is outside the family that is proven here."""


class AddedTokens:
    """The added tokens that match in a text: runs of spaces (length to id), and other literals.

    Raises Unprovable where a match could cross the whitespace before or after it, which is where texts are cut.
    """

    def __init__(self, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
        self.space_runs: dict[int, int] = {}
        self.literals: list[str] = []
        for token in config["added_tokens"]:
            content = token["content"]
            read_as_text = token["special"] and tokenizer.encode_special_tokens
            altered = token["single_word"] or token["lstrip"] or token["rstrip"]
            if not content.strip(" ") and not read_as_text and not altered:
                self.space_runs[len(content)] = token["id"]
            elif any(map(str.isspace, content)):
                raise Unprovable(f"its added token {content!r} contains whitespace")
            elif not read_as_text and (token["rstrip"] or not content.isascii()):
                raise Unprovable(f"its added token {content!r} takes the whitespace after it, or is not ASCII")
            elif not read_as_text:
                self.literals.append(content)
        lengths = sorted(self.space_runs)
        if lengths and lengths != list(range(lengths[0], lengths[-1] + 1)):
            raise Unprovable("its added tokens are runs of spaces of some lengths, but not of those between")


def check_pieces(config: dict[str, Any]) -> None:
    """Raises Unprovable unless text is split by the GPT-2 pattern, after NFC or no normalisation."""
    if (config["normalizer"] or {"type": "NFC"}) != {"type": "NFC"}:
        raise Unprovable(f"its normalizer is {config['normalizer']['type']}, neither NFC nor none")
    splitter = config["pre_tokenizer"] or {"type": "none"}
    if splitter["type"] != "ByteLevel" or splitter["add_prefix_space"] or not splitter["use_regex"]:
        raise Unprovable(f"its pre-tokenizer ({splitter['type']}) is not GPT-2's ByteLevel without a prefix space")
    if config["truncation"] or config["padding"]:
        raise Unprovable("it truncates or pads")


class FastEncoder:
    """Encodes one text with tiktoken, or says that it must not. Raises Unprovable, or ImportError without tiktoken.

    Hugging Face cuts a text at added tokens, splits each part by its pattern, then merges within each piece. Here one
    pattern does the first two: runs of spaces are its first alternative, whitespace stops where one begins, and no
    other alternative reaches past a first space. So a piece ends wherever Hugging Face cuts. Other added tokens are
    left to the reference.
    """

    def __init__(self, tokenizer: Tokenizer, config: dict[str, Any], added: AddedTokens) -> None:
        ranks = _ranks(tokenizer, config["model"])
        words, space = WORDS, r"\s"
        if added.space_runs:
            fewest, most = min(added.space_runs), max(added.space_runs)
            words, space = rf" {{{fewest},{most}}}|{WORDS}", rf"(?:(?! {{{fewest}}})\s)"
            # looked up whole; no other piece holds so many spaces in a row, so no merge sees these
            ranks |= {b" " * length: token for length, token in added.space_runs.items()}
        self._encode = _tiktoken(rf"{words}|{space}+(?!\S)|{space}+", ranks)
        self._literals = added.literals
        self._normalise: Callable[[str], str] = tokenizer.normalizer.normalize_str if config["normalizer"] else str
        self._known = _characters()

    def encode(self, text: str) -> list[int] | None:
        """The ids of `text`, or None where only the reference is known to be right (or to be fast)."""
        known = self._knowledge(text)
        if known == MAY_CHANGE:
            text = self._normalise(text)  # the reference's own: it decides what NFC is, in its version of Unicode
            known = self._knowledge(text)
        if known == UNPROVEN or _has_long_piece(text):
            return None
        return self._encode(text)

    def _knowledge(self, text: str) -> int:
        if any(literal in text for literal in self._literals):
            return UNPROVEN
        if text.isascii():
            return INERT
        codes_C = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        return int(self._known[codes_C].max())


def _tiktoken(pattern: str, ranks: dict[bytes, int]) -> Callable[[str], list[int]]:
    import tiktoken

    return tiktoken.Encoding("fast", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}).encode_ordinary


def _ranks(tokenizer: Tokenizer, model: dict[str, Any]) -> dict[bytes, int]:
    """The bytes and the merged tokens with their ids. Raises Unprovable unless merging by lowest id is merging by list.

    Hugging Face merges the leftmost pair that is earliest in its list; tiktoken the leftmost pair whose joined bytes
    have the lowest id, whichever tokens the pair is made of. Let ids ascend in the order of the list, and each token's
    own bytes encode to that token alone. Then both take the same steps. Suppose that they did so far, and that tiktoken
    now joins x and y to t, a pair that is not in the list. Nothing ever merged across the two ends of t's bytes, so
    encoding these alone passes through x, y too, and ends there: t would not encode to itself. The second condition
    also covers the piece that is a token as a whole, which tiktoken looks up before it merges anything.
    """
    if model["type"] != "BPE":
        raise Unprovable(f"its model is {model['type']}, not BPE")
    for option in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"):
        if model.get(option):
            raise Unprovable(f"its BPE model sets {option}")
    vocabulary = model["vocab"]
    byte_of = _byte_alphabet()
    if not byte_of.keys() <= vocabulary.keys():
        raise Unprovable("its vocabulary lacks bytes that UTF-8 has")
    merged = [left + right for left, right in model["merges"]]
    if any(not byte_of.keys() >= set(token) for token in merged):
        raise Unprovable("its merges join characters that stand for no byte")
    ids = [vocabulary[token] for token in merged]
    if any(later <= earlier for earlier, later in pairwise(ids)):
        raise Unprovable("its ids do not ascend in the order of the merges")
    for token in merged:
        if [part.id for part in tokenizer.model.tokenize(token)] != [vocabulary[token]]:
            raise Unprovable(f"its token {token!r} is not what its own bytes encode to")
    return {bytes(byte_of[c] for c in token): vocabulary[token] for token in [*byte_of, *merged]}


def _byte_alphabet() -> dict[str, int]:
    """The bytes of UTF-8 by the character that `ByteLevel` writes for them: the same, or one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    return {character: byte for character, byte in alphabet.items() if byte not in NOT_IN_UTF8}


def _has_long_piece(text: str) -> bool:
    """False only if every piece is shorter than LONGEST_PIECE: half as many characters always hold an end."""
    if len(text) < LONGEST_PIECE:
        return False
    window = LONGEST_PIECE // 2
    starts = range(0, len(text) - window + 1, window)
    return any(PIECE_END.search(text, start, start + window) is None for start in starts)


@cache
def _characters() -> NDArray[np.uint8]:
    """What is known of each code point: uint8 [0x110000].

    INERT: both regex engines put it in the same class (letter, number, whitespace, other), and NFC leaves any text of
    such characters as it is. MAY_CHANGE: the first holds only. UNPROVEN: the classes differ, or were not compared.
    """
    known_C = np.full(sys.maxunicode + 1, UNPROVEN, np.uint8)
    known_C[:0x80] = INERT
    examined = "".join(chr(code) for codes in EXAMINED for code in codes)
    codes_C = np.frombuffer(examined.encode("utf-32-le"), "<u4")
    changing = _composing()
    known_C[codes_C] = [MAY_CHANGE if c in changing or _may_change(c) else INERT for c in examined]
    known_C[[ord(c) for c in _classified_differently(examined)]] = UNPROVEN
    return known_C


def _may_change(c: str) -> bool:
    """Whether NFC may replace, reorder or not know the character.

    Normalisation is stable: for the characters of one version of Unicode no later version changes it, and a character
    that is unknown to a version is left alone. So this holds in the reference's version, too, older or newer.
    """
    return unicodedata.combining(c) > 0 or not unicodedata.is_normalized("NFC", c) or unicodedata.category(c) == "Cn"


def _composing() -> set[str]:
    """The characters that can compose with the one before them."""
    pairs = (unicodedata.decomposition(chr(code)).split() for code in range(0x80, 0x20000))  # ideographs come after
    composing = {int(pair[1], 16) for pair in pairs if len(pair) == 2 and pair[0][0] != "<"}
    return set(map(chr, composing.union(HANGUL_VOWELS_AND_TAILS)))


def _classified_differently(characters: str) -> Iterable[str]:
    """Those of `characters` that tiktoken's regex engine and that of `ByteLevel` do not put in the same class."""
    single_bytes = {bytes([byte]): byte for byte in range(256)}
    rest = set(characters)
    for pattern, known_member in ((r"\p{L}", "a"), (r"\p{N}", "1"), (r"\s", "\n"), (None, "!")):
        # tiktoken encodes what matches its pattern, and leaves out the rest
        members = bytes(_tiktoken(pattern, single_bytes)(characters)).decode() if pattern else "".join(sorted(rest))
        rest -= set(members)
        yield from _outside(members, known_member)


def _outside(characters: str, known_member: str) -> Iterable[str]:
    """Those that `ByteLevel` does not leave in one piece with a known member of their class."""
    if len(pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(known_member + characters)) == 1:
        return
    if len(characters) == 1:
        yield characters
        return
    yield from _outside(characters[: len(characters) // 2], known_member)
    yield from _outside(characters[len(characters) // 2 :], known_member)
