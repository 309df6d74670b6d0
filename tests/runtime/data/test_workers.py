"""The tokenised stage gives the same bytes for any number of workers and kills, and reports all damage at once."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from optimus_compiler.runtime.data import workers
from optimus_compiler.runtime.data.errors import DamagedInputError
from optimus_compiler.runtime.data.text_tokenizer import TextTokenizer
from optimus_compiler.runtime.data.tokenised import TokenisedFile, read_tokenised
from tests.runtime.data.conftest import TEXTS, contents, json_lines

Write = Callable[[str, bytes], Path]
U2 = np.dtype("<u2")


def run(
    files: list[Path],
    folder: Path,
    tokenizer_file: Path,
    *,
    count: int = 1,
    max_bad: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> list[TokenisedFile]:
    records = workers.tokenise_files(
        files,
        {"training": folder},
        tokenizer=TextTokenizer.load(tokenizer_file),
        text_field="text",
        validation_fraction=0.0,
        workers=count,
        max_bad_documents=max_bad,
        progress=progress,
    )
    return records["training"]


@pytest.fixture
def files(write: Write) -> list[Path]:
    return [write(f"{n}.jsonl", json_lines([*TEXTS, f"file {n} " * n])) for n in range(4)]


def test_results_are_in_the_order_of_the_files_for_any_number_of_workers(
    files: list[Path], tmp_path: Path, tokenizer_file: Path
) -> None:
    one = run(files, tmp_path / "one", tokenizer_file)
    assert [record.file for record in one] == [str(file) for file in files]
    assert len(contents(tmp_path / "one")) == 12
    for count in (2, 3):
        assert run(files, tmp_path / str(count), tokenizer_file, count=count) == one
        assert contents(tmp_path / str(count)) == contents(tmp_path / "one")


@pytest.mark.parametrize("count", [1, 2])
def test_finished_files_are_kept_and_the_rest_is_done(
    files: list[Path], tmp_path: Path, tokenizer_file: Path, count: int
) -> None:
    folder = tmp_path / "tokens"
    records = run(files, folder, tokenizer_file)
    before = contents(folder)
    (folder / "00001.json").unlink()
    (folder / "00002.bin").write_bytes(b"")
    (folder / ".00003.bin.123").write_bytes(b"of a killed worker")
    kept = {name: (folder / name).stat().st_ino for name in ("00000.json", "00000.bin", "00003.json", "00003.ends.npy")}
    calls: list[int] = []
    assert run(files, folder, tokenizer_file, count=count, progress=calls.append) == records
    assert contents(folder) == before
    assert {name: (folder / name).stat().st_ino for name in kept} == kept
    assert calls[:3] == [0, files[0].stat().st_size, files[0].stat().st_size + files[3].stat().st_size]
    assert calls[-1] == sum(file.stat().st_size for file in files)
    assert calls == sorted(calls)


@pytest.mark.parametrize("count", [1, 2])
def test_all_damage_is_reported_and_a_budget_continues_what_is_done(
    write: Write, files: list[Path], tmp_path: Path, tokenizer_file: Path, count: int
) -> None:
    files[1] = write("1.jsonl", b"no\n" + json_lines(TEXTS) + b'{"text": "half')
    files[3] = write("3.jsonl", b"")
    folder = tmp_path / "tokens"
    with pytest.raises(DamagedInputError) as caught:
        run(files, folder, tokenizer_file, count=count, max_bad=2)
    found = [(Path(bad.file).name, bad.line) for bad in caught.value.bad_documents]
    assert found == [("1.jsonl", 1), ("1.jsonl", 8), ("3.jsonl", 0)]
    assert str(caught.value) == (
        f"3 bad documents where 2 are allowed; the first is {files[1]}, line 1: not a complete JSON object "
        f"(Expecting value); repair the inputs or run again with --max-bad-documents 3"
    )
    before = {name: (folder / name).stat().st_ino for name in contents(folder)}
    assert len(before) == 12
    records = run(files, folder, tokenizer_file, count=count, max_bad=3)
    assert [len(record.bad_documents) for record in records] == [0, 2, 0, 1]
    assert {name: (folder / name).stat().st_ino for name in contents(folder)} == before


@pytest.mark.parametrize("count", [1, 2])
def test_a_wrong_text_field_stops_early(
    write: Write, tmp_path: Path, tokenizer_file: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "LISTED_BEYOND", 5)
    some = [write(f"{n}.jsonl", b'{"body": "x"}\n' * 4) for n in range(3)]
    with pytest.raises(DamagedInputError, match=r"at least 8 bad documents where 0 are allowed.*check the text field"):
        run(some, tmp_path / "tokens", tokenizer_file)
    one = write("one.jsonl", b'{"body": "x"}\n' * 10_000)
    with pytest.raises(DamagedInputError, match="at least 7 bad documents where 1 are allowed"):
        run([one], tmp_path / "other", tokenizer_file, count=count, max_bad=1)
    assert contents(tmp_path / "other") == {}


def test_a_killed_worker_is_an_error(
    files: list[Path], tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_tokenise", _die)
    with pytest.raises(ChildProcessError, match=r"a tokenising worker was killed .* again with fewer --workers"):
        run(files, tmp_path / "tokens", tokenizer_file, count=2)


def _die(number: int, path: Path) -> None:
    os._exit(1)


@pytest.mark.parametrize("count", [1, 2])
def test_an_interrupt_stops_the_workers_and_keeps_finished_files(
    files: list[Path], tmp_path: Path, tokenizer_file: Path, count: int
) -> None:
    folder = tmp_path / "tokens"
    total = sum(file.stat().st_size for file in files)

    def interrupt(done: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(files, folder, tokenizer_file, count=count, progress=interrupt)
    assert not list(folder.glob(".*"))
    kept = [n for n in range(4) if read_tokenised(folder, n, U2)]
    assert len(kept) > 0
    assert run(files, folder, tokenizer_file, count=count) == run(files, tmp_path / "whole", tokenizer_file)
    assert contents(folder) == contents(tmp_path / "whole")


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_workers_of_a_killed_run_end_and_the_next_run_gives_the_same_bytes(
    write: Write, tmp_path: Path, tokenizer_file: Path
) -> None:
    files = [write(f"{n}.jsonl", json_lines([f"{n} word after word " * 20] * 20_000)) for n in range(2)]
    folder = tmp_path / "tokens"
    code = (
        "import sys; from pathlib import Path; from tests.runtime.data.test_workers import run\n"
        "run([Path(file) for file in sys.argv[3:]], Path(sys.argv[1]), Path(sys.argv[2]), count=2)"
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", code, str(folder), str(tokenizer_file), *map(str, files)],
        cwd=Path(__file__).parents[3],
    )
    try:
        _wait_until(lambda: len(list(folder.glob(".*.bin.*"))) == 2)  # both workers are writing
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    pids = {int(path.name.rpartition(".")[2]) for path in folder.glob(".*")}
    assert len(pids) == 2
    _wait_until(lambda: not any(map(_is_running, pids)))
    assert not list(folder.glob("*.json"))
    for path in files:  # the next runs need not take so long
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:100]))
    run(files, folder, tokenizer_file)
    run(files, tmp_path / "whole", tokenizer_file)
    assert contents(folder) == contents(tmp_path / "whole")
