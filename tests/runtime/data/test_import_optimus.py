"""Importing what Optimus-LM prepared keeps its instances and their order, and refuses what does not fit together."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from optimus_compiler.cli.import_optimus_data import import_optimus_data
from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.data.import_optimus import import_optimus
from optimus_compiler.runtime.data.manifest import Manifest
from optimus_compiler.runtime.data.verify import verify
from tests.runtime.data.conftest import stored

EOS, CONTEXT, ROWS = 1, 8, 5  # ROWS: instances of a shard
FILES = {"wiki_part-10": 120, "books_a": 61, "wiki_part-2": 7, "code_x": 83}  # in the order of urls.txt: tokens
SUFFIX = f"f{len(FILES)}_c{CONTEXT}"
Damage = Callable[[Path], object]


def ids_of_file(number: int, tokens: int) -> np.ndarray:
    """Documents of 2 tokens or more, EOS after each."""
    rng = np.random.default_rng(number)
    ids = rng.integers(2, 290, tokens, dtype=np.int32)
    ends = np.cumsum(rng.integers(2, 20, tokens)) - 1
    ids[ends[ends < tokens - 2]] = EOS
    ids[-1] = EOS
    return ids


def file(folder: Path, name: str) -> Path:
    return folder / f"{name}_{SUFFIX}.npy"


def token_file(folder: Path, name: str) -> Path:
    return folder / "tokenized_data" / f"{name}.npy"


def shard(folder: Path, number: int) -> Path:
    return folder / f"sharded_data_{SUFFIX}" / f"shard_{number}.npy"


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """DATASET/preprocessed/olmo as Optimus-LM writes it, with DATASET/urls.txt."""
    folder = tmp_path / "dataset/preprocessed/olmo"
    (folder / "tokenized_data").mkdir(parents=True)
    urls = [f"https://host/data/{'/'.join(name.split('_'))}.json.gz\n" for name in FILES]
    (tmp_path / "dataset/urls.txt").write_text("".join(urls))
    streams = [ids_of_file(number, tokens) for number, tokens in enumerate(FILES.values())]
    for name, ids in zip(FILES, streams, strict=True):
        np.save(token_file(folder, name), ids)
    instances = [len(ids) // CONTEXT for ids in streams]
    np.save(file(folder, "num_instances"), np.array(instances))
    order = np.random.RandomState(42).permutation(sum(instances))
    np.save(folder / f"shuffling_order_{SUFFIX}_1.npy", order)
    shard(folder, 0).parent.mkdir()
    rows = expected(streams, order)
    for first in range(0, len(rows), ROWS):
        np.save(shard(folder, first // ROWS), rows[first : first + ROWS].reshape(-1))
    return folder


def expected(streams: list[np.ndarray], order: np.ndarray) -> np.ndarray:
    cut = [ids[: len(ids) // CONTEXT * CONTEXT].reshape(-1, CONTEXT) for ids in streams]
    return np.concatenate(cut)[order]


def rows_of(folder: Path) -> np.ndarray:
    order = np.load(folder / f"shuffling_order_{SUFFIX}_1.npy")
    return expected([np.load(token_file(folder, name)) for name in FILES], order)


def run(folder: Path, tokenizer_file: Path, output: Path, **options: str | int) -> Manifest:
    return import_optimus(folder, tokenizer=tokenizer_file, output=output, **options)  # type: ignore[arg-type]


def test_keeps_instances_order_sources_and_documents(prepared: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    manifest = run(prepared, tokenizer_file, tmp_path / "out", shard_tokens=70)
    assert Manifest.read(tmp_path / "out") == manifest
    np.testing.assert_array_equal(stored(tmp_path / "out"), rows_of(prepared))
    assert [shard.instances for shard in manifest.shards] == [8, 8, 8, 8]
    assert (manifest.context_length, manifest.seed, manifest.eos_id, manifest.dtype) == (CONTEXT, 42, EOS, "uint16")
    assert [Path(source.file) for source in manifest.sources] == [token_file(prepared, name) for name in FILES]
    assert [source.counts.tokens for source in manifest.sources] == list(FILES.values())
    assert [source.counts.instances for source in manifest.sources] == [15, 7, 0, 10]
    assert [source.counts.dropped_tokens for source in manifest.sources] == [0, 5, 7, 3]
    joined = np.concatenate([np.load(token_file(prepared, name)) for name in FILES])
    ends = np.load(tmp_path / "out/documents.npy")
    np.testing.assert_array_equal(ends, np.flatnonzero(joined == EOS) + 1)
    assert manifest.counts.documents == len(ends)
    assert verify(tmp_path / "out") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dataset", "out"]


def test_builds_from_token_files_without_shards(prepared: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    whole = run(prepared, tokenizer_file, tmp_path / "whole")
    shutil.rmtree(shard(prepared, 0).parent)
    assert run(prepared, tokenizer_file, tmp_path / "built") == whole
    np.testing.assert_array_equal(stored(tmp_path / "built"), rows_of(prepared))


def test_takes_shards_alone(prepared: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    rows = rows_of(prepared)
    for path in (prepared / "tokenized_data", file(prepared, "num_instances")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (prepared / f"shuffling_order_{SUFFIX}_1.npy").unlink()
    manifest = run(prepared, tokenizer_file, tmp_path / "out")
    np.testing.assert_array_equal(stored(tmp_path / "out"), rows)
    assert (manifest.sources, manifest.document_ends) == ((), None)
    assert manifest.counts.tokens == rows.size
    assert manifest.counts.documents == (rows == EOS).sum()
    assert verify(tmp_path / "out") == []


def test_arrays_may_have_rows(prepared: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    flat = run(prepared, tokenizer_file, tmp_path / "flat")
    for path in shard(prepared, 0).parent.iterdir():
        np.save(path, np.load(path).reshape(-1, CONTEXT))
    assert run(prepared, tokenizer_file, tmp_path / "rows") == flat


def test_finds_the_order_of_files_without_urls(prepared: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    with_urls = run(prepared, tokenizer_file, tmp_path / "with")
    (prepared / "../../urls.txt").unlink()
    assert run(prepared, tokenizer_file, tmp_path / "without") == with_urls


def test_uses_the_first_files_and_the_chosen_layout(prepared: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    np.save(prepared / "num_instances_f1_c4.npy", np.array([30]))
    np.save(prepared / "shuffling_order_f1_c4_1.npy", np.arange(30)[::-1])
    with pytest.raises(DataError, match=r"several ways: choose one with --layout \(f1_c4, f4_c8\)"):
        run(prepared, tokenizer_file, tmp_path / "out")
    run(prepared, tokenizer_file, tmp_path / "out", layout="f1_c4")
    np.testing.assert_array_equal(stored(tmp_path / "out"), ids_of_file(0, 120).reshape(30, 4)[::-1])
    with pytest.raises(DataError, match="nothing for 'f2_c4'"):
        run(prepared, tokenizer_file, tmp_path / "other", layout="f2_c4")


def test_reads_in_blocks(prepared: Path, tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(prepared, tokenizer_file, tmp_path / "whole")
    monkeypatch.setattr("optimus_compiler.runtime.data.import_optimus.BLOCK_TOKENS", 24)
    assert run(prepared, tokenizer_file, tmp_path / "blocks") == whole


def change(path: Path, edit: Callable[[np.ndarray], np.ndarray | None]) -> None:
    """Saves what `edit` makes of the array, or has changed in it."""
    held = np.load(path)
    edited = edit(held)
    np.save(path, held if edited is None else edited)


def put(index: int, value: int) -> Callable[[np.ndarray], None]:
    return lambda held: held.reshape(-1).__setitem__(index, value)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def without_eos(folder: Path) -> None:
    for path in shard(folder, 0).parent.iterdir():
        change(path, lambda ids: ids.clip(2))


def assert_refused(prepared: Path, tokenizer_file: Path, tmp_path: Path, message: str) -> None:
    """The import says what is wrong, and leaves nothing behind."""
    with pytest.raises(DataError, match=message):
        run(prepared, tokenizer_file, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dataset"]


def order_file(folder: Path) -> Path:
    return folder / f"shuffling_order_{SUFFIX}_1.npy"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: truncate(shard(d, 1)), r"shard_1.npy is truncated or not a .npy file"),
        (lambda d: truncate(token_file(d, "books_a")), r"books_a.npy is truncated or not a .npy file"),
        (lambda d: shard(d, 2).write_bytes(b""), r"shard_2.npy is truncated or not a .npy file"),
        (lambda d: shard(d, 2).write_bytes(shard(d, 2).read_bytes() + b"x"), r"shard_2.npy has bytes after its end"),
        (lambda d: change(shard(d, 2), lambda ids: ids.astype(np.float32)), r"shard_2.npy holds float32 \[40\], not"),
        (lambda d: change(shard(d, 2), lambda ids: ids[:-CONTEXT]), r"shard_2.npy holds 32 tokens"),
        (lambda d: change(shard(d, 6), lambda ids: ids[:-1]), r"shard_6.npy holds 15 tokens"),
        (lambda d: shard(d, 6).unlink(), r"the shards 30, tokenized_data 32, num_instances 32, shuffling_order 32"),
        (lambda d: shard(d, 3).unlink(), r"shard_3.npy is missing"),
        (lambda d: change(shard(d, 3), put(9, 200)), r"shard_3.npy does not hold the instance .* at position 16"),
        (lambda d: change(token_file(d, "code_x"), put(9, 200)), r"shard_\d.npy does not hold the instance"),
        (lambda d: change(order_file(d), lambda order: order[::-1]), r"shard_0.npy does not hold the instance"),
        (lambda d: change(order_file(d), lambda order: order.clip(1)), r"no permutation \(instance 0 of 32 is not in"),
        (lambda d: change(order_file(d), lambda order: order + 1), r"no permutation \(instance 0 of 32 is not in it"),
        (lambda d: change(order_file(d), lambda order: order[:-1]), r"contradicts itself .*shuffling_order 31"),
        (lambda d: change(order_file(d), lambda order: order * 0.5), r"holds float64 \[32\], not the numbers"),
        (lambda d: change(file(d, "num_instances"), put(1, 6)), r"books_a.npy holds 7 instances, num_instances says 6"),
        (lambda d: change(file(d, "num_instances"), lambda n: n[:-1]), r"the number of instances of 4 files"),
        (lambda d: token_file(d, "code_x").unlink(), r"code_x.npy is missing \(it is in .*urls.txt\)"),
        (lambda d: (d / "../../urls.txt").write_text("https://h/wiki/part-10.json.gz\n"), r"1 of 4 files"),
    ],
)
def test_names_damage(prepared: Path, tokenizer_file: Path, tmp_path: Path, damage: Damage, message: str) -> None:
    damage(prepared)
    assert_refused(prepared, tokenizer_file, tmp_path, message)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: change(shard(d, 3), put(9, 300)), r"shard_3.npy holds token id 300, outside .* vocabulary of 300"),
        (lambda d: change(shard(d, 3), put(9, -1)), r"shard_3.npy holds token id -1, outside"),
        (without_eos, r"holds no <\|endoftext\|> \(id 1\)"),
    ],
)
def test_shards_alone_must_be_of_this_tokenizer(
    prepared: Path, tokenizer_file: Path, tmp_path: Path, damage: Damage, message: str
) -> None:
    shutil.rmtree(prepared / "tokenized_data")
    damage(prepared)
    assert_refused(prepared, tokenizer_file, tmp_path, message)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: change(token_file(d, "books_a"), put(9, 300)), r"books_a.npy holds token id 300, outside"),
        (lambda d: change(token_file(d, "books_a"), put(-1, 5)), r"books_a.npy ends with token 5, not with <\|endoft"),
        (lambda d: order_file(d).unlink(), r"neither shards nor all that they are made of"),
        (lambda d: shutil.rmtree(d / "tokenized_data"), r"neither shards nor all that they are made of"),
    ],
)
def test_token_files_must_be_of_this_tokenizer(
    prepared: Path, tokenizer_file: Path, tmp_path: Path, damage: Damage, message: str
) -> None:
    shutil.rmtree(shard(prepared, 0).parent)
    damage(prepared)
    assert_refused(prepared, tokenizer_file, tmp_path, message)


def test_another_eos_is_refused(prepared: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"wiki_part-10.npy ends with token 1, not with <pad> \(0\)"):
        run(prepared, tokenizer_file, tmp_path / "out", eos="<pad>")


def test_a_document_without_text_is_a_document_of_one_token(
    prepared: Path, tokenizer_file: Path, tmp_path: Path
) -> None:
    """Optimus-LM writes EOS after every document, the empty ones too."""
    shutil.rmtree(shard(prepared, 0).parent)
    change(token_file(prepared, "wiki_part-10"), put(-2, EOS))
    manifest = run(prepared, tokenizer_file, tmp_path / "out")
    assert 1 in np.diff(np.load(tmp_path / "out/documents.npy"))
    assert manifest.counts.documents == sum((np.load(token_file(prepared, name)) == EOS).sum() for name in FILES)


def test_refuses_other_folders_and_used_outputs(prepared: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="was not prepared by Optimus-LM"):
        run(tmp_path, tokenizer_file, tmp_path / "out")
    with pytest.raises(DataError, match="is not a folder"):
        run(tmp_path / "absent", tokenizer_file, tmp_path / "out")
    (tmp_path / "used").mkdir()
    (tmp_path / "used/file").touch()
    with pytest.raises(DataError, match="is not an empty folder"):
        run(prepared, tokenizer_file, tmp_path / "used")
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial/plan.json").touch()
    with pytest.raises(DataError, match=r"unfinished run \(plan.json\)"):
        run(prepared, tokenizer_file, tmp_path / "out")
    assert (tmp_path / ".out.partial/plan.json").exists()


def test_a_killed_import_is_begun_anew(prepared: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.partial/import").mkdir(parents=True)
    (tmp_path / ".out.partial/import/shard-00000.npy").touch()
    run(prepared, tokenizer_file, tmp_path / "out")
    np.testing.assert_array_equal(stored(tmp_path / "out"), rows_of(prepared))
    assert not (tmp_path / ".out.partial").exists()


def test_command(prepared: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(import_optimus_data)
    arguments = [str(prepared), "--tokenizer", str(tokenizer_file), "--layout", SUFFIX]
    result = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "out")])
    assert result.exit_code == 0
    assert "32 of 32 instances were compared with the token files" in result.output
    assert "271 tokens, 32 sequences of 8, vocabulary 300" in result.output
    truncate(shard(prepared, 1))
    result = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "other")])
    assert isinstance(result.exception, DataError)
