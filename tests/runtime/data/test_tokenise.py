"""A tokenised file holds the ids of every good document once, in order, whatever its size, or nothing at all."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from optimus_compiler.runtime.data import documents, tokenise, tokenised
from optimus_compiler.runtime.data.encode import Encoder
from optimus_compiler.runtime.data.errors import DamagedInputError, DataError
from optimus_compiler.runtime.data.text_tokenizer import TextTokenizer
from optimus_compiler.runtime.data.tokenise import tokenise_file
from optimus_compiler.runtime.data.tokenised import TokenisedFile, ends_file, ids_file, read_tokenised
from tests.file_size import file_size_limit
from tests.runtime.data.conftest import EOS, TEXTS, json_lines, stream_of

Write = Callable[[str, bytes], Path]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.mkdir()
    return path


@pytest.fixture
def words_file(tmp_path: Path) -> Path:
    """A tokenizer of whole words that reads </s> as EOS even in text, and that nothing is known about."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path / "words.json"
    tokenizer.save(str(path))
    return path


def run(
    path: Path,
    folder: Path,
    tokenizer_file: Path,
    *,
    encoder: Encoder | None = None,
    most_bad: int = 99,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> TokenisedFile:
    tokenizer = TextTokenizer.load(tokenizer_file)
    records = tokenise_file(
        path,
        {"training": folder},
        7,
        tokenizer=tokenizer,
        encoder=encoder or Encoder(tokenizer.tokenizer),
        text_field="text",
        validation_fraction=0.0,
        most_bad=most_bad,
        on_bytes=on_bytes,
    )
    return records["training"]


def ids_in(folder: Path) -> list[int]:
    return np.fromfile(ids_file(folder, 7), "<u2").tolist()


def ends_in(folder: Path) -> list[int]:
    ends_D = np.load(ends_file(folder, 7))
    assert ends_D.dtype == np.int64
    return ends_D.tolist()


def test_ids_ends_and_record_of_a_file(write: Write, folder: Path, tokenizer_file: Path) -> None:
    path = write("a.json.gz", json_lines(TEXTS) + b'{"text": "half\n{"text": "x"}\n')
    record = run(path, folder, tokenizer_file)
    expected = stream_of([*TEXTS, "x"], tokenizer_file)
    assert ids_in(folder) == expected
    assert ends_in(folder) == [n for n, token in enumerate(expected, 1) if token == EOS]
    assert sorted(file.name for file in folder.iterdir()) == ["00007.bin", "00007.ends.npy", "00007.json"]
    assert record == read_tokenised(folder, 7, np.dtype("<u2"))
    assert record.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert record.tokens_sha256 == hashlib.sha256(ids_file(folder, 7).read_bytes()).hexdigest()
    assert (record.file, record.bytes) == (str(path), path.stat().st_size)
    assert (record.documents, record.empty_documents, record.tokens) == (6, 1, len(expected))
    assert record.fast_documents + record.reference_documents == 7
    assert [(bad.line, bad.file) for bad in record.bad_documents] == [(7, str(path))]


def test_a_batch_of_empty_documents_is_bounded_too(
    write: Write, folder: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenise, "PART", 10)
    batches: list[int] = []

    class Counting(Encoder):
        def encode(self, texts: list[str]) -> list[list[int]]:
            batches.append(len(texts))
            return super().encode(texts)

    encoder = Counting(TextTokenizer.load(tokenizer_file).tokenizer)
    record = run(write("a.jsonl", json_lines([""] * 25)), folder, tokenizer_file, encoder=encoder)
    assert (record.empty_documents, batches) == (25, [10, 10, 5])


def test_a_file_with_nothing_good_has_no_tokens(write: Write, folder: Path, tokenizer_file: Path) -> None:
    record = run(write("a.txt", b""), folder, tokenizer_file)
    assert (record.documents, record.tokens, len(record.bad_documents)) == (0, 0, 1)
    assert (ids_in(folder), ends_in(folder)) == ([], [])
    assert read_tokenised(folder, 7, np.dtype("<u2")) == record


@pytest.mark.parametrize("damage", ["bin", "ends.npy", "json"])
def test_a_triple_that_is_not_whole_is_not_read(write: Write, folder: Path, tokenizer_file: Path, damage: str) -> None:
    run(write("a.jsonl", json_lines(TEXTS)), folder, tokenizer_file)
    path = folder / f"00007.{damage}"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    assert read_tokenised(folder, 7, np.dtype("<u2")) is None
    path.unlink()
    assert read_tokenised(folder, 7, np.dtype("<u2")) is None


def test_ends_do_not_depend_on_how_many_are_held(
    write: Write, folder: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenised, "ENDS_HELD", 2)
    run(write("a.jsonl", json_lines(["x"] * 5)), folder, tokenizer_file)
    assert ends_in(folder) == [2, 4, 6, 8, 10]


@pytest.mark.parametrize("size", [1, 2, 5, 50])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_document_in_parts_has_the_ids_of_the_whole(
    write: Write, folder: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch, name: str, size: int
) -> None:
    texts = [*TEXTS, "".join(TEXTS), "x"] if name == "a.jsonl" else ["".join(TEXTS) * 2]
    path = write(name, json_lines(texts) if name == "a.jsonl" else texts[0].encode())
    whole = run(path, folder, tokenizer_file)
    for module, limit in ((documents, "LARGE_LINE"), (documents, "PIECE"), (tokenise, "PART")):
        monkeypatch.setattr(module, limit, size)
    steps: list[int] = []
    record = run(path, folder, tokenizer_file, on_bytes=steps.append)
    assert record.model_copy(update={"fast_documents": 0, "reference_documents": 0}) == whole.model_copy(
        update={"fast_documents": 0, "reference_documents": 0}
    )
    assert record.fast_documents + record.reference_documents == len(texts)
    assert ids_in(folder) == stream_of(texts, tokenizer_file)
    assert sum(steps) == path.stat().st_size
    assert min(steps) >= 0
    assert sum(step > 0 for step in steps) > 5


def test_what_cannot_be_cut_is_bad_above_a_limit(
    write: Write, folder: Path, tokenizer_file: Path, words_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenise, "PART", 4)
    monkeypatch.setattr(tokenise, "LARGEST_WHOLE", 20)
    path = write("a.jsonl", json_lines(["a b", "a " * 10, "a " * 11, "some words " + "a" * 21, "a b"]))
    record = run(path, folder, words_file)  # a tokenizer of an unknown family cannot be fed in parts
    cause = "more than 20 bytes of the text can only be encoded as a whole by this tokenizer"
    assert [(bad.line, bad.cause) for bad in record.bad_documents] == [(3, cause), (4, cause)]
    assert ids_in(folder) == [2, 3, 1, *[2] * 10, 1, 2, 3, 1]
    record = run(path, folder, tokenizer_file)  # byte-level BPE can, at spaces
    assert [(bad.line, bad.cause) for bad in record.bad_documents] == [(4, cause)]
    assert ids_in(folder) == stream_of(["a b", "a " * 10, "a " * 11, "a b"], tokenizer_file)


def test_eos_that_can_only_be_read_as_eos_makes_a_document_bad(
    write: Write, folder: Path, words_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("a.jsonl", b'{"text": "a"}\n{"text": "a </s> b"}\n{"text": "b"}\n{"text": 3}\n{"text": "a a </s>"}\n')
    record = run(path, folder, words_file)
    assert ids_in(folder) == [2, 1, 3, 1]
    assert [bad.line for bad in record.bad_documents] == [2, 4, 5]
    assert record.bad_documents[0].cause == "the text holds </s>, which this tokenizer cannot encode as ordinary text"
    assert record.tokens_sha256 == hashlib.sha256(ids_file(folder, 7).read_bytes()).hexdigest()

    monkeypatch.setattr(tokenise, "PART", 2)  # found when a part of the document is written
    monkeypatch.setattr(Encoder, "safe_cut", lambda self, text, limit: text.rfind(" ", 1) if " " in text[1:] else None)
    again = run(path, folder, words_file)
    assert ids_in(folder) == [2, 1, 3, 1]
    assert again.tokens_sha256 == record.tokens_sha256
    assert again.bad_documents == record.bad_documents


def test_too_many_bad_documents_stop_the_file(write: Write, folder: Path, tokenizer_file: Path) -> None:
    path = write("a.jsonl", b'{"body": "x"}\n' * 9)
    assert len(run(path, folder, tokenizer_file, most_bad=9).bad_documents) == 9
    for file in folder.iterdir():
        file.unlink()
    with pytest.raises(DamagedInputError, match=r"at least 4 bad documents .*a\.jsonl, line 1: field 'text'") as caught:
        run(path, folder, tokenizer_file, most_bad=3)
    assert [bad.line for bad in caught.value.bad_documents] == [1, 2, 3, 4]
    assert list(folder.iterdir()) == []


class WrongEncoder(Encoder):
    """Gives wrong ids for one text."""

    wrong = "x 3"

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [
            ids[::-1] if text == self.wrong else ids for text, ids in zip(texts, super().encode(texts), strict=True)
        ]


@pytest.mark.parametrize(("every", "stops"), [(1, True), (3, True), (2, False), (4, False)])
def test_a_sampled_document_that_is_encoded_wrongly_stops_the_run(
    write: Write, folder: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch, every: int, stops: bool
) -> None:
    monkeypatch.setattr(tokenise, "CHECK_EVERY", every)
    path = write("a.jsonl", json_lines([f"x {n}" for n in range(6)]))
    wrong = WrongEncoder(TextTokenizer.load(tokenizer_file).tokenizer)
    if not stops:
        assert run(path, folder, tokenizer_file, encoder=wrong).documents == 6
        return
    with pytest.raises(DataError, match="disagree from token"):
        run(path, folder, tokenizer_file, encoder=wrong)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_the_first_document_is_always_checked(write: Write, folder: Path, tokenizer_file: Path, name: str) -> None:
    path = write(name, b"x 3" if name == "a.txt" else json_lines(["x 3", "y"]))
    with pytest.raises(DataError, match="disagree from token"):
        run(path, folder, tokenizer_file, encoder=WrongEncoder(TextTokenizer.load(tokenizer_file).tokenizer))


def test_a_wrong_cut_in_the_first_document_stops_the_run(
    write: Write, folder: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenise, "PART", 4)
    monkeypatch.setattr(Encoder, "safe_cut", lambda self, text, limit: limit)
    with pytest.raises(DataError, match="disagree from token"):
        run(write("a.txt", b"a word after word"), folder, tokenizer_file)


@pytest.mark.parametrize("limit", [0, 100, 130, 5000])
def test_a_full_disk_is_named_and_leaves_nothing_half_written(
    write: Write, folder: Path, tokenizer_file: Path, limit: int
) -> None:
    path = write("a.jsonl", json_lines(["word after word " * 300] * 9))
    message = r"could not be written \(File too large\): free some space and run"
    with pytest.raises(DataError, match=message) as caught, file_size_limit(limit):
        run(path, folder, tokenizer_file)
    assert str(folder) in str(caught.value)
    assert list(folder.iterdir()) == []


def test_a_full_disk_while_a_large_document_is_copied_is_an_error_too(
    write: Write, folder: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "LARGE_LINE", 20)
    path = write("a.jsonl", json_lines(["word after word " * 3000]))
    with pytest.raises(DataError, match="free some space and run the same command again"), file_size_limit(9000):
        run(path, folder, tokenizer_file)
    assert list(folder.iterdir()) == []


def test_a_tokenizer_without_a_decided_eos_is_refused(words_file: Path, tmp_path: Path) -> None:
    record = json.loads(words_file.read_text())
    record["model"]["vocab"]["[EOS]"] = 4
    both = tmp_path / "both.json"
    both.write_text(json.dumps(record))
    with pytest.raises(DataError, match=r"several end-of-text tokens \(</s>, \[EOS\]\)"):
        TextTokenizer.load(both)
    assert TextTokenizer.load(both, "[EOS]").eos_id == 4
