"""A run that was killed, failed or found the disk full is continued by the next, to the bytes of one that was not."""

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optimus_compiler.runtime.data import working_folder as working_folder_module
from optimus_compiler.runtime.data.errors import DamagedInputError, DataError
from optimus_compiler.runtime.data.prepare import prepare
from optimus_compiler.runtime.data.working_folder import working_folder
from tests.runtime.data.conftest import TEXTS, contents, json_lines

Write = Callable[[str, bytes], Path]
PARTIAL = ".out.partial"


@pytest.fixture
def arguments(write: Write, tmp_path: Path, tokenizer_file: Path) -> dict[str, Any]:
    """Of a run with two inputs, several shards and a document index, to tmp_path/out."""
    write("a.jsonl", json_lines(TEXTS))
    write("b.json.gz", json_lines([*TEXTS[3:], "not <|endoftext|>"]))
    return {
        "inputs": [tmp_path / "in"],
        "tokenizer": tokenizer_file,
        "context_length": 8,
        "output": tmp_path / "out",
        "shard_tokens": 200,
        "tails": "keep",
        "documents": "separate",
        "weights": {"*/b.json.gz": 1.5},
    }


def outputs(folder: Path, name: str) -> dict[str, Path]:
    """The two folders of a run with a validation split."""
    return {"output": folder / name, "validation_output": folder / f"{name}-validation"}


