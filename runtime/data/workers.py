"""Tokenises input files in worker processes: one file a task, results in the order of the files."""

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

from optimus_compiler.runtime.data.manifest import Source
from optimus_compiler.runtime.data.tokenise import TextTokenizer, tokenise_file

REPORT_SECONDS = 0.2


def tokenise_files(
    files: Sequence[Path],
    outputs: Sequence[Path],
    *,
    tokenizer: Path,
    eos: str,
    text_field: str,
    workers: int,
    progress: Callable[[int], None],
) -> list[Source]:
    """`tokenise_file` of each of `files` to the like-numbered of `outputs`, by `workers` processes (1: this process).

    `progress` is told the bytes consumed so far. The first error stops the other workers and is raised here; so is
    Ctrl-C. A worker that the system killed raises ChildProcessError.
    """
    jobs = list(zip(files, outputs, strict=True))
    if workers == 1:
        loaded, done = TextTokenizer.load(tokenizer, eos), 0

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            progress(done)

        return [tokenise_file(path, loaded, text_field, output, on_bytes) for path, output in jobs]

    # A fork of this process could inherit locks held by its threads; a fork server has none.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    done_bytes: Synchronized[int] = context.Value("q", 0)
    stop = context.Event()
    pool = ProcessPoolExecutor(workers, context, _start_worker, (tokenizer, eos, text_field, done_bytes, stop))
    try:
        futures = [pool.submit(_tokenise, *job) for job in jobs]
        while True:
            finished, running = wait(futures, REPORT_SECONDS, FIRST_EXCEPTION)
            for future in finished:
                future.result()
            progress(done_bytes.value)
            if not running:
                return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise ChildProcessError("a tokenising worker was killed (out of memory?): use fewer --workers") from error
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)  # no worker writes after this


class _Worker:
    """What a worker process keeps from task to task, set once by `_start_worker`."""

    tokenizer: TextTokenizer
    text_field: str
    done_bytes: "Synchronized[int]"
    stop: Event


def _start_worker(tokenizer: Path, eos: str, text_field: str, done_bytes: "Synchronized[int]", stop: Event) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process: the parent alone acts on it
    _Worker.tokenizer = TextTokenizer.load(tokenizer, eos)
    _Worker.text_field, _Worker.done_bytes, _Worker.stop = text_field, done_bytes, stop


def _tokenise(path: Path, output: Path) -> Source:
    return tokenise_file(path, _Worker.tokenizer, _Worker.text_field, output, _on_bytes)


def _on_bytes(count: int) -> None:
    if _Worker.stop.is_set():
        raise CancelledError
    with _Worker.done_bytes.get_lock():
        _Worker.done_bytes.value += count
