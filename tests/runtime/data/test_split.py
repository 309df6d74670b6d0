"""A validation split: two ordinary folders in one run, and every document in the one that its text alone decides."""

import hashlib
import io
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from tokenizers import Tokenizer, models, pre_tokenizers

from optimus_compiler.runtime.data import documents, tokenise
from optimus_compiler.runtime.data.dataset import PreparedData
from optimus_compiler.runtime.data.documents import LargeText
from optimus_compiler.runtime.data.encode import Encoder
from optimus_compiler.runtime.data.errors import DamagedInputError, DataError
from optimus_compiler.runtime.data.manifest import Manifest, Split
from optimus_compiler.runtime.data.prepare import prepare
from optimus_compiler.runtime.data.split import split_of
from optimus_compiler.runtime.data.stats import stats
from optimus_compiler.runtime.data.text_tokenizer import TextTokenizer
from optimus_compiler.runtime.data.verify import verify
from tests.runtime.data.conftest import EOS, TEXTS, contents, json_lines, stored

Write = Callable[[str, bytes], Path]


def held_out(text: str, fraction: float) -> bool:
    """As the README has it."""
    return int(hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), 16) / 2**64 < fraction


def documents_in(folder: Path) -> Counter[str]:
    """The texts in a folder whose instances hold a document each."""
    data = PreparedData.open(folder)
    rows = stored(folder).tolist()
    assert all(EOS in row for row in rows)
    decode = data.tokenizer().decode
    return Counter(decode(row[: row.index(EOS)], skip_special_tokens=False) for row in rows)


@pytest.fixture
def prepare_split(tmp_path: Path, tokenizer_file: Path) -> Callable[..., tuple[Path, Path]]:
    """prepare_split(name, inputs, **options) prepares tmp_path/name and its validation folder, a document a row."""

    def run(name: str, inputs: list[Path], **options: Any) -> tuple[Path, Path]:
        out, validation = tmp_path / name, tmp_path / f"{name}-validation"
        given: dict[str, Any] = {
            "tokenizer": tokenizer_file,
            "context_length": 64,
            "documents": "separate",
            "tails": "keep",
            "output": out,
            "validation_fraction": 0.1,
            "validation_output": validation,
        }
        prepare(inputs, **(given | options))
        return out, validation

    return run


def test_the_text_alone_decides_and_a_larger_fraction_holds_out_more() -> None:
    texts = [*TEXTS, *(f"document {n}" for n in range(2000))]
    for fraction in (0.001, 0.01, 0.5, 0.999):
        assert [split_of(text, fraction) == "validation" for text in texts] == [held_out(t, fraction) for t in texts]
    shares = {f: sum(split_of(text, f) == "validation" for text in texts) / len(texts) for f in (0.01, 0.1, 0.5)}
    assert shares == {f: pytest.approx(f, rel=0.3) for f in shares}
    for text in texts:
        sides = [split_of(text, fraction) for fraction in (0.0, 0.01, 0.1, 0.5, 0.9)]
        assert sides == sorted(sides)
        assert sides[0] == "training"


def test_a_text_in_pieces_is_on_the_side_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE", 3)  # cuts characters too
    for text in TEXTS[2:]:
        for fraction in (0.1, 0.3, 0.5, 0.7, 0.9):
            assert split_of(LargeText(io.BytesIO(b"##" + text.encode()), 2), fraction) == split_of(text, fraction)


def test_each_document_is_on_its_side_however_the_corpus_is_divided(
    write: Write, tmp_path: Path, prepare_split: Callable[..., tuple[Path, Path]]
) -> None:
    texts = [f"document {n} of {n % 7}, naïve — 漢字" for n in range(2000)]
    texts += texts[:300] + texts[::40]  # found two and three times
    expected = Counter(texts)
    one = prepare_split("one", [write("one/a.jsonl", json_lines(texts))])
    whole, _ = prepare_split("whole", [tmp_path / "in" / "one"], validation_fraction=None, validation_output=None)
    training, validation = map(documents_in, one)
    assert documents_in(whole) == expected == training + validation
    assert validation == Counter({text: count for text, count in expected.items() if held_out(text, 0.1)})
    assert not training.keys() & validation.keys()
    assert 150 < len(validation) < 250
    assert sum(count > 1 for count in validation.values()) > 20

    random.Random(0).shuffle(texts)
    write("many/a.json.gz", json_lines(texts[:1000]))
    path = write("many/b.jsonl.zst", zstandard.compress(json_lines(texts[1000:2000])))
    pq.write_table(pa.table({"text": texts[2000:-2]}), path.with_name("c.parquet"), row_group_size=100)
    for number, text in enumerate(texts[-2:]):
        write(f"many/{number}.txt", text.encode())
    many = prepare_split("many", [tmp_path / "in" / "many"])
    assert tuple(map(documents_in, many)) == (training, validation)
    for folder in (*one, *many):
        assert verify(folder) == []


