"""prepare writes exactly the documents, once each, in bytes that depend on seed and inputs alone, or nothing at all."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from optimus_compiler.runtime.data.dataset import PreparedData
from optimus_compiler.runtime.data.errors import DamagedInputError, DataError
from optimus_compiler.runtime.data.manifest import Manifest
from optimus_compiler.runtime.data.prepare import prepare
from tests.runtime.data.conftest import EOS, TEXTS, contents, ids_of, json_lines, stored, stream_of

Write = Callable[[str, bytes], Path]
CORPUS = Path(__file__).parents[3].parent / "shared"


def word_level(tmp_path: Path, vocabulary: dict[str, int]) -> Path:
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path / "words.json"
    tokenizer.save(str(path))
    return path


def test_instances_are_the_streams_cut_by_file_each_exactly_once(
    write: Write, tmp_path: Path, tokenizer_file: Path
) -> None:
    write("a.jsonl", json_lines(TEXTS))
    write("b.json.gz", json_lines(TEXTS[::-1]))
    write("c.txt", TEXTS[4].encode())
    context = 8
    manifest = prepare([tmp_path / "in"], tokenizer=tokenizer_file, context_length=context, output=tmp_path / "out")
    streams = [stream_of(texts, tokenizer_file) for texts in (TEXTS, TEXTS[::-1], [TEXTS[4]])]
    expected = [s[i : i + context] for s in streams for i in range(0, len(s) - context + 1, context)]
    rows = stored(tmp_path / "out").tolist()
    assert sorted(rows) == sorted(expected)
    assert rows != expected  # shuffled
    counts = [source.counts for source in manifest.sources]
    assert [c.documents for c in counts] == [5, 5, 1]
    assert [c.empty_documents for c in counts] == [1, 1, 0]
    assert [c.tokens for c in counts] == [len(s) for s in streams]
    assert [c.instances for c in counts] == [len(s) // context for s in streams]
    assert [c.dropped_tokens for c in counts] == [len(s) % context for s in streams]
    assert manifest.counts.tokens == sum(map(len, streams))
    assert [Path(source.file).name for source in manifest.sources] == ["a.jsonl", "b.json.gz", "c.txt"]


def test_the_folder_describes_itself(write: Write, tmp_path: Path, tokenizer_file: Path) -> None:
    source = write("a.jsonl", json_lines(TEXTS * 5))
    out = tmp_path / "out"
    manifest = prepare([source], tokenizer=tokenizer_file, context_length=10, output=out, shard_tokens=99, seed=3)
    assert manifest == Manifest.read(out)
    record = json.loads((out / "manifest.json").read_text())
    assert (record["version"], record["dtype"], record["eos_id"], record["seed"]) == (2, "uint16", EOS, 3)
    assert record["vocab_size"] == max(Tokenizer.from_file(str(tokenizer_file)).get_vocab().values()) + 1
    assert record["tokenizer"]["sha256"] == hashlib.sha256(tokenizer_file.read_bytes()).hexdigest()
    assert record["tokenizer"]["file"] == "tiny.json"
    assert (out / "tokenizer.json").read_bytes() == tokenizer_file.read_bytes()
    assert record["sources"][0]["sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert len(record["shards"]) > 2
    for number, shard in enumerate(record["shards"]):
        assert shard["file"] == f"shard-{number:05d}.npy"
        assert shard["sha256"] == hashlib.sha256((out / shard["file"]).read_bytes()).hexdigest()
        rows = np.load(out / shard["file"], mmap_mode="r")
        assert rows.dtype == np.uint16
        assert rows.shape == (shard["instances"], 10)
    assert [s["instances"] for s in record["shards"][:-1]] == [9] * (len(record["shards"]) - 1)
    names = {"manifest.json", "tokenizer.json", "documents.npy", *(s["file"] for s in record["shards"])}
    assert set(contents(out)) == names
    assert record["document_ends"]["sha256"] == hashlib.sha256((out / "documents.npy").read_bytes()).hexdigest()
    ends = np.load(out / "documents.npy")
    assert ends.dtype == np.int64
    assert ends.tolist() == np.cumsum([len(ids_of(text, tokenizer_file)) + 1 for text in TEXTS * 5 if text]).tolist()
    assert (record["tails"], record["documents"], record["text_field"]) == ("drop", "join", "text")


def test_documents_decode_to_their_text_with_eos_between(write: Write, tmp_path: Path, tokenizer_file: Path) -> None:
    text = TEXTS[3]
    source = write("a.jsonl", json_lines([text, text]))
    context = len(ids_of(text, tokenizer_file)) + 1
    prepare([source], tokenizer=tokenizer_file, context_length=context, output=tmp_path / "out")
    data = PreparedData.open(tmp_path / "out")
    for row in data.read(np.arange(2)).tolist():
        assert row[-1] == EOS
        assert EOS not in row[:-1]
        assert data.tokenizer().decode(row[:-1], skip_special_tokens=False) == text


def test_bytes_depend_on_the_seed_and_not_on_workers_or_the_way_inputs_are_named(
    write: Write, tmp_path: Path, tokenizer_file: Path
) -> None:
    for number in range(4):
        write(f"{number}.jsonl", json_lines([*TEXTS, f"file {number} " * (10 * number + 1)]))

    def run(name: str, inputs: list[str | Path], **options: Any) -> dict[str, bytes]:
        prepare(inputs, tokenizer=tokenizer_file, context_length=16, output=tmp_path / name, **options)
        return contents(tmp_path / name)

    one = run("one", [tmp_path / "in"])
    assert run("two", [f"{tmp_path}/in/[31].jsonl", tmp_path / "in"], workers=2) == one
    assert run("three", [tmp_path / "in"], workers=3) == one
    halves = []
    for workers in (1, 3):
        held_out = tmp_path / f"held-out-{workers}"
        half = run(
            f"half-{workers}", [tmp_path / "in"], workers=workers, validation_fraction=0.4, validation_output=held_out
        )
        halves.append((half, contents(held_out)))
    assert halves[0] == halves[1]
    other = run("other", [tmp_path / "in"], seed=1)
    assert other["shard-00000.npy"] != one["shard-00000.npy"]
    assert sorted(stored(tmp_path / "other").tolist()) == sorted(stored(tmp_path / "one").tolist())


def test_stored_order_does_not_depend_on_the_shard_size(write: Write, tmp_path: Path, tokenizer_file: Path) -> None:
    source = write("a.jsonl", json_lines(TEXTS))
    for name, size in (("small", 16), ("large", 1 << 20)):
        prepare([source], tokenizer=tokenizer_file, context_length=16, output=tmp_path / name, shard_tokens=size)
    np.testing.assert_array_equal(stored(tmp_path / "small"), stored(tmp_path / "large"))


def test_progress_reaches_the_total_of_each_stage(write: Write, tmp_path: Path, tokenizer_file: Path) -> None:
    files = [write("a.jsonl", json_lines(TEXTS * 3)), write("b.json.gz", json_lines(TEXTS))]
    size = sum(file.stat().st_size for file in files)
    calls: list[tuple[str, int, int]] = []
    manifest = prepare(
        files,
        tokenizer=tokenizer_file,
        context_length=8,
        output=tmp_path / "out",
        shard_tokens=160,
        progress=lambda stage, done, total: calls.append((stage, done, total)),
    )
    tokenising = [call for call in calls if call[0] == "tokenising"]
    shuffling = [call for call in calls if call[0] == "shuffling"]
    assert calls == tokenising + shuffling
    assert tokenising == sorted(tokenising)
    assert tokenising[-1] == ("tokenising", size, size)
    assert len(manifest.shards) > 2
    assert shuffling == [("shuffling", n + 1, len(manifest.shards)) for n in range(len(manifest.shards))]


@pytest.mark.parametrize(("words", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_dtype_holds_the_largest_id(write: Write, tmp_path: Path, words: int, dtype: str) -> None:
    vocabulary = {"<unk>": 0, "</s>": 1, "largest": words - 1}  # ids may have holes
    source = write("a.txt", b"largest largest")
    manifest = prepare([source], tokenizer=word_level(tmp_path, vocabulary), context_length=3, output=tmp_path / "out")
    assert (manifest.dtype, manifest.vocab_size, manifest.eos_id) == (dtype, words, 1)
    assert stored(tmp_path / "out").tolist() == [[words - 1, words - 1, 1]]
    assert PreparedData.open(tmp_path / "out").read(np.array([0])).tolist() == [[words - 1, words - 1, 1]]


def test_eos_is_found_by_name_or_named(write: Write, tmp_path: Path) -> None:
    source = write("a.txt", b"a b")
    both = word_level(tmp_path, {"<unk>": 0, "<|endoftext|>": 3, "</s>": 4, "a": 1, "b": 2})
    with pytest.raises(DataError, match=r"several end-of-text tokens \(<\|endoftext\|>, </s>\)"):
        prepare([source], tokenizer=both, context_length=3, output=tmp_path / "out")
    with pytest.raises(DataError, match="no token '<end>'"):
        prepare([source], tokenizer=both, context_length=3, output=tmp_path / "out", eos="<end>")
    prepare([source], tokenizer=both, context_length=3, output=tmp_path / "out", eos="</s>")
    assert stored(tmp_path / "out").tolist() == [[1, 2, 4]]
    none = word_level(tmp_path, {"<unk>": 0, "a": 1})
    with pytest.raises(DataError, match="none of the usual end-of-text tokens"):
        prepare([source], tokenizer=none, context_length=3, output=tmp_path / "other")


def test_the_report_says_which_path_encoded_how_many_and_why_none_took_the_fast_one(
    write: Write, tmp_path: Path, tokenizer_file: Path
) -> None:
    source = write("a.jsonl", json_lines(["a b a b", "b", ""]))
    words = word_level(tmp_path, {"<unk>": 0, "</s>": 1, "a": 2, "b": 3})
    said: list[str] = []
    for name, tokenizer in (("words", words), ("bytes", tokenizer_file)):
        prepare([source], tokenizer=tokenizer, context_length=2, output=tmp_path / name, report=said.append)
    slow, fast = said
    assert slow.startswith(
        "3 documents read: tiktoken encoded 0, tokenizers 3 (tiktoken may encode differently from this tokenizer: its "
        "pre-tokenizer (WhitespaceSplit) is not"
    )
    assert fast in (
        "3 documents read: tiktoken encoded 3, tokenizers 0",
        "3 documents read: tiktoken encoded 0, tokenizers 3 "
        "(tiktoken is not installed: pip install 'optimus-compiler[tiktoken]')",
    )


def test_the_current_folder_can_be_the_output(
    write: Write, tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write("a.jsonl", json_lines(TEXTS))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    prepare([source], tokenizer=tokenizer_file, context_length=8, output=".")
    assert Manifest.read(tmp_path / "here").counts.documents == len(TEXTS) - 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "in"]


def test_a_link_to_an_empty_folder_can_be_the_output_and_a_mount_point_cannot(
    write: Write, tmp_path: Path, tokenizer_file: Path
) -> None:
    source = write("a.jsonl", json_lines(TEXTS))
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    prepare([source], tokenizer=tokenizer_file, context_length=8, output=tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert Manifest.read(tmp_path / "real").counts.documents == len(TEXTS) - 1
    said: list[str] = []
    prepare([source], tokenizer=tokenizer_file, context_length=8, output=tmp_path / "link", report=said.append)
    assert said[0].endswith("nothing to do")
    with pytest.raises(DataError, match=r"^/ is a mount point, which no finished folder can replace: name a folder in"):
        prepare([source], tokenizer=tokenizer_file, context_length=8, output="/")


def test_eos_that_can_only_be_read_as_eos_is_refused(write: Write, tmp_path: Path) -> None:
    source = write("a.jsonl", json_lines(["a", "a </s> b"]))
    words = word_level(tmp_path, {"<unk>": 0, "</s>": 1, "a": 2})
    with pytest.raises(DamagedInputError, match=r"a\.jsonl, line 2: the text holds </s>"):
        prepare([source], tokenizer=words, context_length=2, output=tmp_path / "out")


def test_eos_not_marked_special_in_the_file_is_still_ordinary_text(
    write: Write, tmp_path: Path, tokenizer_file: Path
) -> None:
    record = json.loads(tokenizer_file.read_text())
    for token in record["added_tokens"]:
        token["special"] = False
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps(record))
    text = "x <|endoftext|> y"
    length = len(ids_of(text, tokenizer_file)) + 1
    prepare([write("a.txt", text.encode())], tokenizer=plain, context_length=length, output=tmp_path / "out")
    assert stored(tmp_path / "out").tolist() == [stream_of([text], tokenizer_file)]


def test_arguments_are_checked_before_anything_is_written(write: Write, tmp_path: Path, tokenizer_file: Path) -> None:
    source = write("a.jsonl", json_lines(TEXTS))
    broken = tmp_path / "broken.json"
    broken.write_text('{"version": "1.0"}')
    before = sorted(tmp_path.iterdir())
    arguments: list[tuple[dict, str]] = [
        ({"context_length": 1}, "context length 1 is too short"),
        ({"context_length": 100_000}, r"no instance of 100000 tokens fits: the inputs hold \d+ tokens in 1 file"),
        ({"workers": 0}, "0 workers"),
        ({"seed": -1}, "seed -1 is out of range"),
        ({"seed": 1 << 64}, "out of range"),
        ({"shard_tokens": 7}, "a shard of 7 tokens cannot hold an instance of 8"),
        ({"max_bad_documents": -1}, "-1 bad documents cannot be allowed"),
        ({"weights": {"*.jsonl": -1.0}}, r"weight -1.0 of '\*\.jsonl' is not possible"),
        ({"weights": {"*.jsonl": 1e30}}, r"weight 1e\+30 of .* give a number from 0 to 1,000,000"),
        (
            {"inputs": [tmp_path], "output": tmp_path / "in" / "out"},
            r"in/out is inside the input folder .*: move it out",
        ),
        ({"weights": {"a.jsonl": 2.0}}, r"'a\.jsonl' matches no input file.*begin it with '\*'"),
        ({"tokenizer": broken}, r"broken\.json is not a Hugging Face tokenizer\.json"),
        ({"inputs": [tmp_path / "absent.txt"]}, "names no input file"),
    ]
    for changed, message in arguments:
        given = {"inputs": [source], "tokenizer": tokenizer_file, "context_length": 8, "output": tmp_path / "out"}
        with pytest.raises(DataError, match=message):
            prepare(**(given | changed))
        assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(FileNotFoundError, match=r"absent\.json"):
        prepare([source], tokenizer=tmp_path / "absent.json", context_length=8, output=tmp_path / "out")


@pytest.mark.skipif(not CORPUS.is_dir(), reason="no ../shared beside the repository")
def test_real_text_with_the_olmoe_tokenizer(write: Write, tmp_path: Path) -> None:
    tokenizer_file = CORPUS / "tokenizer" / "olmoe.json"
    literal = write("a.jsonl", json_lines(["a <|endoftext|> b<|padding|>" * 40]))
    prepare([literal], tokenizer=tokenizer_file, context_length=64, output=tmp_path / "literal")
    assert not np.isin(stored(tmp_path / "literal"), [1, 50279]).any()

    source = CORPUS / "corpus" / "postgresql-docs-0001.json.gz"
    out = tmp_path / "real"
    manifest = prepare([source], tokenizer=tokenizer_file, context_length=128, output=out)
    assert (manifest.eos_id, manifest.vocab_size, manifest.dtype) == (50279, 50280, "uint16")
    assert manifest.counts.instances == manifest.counts.tokens // 128 > 1000
    eos = int((stored(out) == 50279).sum())
    assert manifest.counts.documents - 2 < eos <= manifest.counts.documents  # the last may be in the dropped tail
