"""Tokenises input files in worker processes: one file a task, the largest first, results in the order of the files."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

from optimus_compiler.runtime.data.encode import Encoder
from optimus_compiler.runtime.data.errors import DamagedInputError
from optimus_compiler.runtime.data.manifest import Split
from optimus_compiler.runtime.data.text_tokenizer import TextTokenizer
from optimus_compiler.runtime.data.tokenise import tokenise_file
from optimus_compiler.runtime.data.tokenised import BadDocument, TokenisedFile, read_tokenised

REPORT_SECONDS = 0.2
LISTED_BEYOND = 100  # bad documents above those allowed that are still looked for before all work stops

Job = tuple[int, Path]  # the number of an input file, and the file
Records = dict[Split, TokenisedFile]  # of one input file
Result = tuple[int, Records]


@dataclass(frozen=True)
class _Settings:
    """What is the same for every file of a run."""

    folders: Mapping[Split, Path]
    text_field: str
    validation_fraction: float
    most_bad: int


def tokenise_files(
    files: Sequence[Path],
    folders: Mapping[Split, Path],
    *,
    tokenizer: TextTokenizer,
    text_field: str,
    validation_fraction: float,
    workers: int,
    max_bad_documents: int,
    progress: Callable[[int], None],
) -> dict[Split, list[TokenisedFile]]:
    """Tokenises the documents of each of `files` into the folder of their split (see `tokenise_file`), by `workers`
    processes (1: this process); returns the records of each split, in the order of the files.

    Files that an earlier run has finished there are kept, whatever stopped it; no other process may use the folders.
    `progress` is told the bytes consumed so far, theirs included. The first error stops the other workers and is raised
    here; so is Ctrl-C. Above `max_bad_documents` bad documents in all, DamagedInputError lists them when every file has
    been read, or earlier when there are very many. A worker that the system killed raises ChildProcessError.
    """
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
        for leftover in folder.glob(".*"):  # of a run that was killed
            leftover.unlink()
    done: dict[int, Records] = {}
    done_bytes = 0
    progress(done_bytes)
    for number in range(len(files)):
        records = {
            split: record
            for split, folder in folders.items()
            if (record := read_tokenised(folder, number, tokenizer.dtype))
        }
        if len(records) == len(folders):
            done[number] = records
            done_bytes += next(iter(records.values())).bytes
            progress(done_bytes)
    jobs = [(n, path) for n, path in enumerate(files) if n not in done]
    jobs.sort(key=lambda job: job[1].stat().st_size, reverse=True)  # a large file at the end would keep one worker busy
    settings = _Settings(folders, text_field, validation_fraction, max_bad_documents + LISTED_BEYOND)
    bad_count = len(_bad_documents(done))

    def report(count: int) -> None:
        progress(done_bytes + count)

    if workers == 1:
        run = _run_here(jobs, settings, tokenizer, report)
    else:
        run = _run_workers(jobs, settings, tokenizer, report, workers)
    try:
        with closing(run):
            for number, records in run:
                done[number] = records
                bad_count += len(_bad_documents({number: records}))
                if bad_count > settings.most_bad:
                    raise DamagedInputError((), max_bad_documents, stopped=True)
    except DamagedInputError as error:
        raise DamagedInputError(
            [*_bad_documents(done), *error.bad_documents], max_bad_documents, stopped=True
        ) from error
    bad_documents = _bad_documents(done)
    if len(bad_documents) > max_bad_documents:
        raise DamagedInputError(bad_documents, max_bad_documents, stopped=False)
    return {split: [done[n][split] for n in range(len(files))] for split in folders}


def _bad_documents(done: dict[int, Records]) -> list[BadDocument]:
    """File by file and line by line."""
    by_file = ([bad for record in done[number].values() for bad in record.bad_documents] for number in sorted(done))
    return [bad for of_file in by_file for bad in sorted(of_file, key=lambda document: document.line)]


class _Tokeniser:
    """A process's tokenizer and encoder, which are slow to make."""

    def __init__(self, settings: _Settings, tokenizer: TextTokenizer, on_bytes: Callable[[int], None]) -> None:
        self._settings, self._tokenizer, self._on_bytes = settings, tokenizer, on_bytes
        self._encoder = Encoder(tokenizer.tokenizer)

    def run(self, number: int, path: Path) -> Records:
        return tokenise_file(
            path,
            self._settings.folders,
            number,
            tokenizer=self._tokenizer,
            encoder=self._encoder,
            text_field=self._settings.text_field,
            validation_fraction=self._settings.validation_fraction,
            most_bad=self._settings.most_bad,
            on_bytes=self._on_bytes,
        )


def _run_here(
    jobs: Sequence[Job], settings: _Settings, tokenizer: TextTokenizer, progress: Callable[[int], None]
) -> Generator[Result, None, None]:
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        progress(done)

    tokeniser = _Tokeniser(settings, tokenizer, on_bytes)
    for number, path in jobs:
        yield number, tokeniser.run(number, path)


def _run_workers(
    jobs: Sequence[Job],
    settings: _Settings,
    tokenizer: TextTokenizer,
    progress: Callable[[int], None],
    workers: int,
) -> Generator[Result, None, None]:
    # A fork of this process could inherit locks held by its threads; a fork server has none.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    done_bytes: Synchronized[int] = context.Value("q", 0)
    stop = context.Event()
    start = (settings, tokenizer.path, tokenizer.eos, done_bytes, stop)
    pool = ProcessPoolExecutor(min(workers, len(jobs) or 1), context, _start_worker, start)
    waiting = iter(jobs)
    running: dict[Future[Records], int] = {}
    try:
        while True:
            for number, path in islice(waiting, 2 * workers - len(running)):
                running[pool.submit(_tokenise, number, path)] = number
            if not running:
                return
            finished, _ = wait(running, REPORT_SECONDS, FIRST_COMPLETED)
            progress(done_bytes.value)
            for future in finished:
                yield running.pop(future), future.result()
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a tokenising worker was killed (out of memory?), or could not start (a script without `if __name__ == "
            "'__main__':`?): run the same again with fewer --workers, it continues where it stopped"
        ) from error
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)  # no worker writes after this


class _Worker:
    """What a worker process keeps from task to task, set once by `_start_worker`."""

    tokeniser: _Tokeniser
    done_bytes: "Synchronized[int]"
    stop: Event


def _start_worker(settings: _Settings, tokenizer: Path, eos: str, done_bytes: "Synchronized[int]", stop: Event) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process: the parent alone acts on it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Worker.done_bytes, _Worker.stop = done_bytes, stop
    _Worker.tokeniser = _Tokeniser(settings, TextTokenizer.load(tokenizer, eos), _on_bytes)


def _end_with_parent() -> None:
    """Otherwise a worker whose parent is killed would write on beside the run that continues, and wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _tokenise(number: int, path: Path) -> Records:
    return _Worker.tokeniser.run(number, path)


def _on_bytes(count: int) -> None:
    if _Worker.stop.is_set():
        raise CancelledError
    with _Worker.done_bytes.get_lock():
        _Worker.done_bytes.value += count