def test_documents_in_parts_are_written_as_whole_ones_are(
    write: Write, tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("a.jsonl", json_lines([f"{n} {text}" for n in range(5) for text in TEXTS]))
    tokenizer = TextTokenizer.load(tokenizer_file)

    def run(name: str, *splits: Split) -> dict[str, dict[str, bytes]]:
        folders = {split: tmp_path / name / split for split in splits}
        for folder in folders.values():
            folder.mkdir(parents=True)
        steps: list[int] = []
        tokenise.tokenise_file(
            path,
            folders,
            0,
            tokenizer=tokenizer,
            encoder=Encoder(tokenizer.tokenizer),
            text_field="text",
            validation_fraction=0.4,
            most_bad=0,
            on_bytes=steps.append,
        )
        assert sum(steps) == path.stat().st_size
        assert min(steps) >= 0
        return {split: {n: d for n, d in contents(f).items() if n != "00000.json"} for split, f in folders.items()}

    whole = run("whole", "training", "validation")
    assert len(whole["validation"]["00000.bin"]) > 100
    assert run("half", "validation") == {"validation": whole["validation"]}
    for size in (1, 9, 60):  # of some of the documents at 60
        for module, limit in ((documents, "LARGE_LINE"), (documents, "PIECE"), (tokenise, "PART")):
            monkeypatch.setattr(module, limit, size)
        assert run(str(size), "training", "validation") == whole


@pytest.mark.parametrize("tails", ["drop", "keep"])
@pytest.mark.parametrize("cut", ["join", "separate"])
def test_both_are_ordinary_folders(
    write: Write, tmp_path: Path, prepare_split: Callable[..., tuple[Path, Path]], tails: str, cut: str
) -> None:
    held = next(text for text in TEXTS if text.strip() and held_out(text, 0.5))
    write("a.jsonl", json_lines([f"{n} {text}" for n in range(4) for text in TEXTS]))
    write("b.jsonl", json_lines([held]))  # nothing of it is for training
    options = {"context_length": 8, "tails": tails, "documents": cut, "weights": {"*/a.jsonl": 1.5}}
    folders = prepare_split("out", [tmp_path / "in"], validation_fraction=0.5, **options)
    for folder, split in zip(folders, ("training", "validation"), strict=True):
        assert verify(folder) == []
        manifest = Manifest.read(folder)
        record = json.loads((folder / "manifest.json").read_text())
        assert (manifest.split, manifest.validation_fraction) == (split, 0.5)
        assert (record["split"], record["validation_fraction"]) == (split, 0.5)
        assert f"  split             {split}, validation fraction 0.5" in stats(folder).splitlines()
        assert PreparedData.open(folder).read(np.array([0])).shape == (1, 8)
    training, validation = map(Manifest.read, folders)
    assert [source.file for source in training.sources] == [source.file for source in validation.sources]
    assert training.counts.documents + validation.counts.documents == 4 * len(TEXTS) + 1
    assert [training.sources[1].counts.documents, validation.sources[1].counts.documents] == [0, 1]


OLD_MANIFEST = """\
{
  "tokenizer": {
    "file": "words.json",
    "sha256": "1f988e60e869627bfadcc40f10aea59248c3405294cb35d070ef7fcd70fc4119"
  },
  "eos": "</s>",
  "text_field": "text",
  "context_length": 2,
  "tails": "drop",
  "documents": "join",
  "seed": 0,
  "shard_tokens": 64,
  "format": "optimus-data",
  "version": 2,
  "dtype": "uint16",
  "vocab_size": 4,
  "eos_id": 1,
  "counts": {
    "documents": 1,
    "empty_documents": 0,
    "bad_documents": 0,
    "tokens": 4,
    "instances": 2,
    "dropped_tokens": 0,
    "padding_tokens": 0
  },
  "sources": [],
  "shards": [
    {
      "file": "shard-00000.npy",
      "sha256": "ca2b100a0ebc17e60ab7314c521651a72cd65dc97782babd3f64e20ed2e45428",
      "instances": 2
    }
  ],
  "document_ends": null,
  "bad_documents": null,
  "sha256": "ba77bbf38eac2ae63400889047cbcd633530f68fa36031acdd82c87732d44e1b"
}
"""


def test_a_manifest_from_before_there_were_splits_is_read(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(OLD_MANIFEST)
    manifest = Manifest.read(tmp_path)
    assert (manifest.split, manifest.validation_fraction) == ("training", 0.0)
    manifest.write(tmp_path)
    assert (tmp_path / "manifest.json").read_text() == OLD_MANIFEST


def test_a_bad_document_counts_once(
    write: Write, tmp_path: Path, prepare_split: Callable[..., tuple[Path, Path]]
) -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "words.json"))
    unencodable = ["a </s>" + " b" * n for n in range(8)]
    lines = json_lines(["a b", "b a", "b a b", "a a", *unencodable]).splitlines(keepends=True)
    lines.insert(3, b'{"text": "half\n')
    write("a.jsonl", b"".join(lines))
    write("b.txt", b"")
    held = [line for line, text in enumerate(unencodable, 6) if held_out(text, 0.5)]
    left = [line for line, text in enumerate(unencodable, 6) if not held_out(text, 0.5)]
    assert min(len(held), len(left)) > 1
    options = {"tokenizer": tmp_path / "words.json", "context_length": 2, "validation_fraction": 0.5}

    def run(most: int) -> tuple[Path, Path]:
        return prepare_split("out", [tmp_path / "in"], max_bad_documents=most, **options)

    with pytest.raises(
        DamagedInputError, match=r"10 bad documents where 9 are allowed; .*a\.jsonl, line 4: "
    ) as caught:
        run(9)
    everything = [("a.jsonl", 4), *(("a.jsonl", line) for line in range(6, 14)), ("b.txt", 0)]
    assert [(Path(bad.file).name, bad.line) for bad in caught.value.bad_documents] == everything
    listed = (tmp_path / ".out.partial" / "bad_documents.jsonl").read_text().splitlines()
    assert [json.loads(line)["line"] for line in listed] == [line for _, line in everything]
    assert not (tmp_path / "out-validation").exists()

    folders = run(10)
    found = [[json.loads(line)["line"] for line in (f / "bad_documents.jsonl").open()] for f in folders]
    assert found == [[4, *left, 0], held]
    assert [Manifest.read(folder).counts.bad_documents for folder in folders] == [len(left) + 2, len(held)]
    assert [verify(folder) for folder in folders] == [[], []]
    message = r"out with .*out-validation exists and leaves out 10 bad documents: run again with --max-bad-documents 10"
    with pytest.raises(DataError, match=message):
        run(9)


