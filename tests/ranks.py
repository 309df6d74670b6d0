"""A pool of worker processes for every test of several ranks: run(4, function, ...) -> what each rank returned."""

import io
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.captured import share_captures

LARGEST = 16
SECONDS = 240  # after which a test is taken to hang


class RankError(AssertionError):
    """A rank raised, died or hung; the message holds its traceback."""


class Ranks:
    """Workers that wait for functions; started when first needed, and anew after a failure."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, count: int, function: Callable[..., Any], *arguments: Any, seconds: float = SECONDS) -> list[Any]:
        """Calls a module-level function on `count` ranks of a fresh gloo process group; their results in order."""
        assert count <= LARGEST
        while len(self._workers) < count:
            self._workers.append(_start())
        with tempfile.TemporaryDirectory() as folder:
            task = _pack((function, arguments))
            for rank, (_, pipe) in enumerate(self._workers[:count]):
                pipe.send((rank, count, str(Path(folder) / "store"), task))
            waiting: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:count])}
            results: dict[int, Any] = {}
            while waiting:
                ready: list[Any] = wait(list(waiting), timeout=seconds)
                if not ready:
                    self.stop()
                    raise RankError(f"ranks {sorted(waiting.values())} of {count} did not answer within {seconds} s")
                for pipe in ready:
                    rank = waiting.pop(pipe)
                    try:
                        ok, payload = pipe.recv()
                    except EOFError:
                        self.stop()
                        raise RankError(f"rank {rank} of {count} died") from None
                    if not ok:
                        self.stop()
                        raise RankError(f"rank {rank} of {count}:\n{payload}")
                    results[rank] = torch.load(io.BytesIO(payload), weights_only=False)
        return [results[rank] for rank in range(count)]

    def stop(self) -> None:
        """Ends all workers at once."""
        for process, pipe in self._workers:
            pipe.close()
            if process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        self._workers = []


def forkserver() -> Any:
    """Starts processes that have imported torch and us, and captured models, already: once, for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["functorch.compile", "torch.distributed.pipelining", "tests.warm"])
    return context


def _start() -> tuple[Any, Connection]:
    context = forkserver()
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _work(pipe: Connection) -> None:
    torch.set_num_threads(1)
    share_captures()
    while True:
        try:
            rank, count, store, task = pipe.recv()
        except EOFError:
            return
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(count))
        try:
            if count > 1:
                dist.init_process_group("gloo", store=dist.FileStore(store, count), rank=rank, world_size=count)
                dist.barrier()  # a rank that is done at once must not leave while others still connect to it
            function, arguments = torch.load(io.BytesIO(task), weights_only=False)
            payload = (True, _pack(function(*arguments)))
        except BaseException:
            payload = (False, traceback.format_exc().encode())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send((payload[0], payload[1] if payload[0] else payload[1].decode()))


def _pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The pool of this test session."""
    pool = Ranks()
    yield pool
    pool.stop()
