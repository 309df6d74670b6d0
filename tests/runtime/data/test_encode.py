"""The fast path gives the reference's ids on every text, or leaves the text to the reference; cuts change no id."""

import json
import random
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from optimus_compiler.runtime.data import byte_level
from optimus_compiler.runtime.data.encode import Encoder
from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.data.text_tokenizer import TextTokenizer
from tests.byte_level import train_byte_level

OLMOE = Path(__file__).parents[3] / "../shared/tokenizer/olmoe.json"
Edit = Callable[[dict[str, Any]], object]

SPACES = [" ", "  ", "   ", " " * 9, "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "\u00a0", "\u2003", "\u2028", "\u3000"]
SPACES += ["\u0085", "\u180e", "\u200b", "\ufeff", "\x1c", "\x0b", "\x00"]
WORDS = [
    "'s",
    "'S",
    "'ll",
    "don't",
    "''s",
    "\u2019s",
    "the",
    " the",
    "The",
    "ing",
    "=====",
    "...",
    "__init__",
    "12",
    "1",
]
WORDS += ["<|endoftext|>", "<pad>", "<|endoftext", "|||KEY|||", "|||", "||", "abab", "aaaa"]
WORDS += ["e\u0301", "\u0301", "\u0323\u0307", "\u1161", "\u11a8", "\uac00", "\u0958", "\u212b", "\u1fef", "\u0344"]
WORDS += ["\u08d3\u0304", "\u09fe", "\u0ccb", "\U0001f469\u200d\U0001f467", "\U0001f1eb\U0001f1f7", "\ufe0f", "\u00bd"]
BLOCKS = [
    0x20,
    0x20,
    0xA0,
    0x250,
    0x370,
    0x400,
    0x5D0,
    0x630,
    0x8C0,
    0x910,
    0x9B0,
    0xE00,
    0xF70,
    0x1100,
    0x1E00,
    0x2030,
]
BLOCKS += [0x20D0, 0x2460, 0x3040, 0x3090, 0x4E00, 0xAC00, 0xE000, 0xFA00, 0xFB00, 0xFE00, 0xFF40, 0x1D400, 0x1F600]
BLOCKS += [0x16D60, 0x2F800, 0xE0000]


def awkward_text(rng: random.Random) -> str:
    def part() -> str:
        kind = rng.random()
        if kind < 0.3:
            return rng.choice(WORDS)
        if kind < 0.6:
            return rng.choice(SPACES) * rng.choice([1, 1, 1, 2, 40])
        if kind < 0.8:
            return "".join(rng.choices("abcdefgThe", k=rng.randint(1, 9)))
        first = rng.choice(BLOCKS)
        return "".join(chr(rng.randrange(first, first + 0x40)) for _ in range(rng.randint(1, 6)))

    return "".join(part() for _ in range(rng.randint(1, 12)))


AWKWARD = [awkward_text(random.Random(number)) for number in range(2500)]


def train(path: Path, normalizer: normalizers.Normalizer | None, added: list[AddedToken]) -> Path:
    """Byte-level BPE of about 400 tokens of the texts above."""
    tokenizer = train_byte_level(AWKWARD, 400, ["<pad>", "<|endoftext|>"], normalizer)
    tokenizer.add_tokens(added)
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def like_olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NFC, added runs of two to eight spaces, and an added token of another kind."""
    added = [AddedToken(" " * length, normalized=True) for length in range(2, 9)]
    added.append(AddedToken("|||KEY|||", normalized=True))
    return train(tmp_path_factory.mktemp("nfc") / "tokenizer.json", normalizers.NFC(), added)


@pytest.fixture(scope="session")
def like_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No normalisation and no added tokens but the special ones."""
    return train(tmp_path_factory.mktemp("plain") / "tokenizer.json", None, [])


@pytest.fixture(scope="session")
def long_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NFC, added runs of four to six spaces only, and tokens that match as whole words or take the space before."""
    added = [AddedToken(" " * length, normalized=True) for length in range(4, 7)]
    added += [AddedToken("the", single_word=True), AddedToken("__init__", lstrip=True, normalized=False)]
    return train(tmp_path_factory.mktemp("runs") / "tokenizer.json", normalizers.NFC(), added)


@pytest.fixture(scope="session", params=["like_olmoe", "like_gpt2", "long_runs", "olmoe"])
def encoder(request: pytest.FixtureRequest) -> Encoder:
    pytest.importorskip("tiktoken")
    if request.param != "olmoe":
        return load(request.getfixturevalue(request.param))
    if not OLMOE.exists():
        pytest.skip(f"{OLMOE} is absent")
    return load(OLMOE)


def load(path: Path) -> Encoder:
    return Encoder(TextTokenizer.load(path, "<|endoftext|>").tokenizer)


def edited(path: Path, edit: Edit, tmp_path: Path) -> Encoder:
    """The encoder of the tokenizer file with its JSON changed."""
    config = json.loads(path.read_text(encoding="utf-8"))
    edit(config)
    (tmp_path / "edited.json").write_text(json.dumps(config), encoding="utf-8")
    return load(tmp_path / "edited.json")


def test_gives_the_ids_of_the_reference_on_awkward_texts(encoder: Encoder) -> None:
    assert encoder.fast
    assert encoder.why_not == ""
    before = encoder.fast_documents
    assert encoder.encode(AWKWARD) == encoder.reference(AWKWARD)
    assert encoder.fast_documents - before > len(AWKWARD) // 2


def test_gives_the_ids_of_the_reference_on_every_short_mix_of_spaces(encoder: Encoder) -> None:
    texts = [f"{a}{b}{c}{d}" for a in ("", "a", "'s") for b in SPACES for c in SPACES for d in ("", "b", "!", " 1")]
    assert encoder.encode(texts) == encoder.reference(texts)


@pytest.mark.parametrize(
    ("text", "fast"),
    [
        ("plain text", True),
        ("an end <|endoftext|> in a text", True),
        ("spaces" + " " * 61 + "between", True),
        ("na\u00efve \u2014 \u6f22\u5b57 \U0001f600", True),
        ("composes: e\u0301, reorders: a\u0323\u0307", True),
        ("", True),
        ("a token |||KEY|||", False),
        ("a token by NFC |||\u212aEY|||", False),
        ("a rare ideograph \U00020000", False),
        ("word" * 5000, False),
        ("\n" * 20000, False),
        (("word" * 1000 + " ") * 5, True),
    ],
)
def test_leaves_only_doubtful_texts_to_the_reference(like_olmoe: Path, text: str, fast: bool) -> None:
    pytest.importorskip("tiktoken")
    encoder = load(like_olmoe)
    assert encoder.encode([text]) == encoder.reference([text])
    assert (encoder.fast_documents, encoder.reference_documents) == (int(fast), int(not fast))


def test_keeps_the_order_of_texts_on_both_paths(like_olmoe: Path) -> None:
    pytest.importorskip("tiktoken")
    encoder = load(like_olmoe)
    texts = ["one", "|||KEY|||", "two", "three |||KEY|||"]
    assert encoder.encode(texts) == [encoder.reference([text])[0] for text in texts]
    assert (encoder.fast_documents, encoder.reference_documents) == (2, 2)


def swap_two_merged_ids(config: dict[str, Any]) -> None:
    vocabulary = config["model"]["vocab"]
    first, second = ("".join(merge) for merge in config["model"]["merges"][5:7])
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def add(content: str, **changes: bool) -> Edit:
    def edit(config: dict[str, Any]) -> None:
        token = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        config["added_tokens"].append(token | changes | {"id": 1000, "content": content})

    return edit


@pytest.mark.parametrize(
    ("edit", "why_not"),
    [
        (lambda config: config.update(normalizer={"type": "Lowercase"}), "normalizer is Lowercase"),
        (lambda config: config["pre_tokenizer"].update(add_prefix_space=True), "pre-tokenizer"),
        (lambda config: config["pre_tokenizer"].update(use_regex=False), "pre-tokenizer"),
        (lambda config: config.update(pre_tokenizer={"type": "Whitespace"}), "pre-tokenizer"),
        (lambda config: config["model"].update(ignore_merges=True), "ignore_merges"),
        (lambda config: config["model"].update(unk_token="<pad>"), "unk_token"),
        (lambda config: config["model"]["vocab"].pop("!"), "lacks bytes"),
        (swap_two_merged_ids, "ids do not ascend"),
        (add("\t\t"), "contains whitespace"),
        (add("two words"), "contains whitespace"),
        (add("<b>", rstrip=True), "takes the whitespace after it"),
        (add("\u00e9t\u00e9"), "not ASCII"),
        (add(" " * 12), "runs of spaces of some lengths"),
    ],
)
def test_a_tokenizer_outside_the_proof_is_left_to_the_reference(
    like_olmoe: Path, tmp_path: Path, edit: Edit, why_not: str
) -> None:
    pytest.importorskip("tiktoken")
    encoder = edited(like_olmoe, edit, tmp_path)
    assert not encoder.fast
    assert why_not in encoder.why_not
    assert encoder.encode(AWKWARD[:50]) == encoder.reference(AWKWARD[:50])
    assert (encoder.fast_documents, encoder.reference_documents) == (0, 50)


def test_a_token_that_its_own_bytes_do_not_encode_to_is_noticed() -> None:
    """With b+c before a+b, "abc" ends as a, bc for the list of merges; tiktoken would join these, or look "abc" up."""
    pytest.importorskip("tiktoken")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "bc", "ab", "abc"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("b", "c"), ("a", "b"), ("ab", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder = Encoder(tokenizer)
    assert "its token 'abc' is not what its own bytes encode to" in encoder.why_not
    assert encoder.encode(["abc"]) == [[vocabulary["a"], vocabulary["bc"]]]


def test_specials_that_are_read_as_tokens_go_to_the_reference(like_olmoe: Path) -> None:
    pytest.importorskip("tiktoken")
    encoder = Encoder(Tokenizer.from_file(str(like_olmoe)))
    texts = ["a <|endoftext|> b", "a b"]
    assert encoder.encode(texts) == encoder.reference(texts)
    assert (encoder.fast_documents, encoder.reference_documents) == (1, 1)


def test_without_tiktoken_it_says_what_to_install(like_olmoe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    encoder = load(like_olmoe)
    assert not encoder.fast
    assert encoder.why_not == "tiktoken is not installed: pip install 'optimus-compiler[tiktoken]'"
    assert encoder.encode(["some text"]) == encoder.reference(["some text"])
    assert encoder.safe_cut("some text", 5) == 4


def test_check_names_the_first_token_that_differs(like_olmoe: Path) -> None:
    encoder = load(like_olmoe)
    [ids] = encoder.reference(["some text to check"])
    encoder.check("some text to check", ids)
    for wrong, where in (([*ids[:3], 0, *ids[4:]], 3), (ids[:-1], len(ids) - 1), ([*ids, 1], len(ids))):
        with pytest.raises(DataError, match=f"from token {where} on about a text that begins 'some text to check'"):
            encoder.check("some text to check", wrong)


def test_the_ids_of_two_parts_are_those_of_the_whole(encoder: Encoder) -> None:
    rng = random.Random(0)
    cuts = [(text, encoder.safe_cut(text, rng.randint(1, len(text)))) for text in AWKWARD]
    parts = [(text, text[:cut], text[cut:]) for text, cut in cuts if cut]
    assert len(parts) > 500
    wholes, starts, ends = (encoder.reference(list(column)) for column in zip(*parts, strict=True))
    assert wholes == [start + end for start, end in zip(starts, ends, strict=True)]


def test_cuts_at_the_last_safe_place(like_olmoe: Path) -> None:
    encoder = load(like_olmoe)
    assert encoder.safe_cut("ab cd ef", 5) == 5
    assert encoder.safe_cut("ab cd ef", 4) == 2
    assert encoder.safe_cut("ab cd ef", 100) == 5
    assert encoder.safe_cut("ab  cd", 4) == 2  # never within a run of spaces
    assert encoder.safe_cut("ab\u00a0\ncd", 5) is None
    assert encoder.safe_cut("abcdef", 5) is None
    assert encoder.safe_cut(" ab", 2) is None
    assert encoder.safe_cut("", 5) is None


def test_does_not_cut_for_an_unknown_tokenizer(like_olmoe: Path, tmp_path: Path) -> None:
    unknown = edited(like_olmoe, lambda config: config.update(normalizer={"type": "Lowercase"}), tmp_path)
    assert unknown.safe_cut("ab cd ef", 5) is None


def test_texts_of_inert_characters_are_unchanged_by_the_references_nfc() -> None:
    pytest.importorskip("tiktoken")
    inert = [chr(code) for code in (byte_level._characters() == byte_level.INERT).nonzero()[0]]
    assert len(inert) > 60_000
    assert {"e", "\u00e9", "\u6f22", "\uac00", "\u0416", "\U0001f600"} < set(inert)
    # one that reorders would change place with a mark of the highest class before it or of the lowest after it
    text = "".join(f"\u0345{c}\u0334\n" for c in inert)
    assert normalizers.NFC().normalize_str(text) == text
    for seed in range(3):
        random.Random(seed).shuffle(inert)
        text = "".join(inert)
        assert normalizers.NFC().normalize_str(text) == text


def test_all_composing_characters_are_known() -> None:
    """They are sought below U+20000: beyond, no character is composed of two."""
    decompositions = [unicodedata.decomposition(chr(code)).split() for code in range(0x20000, 0x30000)]
    assert max(map(len, decompositions)) == 1
    composing = byte_level._composing()
    assert {"\u0301", "\u3099", "\u09be", "\u1161", "\u11c2", "\U000110ba"} < composing
    assert not {"a", "\u0334", "\u11a7"} & composing


def test_finds_the_characters_of_another_class() -> None:
    assert list(byte_level._outside("\u00e9a1!b", "a")) == ["1", "!"]
    assert list(byte_level._outside("\u00b2\u0663x", "1")) == ["x"]
    assert list(byte_level._outside("\u2003\n", "\n")) == []


def test_a_character_that_the_engines_classify_differently_goes_to_the_reference(
    like_olmoe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tiktoken")
    monkeypatch.setattr(byte_level, "_characters", byte_level._characters.__wrapped__)
    monkeypatch.setattr(byte_level, "_classified_differently", lambda characters: ["\u00e9"])
    encoder = load(like_olmoe)
    encoder.encode(["caf\u00e9", "cafe\u0301", "\u00e8"])
    assert (encoder.fast_documents, encoder.reference_documents) == (1, 2)


def test_whitespace_of_the_reference_is_whitespace_here() -> None:
    """A cut needs a character before it that surely is none."""
    characters = "".join(chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xE000)
    whitespace = normalizers.Replace(Regex(r"\S"), "").normalize_str(characters)
    assert set(" \t\n\u00a0\u3000") < set(whitespace)
    assert all(c.isspace() or c == "\u180e" for c in whitespace)