def test_damage_leaves_neither_folder_and_a_repaired_input_gives_both(
    write: Write, tmp_path: Path, prepare_split: Callable[..., tuple[Path, Path]]
) -> None:
    text = json_lines([f"document {n}" for n in range(50)])
    path = write("a.jsonl", text)
    whole = prepare_split("whole", [path])
    path.write_bytes(text + b"{")
    for _ in range(2):
        with pytest.raises(DamagedInputError, match="1 bad document where 0 are allowed"):
            prepare_split("out", [path])
        assert not list(tmp_path.glob("out*"))
    path.write_bytes(text)
    out = prepare_split("out", [path])
    assert [contents(folder) for folder in out] == [contents(folder) for folder in whole]
    assert not list(tmp_path.glob(".*"))


def test_what_is_there_is_kept_and_what_is_not_is_made(
    write: Write, tmp_path: Path, prepare_split: Callable[..., tuple[Path, Path]]
) -> None:
    path = write("a.jsonl", json_lines([f"document {n}" for n in range(50)]) + b"{")
    said: list[str] = []
    out = prepare_split("out", [path], max_bad_documents=1)
    made = [contents(folder) for folder in out]
    finished = "is already there, made from the same inputs in the same way: nothing to do"
    for gone in ((), (0,), (1,), (0, 1)):
        before = {folder: folder.stat().st_ino for folder in out}
        for number in gone:
            shutil.rmtree(out[number])
        said.clear()
        assert prepare_split("out", [path], max_bad_documents=1, report=said.append) == out
        assert [contents(folder) for folder in out] == made
        kept = [folder for number, folder in enumerate(out) if number not in gone]
        assert [sentence for sentence in said if "already" in sentence] == [f"{folder} {finished}" for folder in kept]
        assert [folder.stat().st_ino for folder in kept] == [before[folder] for folder in kept]

    refused: list[tuple[dict[str, Any], str]] = [
        ({"validation_fraction": 0.2}, "out exists and was prepared with validation_fraction 0.1, now 0.2"),
        ({"seed": 1}, "out exists and was prepared with seed 0, now 1"),
        (
            {"validation_output": out[0], "output": out[1]},
            "validation exists and was prepared with split validation, now",
        ),
        (
            {"validation_fraction": None, "validation_output": None},
            "with validation_fraction 0.1, now 0.0: name another",
        ),
    ]
    for changed, message in refused:
        with pytest.raises(DataError, match=message):
            prepare_split("out", [path], max_bad_documents=1, **changed)
    path.write_bytes(path.read_bytes().replace(b"document 9", b"document 7"))
    shutil.rmtree(out[0])
    with pytest.raises(DataError, match=r"out-validation exists and was prepared with other bytes in .*a\.jsonl"):
        prepare_split("out", [path], max_bad_documents=1)
    assert not list(tmp_path.glob(".*"))