def in_child(function: Callable[[], object]) -> int:
    """Runs `function` in a fork of this process; returns the exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at(change: int) -> None:
    """Lets this process die before its `change`-th step that alters what a later run finds."""
    left = change

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return step

    os.fsync = dying(os.fsync)
    os.unlink = dying(os.unlink)
    for name in ("replace", "rename", "mkdir"):
        setattr(Path, name, dying(getattr(Path, name)))


@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_before_any_step_it_continues_to_the_same_bytes(
    arguments: dict[str, Any], tmp_path: Path, stride: int
) -> None:
    prepare(**(arguments | {"output": tmp_path / "whole"}))
    whole = contents(tmp_path / "whole")
    change = 1 - stride
    while True:
        change += stride

        def run(change: int = change) -> None:
            kill_at(change)
            prepare(**arguments)

        code = in_child(run)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        killed_after_commit = (tmp_path / "out").exists()
        prepare(**arguments)
        assert contents(tmp_path / "out") == whole
        assert not (tmp_path / PARTIAL).exists()
        shutil.rmtree(tmp_path / "out")
    assert change > 50
    assert killed_after_commit  # the last kill came between the rename and the end


@pytest.mark.parametrize("stride", [41, pytest.param(3, marks=pytest.mark.slow)])
def test_a_split_killed_before_any_step_continues_to_the_same_bytes_of_both(
    arguments: dict[str, Any], tmp_path: Path, stride: int
) -> None:
    arguments |= {"validation_fraction": 0.4}
    prepare(**(arguments | outputs(tmp_path, "whole")))
    whole = [contents(folder) for folder in outputs(tmp_path, "whole").values()]
    change = 1 - stride
    while True:
        change += stride

        def run(change: int = change) -> None:
            kill_at(change)
            prepare(**(arguments | outputs(tmp_path, "out")))

        code = in_child(run)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        assert not (tmp_path / "out").exists() or (tmp_path / "out-validation").exists()
        prepare(**(arguments | outputs(tmp_path, "out")))
        assert [contents(folder) for folder in outputs(tmp_path, "out").values()] == whole
        assert not list(tmp_path.glob(".*"))
        for folder in outputs(tmp_path, "out").values():
            shutil.rmtree(folder)
    assert change > 100


def test_a_split_stopped_between_its_two_folders_needs_no_tokens_again(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments |= {"validation_fraction": 0.4}
    prepare(**(arguments | outputs(tmp_path, "whole")))
    rename = Path.rename

    def stop(path: Path, target: Path) -> Path:
        if target == tmp_path / "out":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(**(arguments | outputs(tmp_path, "out")))
    assert sorted(path.name for path in tmp_path.glob("*out*")) == [PARTIAL, "out-validation"]
    stages: dict[str, int] = {}  # and how many calls
    prepare(
        **(arguments | outputs(tmp_path, "out")),
        progress=lambda stage, done, total: stages.update({stage: stages.get(stage, 0) + 1}),
    )
    assert stages["tokenising"] == 3  # nothing, then a finished file and another
    for folder, expected in zip(outputs(tmp_path, "out").values(), outputs(tmp_path, "whole").values(), strict=True):
        assert contents(folder) == contents(expected)
    assert not list(tmp_path.glob(".*"))


def test_a_token_file_that_was_altered_since_is_written_again(arguments: dict[str, Any], tmp_path: Path) -> None:
    prepare(**(arguments | {"output": tmp_path / "whole"}))

    def stop(stage: str, *_: int) -> None:
        if stage == "shuffling":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(**arguments, progress=stop)
    shutil.rmtree(tmp_path / PARTIAL / "result")
    ids = tmp_path / PARTIAL / "tokens" / "00001.bin"
    data = bytearray(ids.read_bytes())
    data[10] ^= 1
    ids.write_bytes(data)
    prepare(**arguments)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_tokenizer_that_changes_during_the_run_is_named(
    arguments: dict[str, Any], tokenizer_file: Path, tmp_path: Path
) -> None:
    arguments["tokenizer"] = Path(shutil.copy(tokenizer_file, tmp_path / "mine.json"))

    def change(*_: object) -> None:
        arguments["tokenizer"].write_bytes(tokenizer_file.read_bytes() + b" ")

    with pytest.raises(DataError, match=r"mine\.json was changed while it was used: restore it and run the same"):
        prepare(**arguments, progress=change)
    assert not (tmp_path / "out").exists()


def test_killed_again_and_again_it_still_arrives(arguments: dict[str, Any], tmp_path: Path) -> None:
    prepare(**(arguments | {"output": tmp_path / "whole"}))

    def run() -> None:
        kill_at(30)
        prepare(**arguments)

    runs = 1
    while in_child(run) == -signal.SIGKILL:
        runs += 1
        assert runs < 20
    assert runs > 2
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.slow  # two processes import torch
def test_killed_parent_of_two_workers(write: Write, tmp_path: Path, tokenizer_file: Path) -> None:
    for number in range(40):
        write(f"{number:02d}.jsonl", json_lines([f"{number} {text}" for text in TEXTS] * 30))
    arguments = {"inputs": [str(tmp_path / "in")], "tokenizer": str(tokenizer_file), "context_length": 16}
    module = "optimus_compiler.runtime.data.prepare"
    program = f"import json, sys; from {module} import prepare; prepare(**json.loads(sys.argv[1]))"
    killed = arguments | {"output": str(tmp_path / "out"), "workers": 2}
    with subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(killed)], cwd=Path(__file__).parents[3]
    ) as process:
        while not list(tmp_path.glob(f"{PARTIAL}/tokens/*.json")):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()  # the workers are left to themselves
    assert not (tmp_path / "out").exists()
    prepare(**arguments, output=tmp_path / "out")  # type: ignore[arg-type]
    prepare(**arguments, output=tmp_path / "whole")  # type: ignore[arg-type]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_finished_output_is_kept_by_the_same_run_and_refused_to_another(
    arguments: dict[str, Any], tmp_path: Path, tokenizer_file: Path
) -> None:
    first = prepare(**arguments)
    kept = contents(tmp_path / "out")
    os.utime(tmp_path / "in" / "a.jsonl")  # touched, and the same
    said: list[str] = []
    assert prepare(**arguments, workers=2, report=said.append) == first
    assert said == [f"{tmp_path / 'out'} is already there, made from the same inputs in the same way: nothing to do"]

    other_tokenizer = tmp_path / "tiny.json"
    other_tokenizer.write_text(tokenizer_file.read_text() + "\n")
    changes: list[tuple[dict[str, Any], str]] = [
        ({"seed": 1}, "seed 0, now 1"),
        ({"context_length": 9}, "context_length 8, now 9"),
        ({"shard_tokens": 201}, "shard_tokens 200, now 201"),
        ({"tails": "drop"}, "tails keep, now drop"),
        ({"documents": "join"}, "documents separate, now join"),
        ({"text_field": "id"}, "text_field text, now id"),
        ({"tokenizer": other_tokenizer}, r"tokenizer tiny\.json [0-9a-f]{64}, now tiny\.json [0-9a-f]{64}"),
        ({"weights": {}}, r"weight 1\.5 for .*b\.json\.gz, now 1\.0"),
        ({"inputs": [tmp_path / "in" / "b.json.gz"]}, r".*a\.jsonl among its inputs, which is not now"),
        ({"inputs": [tmp_path / "in", tokenizer_file.parent / "*.jsonl"]}, r"2 inputs, and now .*more\.jsonl too"),
    ]
    (tokenizer_file.parent / "more.jsonl").write_bytes(json_lines(TEXTS))
    for change, message in changes:
        with pytest.raises(DataError, match=f"out exists and was prepared with {message}: name another output"):
            prepare(**(arguments | change))
    text = (tmp_path / "in" / "a.jsonl").read_text()
    (tmp_path / "in" / "a.jsonl").write_text(text.replace("quick", "quack"))
    with pytest.raises(DataError, match=r"prepared with other bytes in .*a\.jsonl"):
        prepare(**arguments)
    assert contents(tmp_path / "out") == kept
    assert not (tmp_path / PARTIAL).exists()


def test_an_unfinished_run_is_continued_under_its_own_plan_only(
    arguments: dict[str, Any], write: Write, tmp_path: Path
) -> None:
    prepare(**(arguments | {"output": tmp_path / "whole"}))
    write("b.json.gz", b'{"text": "half')
    with pytest.raises(DamagedInputError):
        prepare(**arguments)
    with pytest.raises(DataError, match=r"\.out\.partial holds an unfinished run with seed 0, now 1: .* delete"):
        prepare(**arguments, seed=1)
    assert json.loads((tmp_path / PARTIAL / "bad_documents.jsonl").read_text())["line"] == 1
    ids = tmp_path / PARTIAL / "tokens" / "00000.bin"
    before = ids.stat().st_mtime_ns

    said: list[str] = []
    write("b.json.gz", json_lines([*TEXTS[3:], "not <|endoftext|>"]))  # repaired
    times: list[int] = []
    prepare(**arguments, report=said.append, progress=lambda *_: times.append(ids.stat().st_mtime_ns))
    assert said[0] == f"continuing the run that left {tmp_path / PARTIAL}"
    assert set(times) == {before}  # the file that was whole is not tokenised again
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_only_one_run_at_a_time(arguments: dict[str, Any], tmp_path: Path) -> None:
    with working_folder(tmp_path / "out"), pytest.raises(DataError, match=r"another run is preparing .*out: wait"):
        prepare(**arguments)
    assert not (tmp_path / PARTIAL).exists()
    prepare(**arguments)


def test_a_run_that_ends_while_another_starts_does_not_share_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def end_of_the_other(*args: Any) -> None:
        shutil.rmtree(tmp_path / PARTIAL)
        (tmp_path / PARTIAL).mkdir()
        (tmp_path / PARTIAL / "lock").touch()  # of a third run
        lock(*args)

    monkeypatch.setattr(working_folder_module.fcntl, "flock", end_of_the_other)
    with pytest.raises(DataError, match="another run is preparing"), working_folder(tmp_path / "out"):
        pass


def test_a_folder_that_is_no_run_is_not_touched(arguments: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / PARTIAL).mkdir()
    (tmp_path / PARTIAL / "theirs").touch()
    with pytest.raises(DataError, match=r"\.out\.partial exists and no run of optimus prepare made it"):
        prepare(**arguments)
    (tmp_path / PARTIAL / "plan.json").write_text("{}")
    with pytest.raises(DataError, match=r"plan\.json is not the plan of this version"):
        prepare(**arguments)
    assert (tmp_path / PARTIAL / "theirs").exists()


def test_an_output_that_is_something_else_is_refused(arguments: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    for output in (tmp_path / "out", tmp_path / "out" / "mine"):
        with pytest.raises(DataError, match="exists and is not an empty folder"):
            prepare(**(arguments | {"output": output}))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_an_input_that_changes_during_the_run_is_named(arguments: dict[str, Any], write: Write, tmp_path: Path) -> None:
    changed = False

    def change(*_: object) -> None:
        nonlocal changed
        if not changed:
            write("a.jsonl", json_lines(TEXTS[::-1]))
        changed = True

    with pytest.raises(DataError, match=r"a\.jsonl was changed while it was being read: run the same command again"):
        prepare(**arguments, progress=change)
    prepare(**arguments)
    prepare(**(arguments | {"output": tmp_path / "whole"}))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "limit", "repeated"), [("plan.json", 100, 1), ("00000.bin", 9_000, 30), ("manifest.json", 9_000, 12)]
)
def test_a_full_disk_names_the_file_and_is_continued(
    arguments: dict[str, Any], write: Write, tmp_path: Path, name: str, limit: int, repeated: int
) -> None:
    write("a.jsonl", json_lines(TEXTS * repeated))
    arguments["shard_tokens"] = 64  # for a large manifest
    message = tmp_path / "message"

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            prepare(**arguments)
        except DataError as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            message.write_text(str(error))

    assert in_child(run) == 0
    assert f"/{name} could not be written (File too large): free some space" in message.read_text()
    assert not (tmp_path / "out").exists()
    prepare(**arguments)
    prepare(**(arguments | {"output": tmp_path / "whole"}))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