def test_a_split_without_an_instance_leaves_nothing(
    write: Write, tmp_path: Path, prepare_split: Callable[..., tuple[Path, Path]]
) -> None:
    path = write("a.jsonl", json_lines([f"document {n}" for n in range(9)]))
    before = sorted(tmp_path.iterdir())
    message = (
        r"^no instance of 64 tokens fits: the documents for validation hold 0 tokens in 1 file, of which tails and "
        r"weights leave nothing: hold out a larger fraction or use a smaller context length$"
    )
    with pytest.raises(DataError, match=message):
        prepare_split("out", [path], validation_fraction=0.001)
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(DataError, match=r"documents for training hold 0 tokens in 1 file, .* nothing: add text or use"):
        prepare_split("out", [path], validation_fraction=0.999)
    assert sorted(tmp_path.iterdir()) == before
    prepare_split("out", [path], validation_fraction=0.5)


def test_mistakes_are_refused_before_anything_is_written(write: Write, tmp_path: Path, tokenizer_file: Path) -> None:
    write("a.jsonl", json_lines(TEXTS))
    before = sorted(tmp_path.rglob("*"))
    out = tmp_path / "out"
    cases: list[tuple[float | None, Path | None, str]] = [
        (None, tmp_path / "val", "validation fraction and validation output belong together: give both"),
        (0.1, None, "validation fraction and validation output belong together: give both"),
        (0.0, tmp_path / "val", r"validation fraction 0\.0 is not possible: give a number between 0 and 1"),
        (1.0, tmp_path / "val", r"validation fraction 1\.0 is not possible"),
        (float("nan"), tmp_path / "val", "validation fraction nan is not possible"),
        (0.1, out, r"out for validation and .*out are not two folders side by side: name another"),
        (0.1, out / "val", r"out/val for validation and .*out are not two folders side by side"),
        (0.1, tmp_path, "are not two folders side by side"),
        (0.1, tmp_path / "in" / "val", r"in/val is inside the input folder .*: move it out"),
    ]
    for fraction, validation, message in cases:
        with pytest.raises(DataError, match=message):
            prepare(
                [tmp_path / "in"],
                tokenizer=tokenizer_file,
                context_length=8,
                output=out,
                validation_fraction=fraction,
                validation_output=validation,
            )
        assert sorted(tmp_path.rglob("*")) == before


def test_validation_has_a_stage_of_its_own(write: Write, prepare_split: Callable[..., tuple[Path, Path]]) -> None:
    path = write("a.jsonl", json_lines([f"document {n}" for n in range(50)]))
    calls: list[tuple[str, int, int]] = []
    prepare_split("out", [path], progress=lambda *call: calls.append(call))
    size = path.stat().st_size
    last = {stage: (done, total) for stage, done, total in calls}
    assert list(last.items()) == [
        ("tokenising", (size, size)),
        ("shuffling", (1, 1)),
        ("shuffling validation", (1, 1)),
    ]
