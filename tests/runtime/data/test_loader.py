"""Ranks' batches join to the sample index's order from any position on, and are read one ahead on a thread."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from optimus_compiler.runtime.data import loader as loader_module
from optimus_compiler.runtime.data.dataset import PreparedData
from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.data.labels import documents_of, labels_of
from optimus_compiler.runtime.data.loader import Batch, DataLoader
from optimus_compiler.runtime.data.prepare import prepare
from optimus_compiler.runtime.data.sample_index import Position, SampleIndex
from tests.runtime.data.conftest import json_lines

START = Position(0, 0)
SEED = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path) -> PreparedData:
    """Short documents in instances of 8 tokens, several shards; every document's tail is padded."""
    folder = tmp_path_factory.mktemp("loader")
    (folder / "a.jsonl").write_bytes(json_lines([f"document {i} of {i * i}" for i in range(40)]))
    prepare(
        [folder / "a.jsonl"],
        tokenizer=tokenizer_file,
        context_length=8,
        output=folder / "out",
        shard_tokens=100,
        tails="keep",
        documents="separate",
    )
    return PreparedData.open(folder / "out")


def read(data: PreparedData, steps: int, *, size: int, ranks: int, position: Position = START) -> list[Batch]:
    """The batches of all ranks joined, step by step; the ranks must agree on the position."""
    joined = []
    loaders = [
        DataLoader(data, seed=SEED, global_batch_size=size, rank=rank, ranks=ranks, position=position)
        for rank in range(ranks)
    ]
    for _ in range(steps):
        batches = [loader.next() for loader in loaders]
        assert len({batch.position for batch in batches}) == 1
        assert {len(batch.input_ids) for batch in batches} == {size // ranks}
        input_ids, labels = (torch.cat([getattr(b, name) for b in batches]) for name in ("input_ids", "labels"))
        joined.append(Batch(input_ids, labels, None, None, batches[0].position))
    for loader in loaders:
        loader.close()
    return joined


def ids_of(batches: list[Batch]) -> list[list[int]]:
    return torch.cat([batch.input_ids for batch in batches]).tolist()


@pytest.mark.parametrize(("size", "ranks"), [(1, 1), (6, 1), (6, 2), (12, 12)])
def test_batches_of_all_ranks_join_to_the_order_of_the_index(data: PreparedData, size: int, ranks: int) -> None:
    steps = 2 * len(data) // size + 2  # into the third epoch
    batches = read(data, steps, size=size, ranks=ranks)
    order = SampleIndex(len(data), SEED).stored(START, steps * size)
    assert ids_of(batches) == data.read(order).tolist()
    assert batches[-1].position == Position(*divmod(steps * size, len(data)))
    epoch = sorted(data.read(np.arange(len(data))).tolist())
    assert sorted(ids_of(batches)[: len(data)]) == sorted(ids_of(batches)[len(data) : 2 * len(data)]) == epoch


def test_a_run_resumes_from_any_position_with_any_number_of_ranks(data: PreparedData) -> None:
    whole = read(data, 40, size=12, ranks=1)
    for done, ranks in enumerate((2, 3, 4, 6, 12, 1) * 6, start=1):
        position = Position(**json.loads(json.dumps(asdict(whole[done - 1].position))))
        (resumed,) = read(data, 1, size=12, ranks=ranks, position=position)
        assert torch.equal(resumed.input_ids, whole[done].input_ids)
        assert torch.equal(resumed.labels, whole[done].labels)
        assert resumed.position == whole[done].position


def test_a_run_resumes_at_the_end_of_an_epoch(data: PreparedData) -> None:
    n = len(data)
    first, second = read(data, 2, size=n, ranks=1)
    assert (first.position, second.position) == (Position(1, 0), Position(2, 0))
    for position in (first.position, Position(0, n)):
        (resumed,) = read(data, 1, size=n, ranks=1, position=position)
        assert torch.equal(resumed.input_ids, second.input_ids)
        assert resumed.position == second.position


def test_padding_has_no_label(data: PreparedData) -> None:
    (epoch,) = read(data, 1, size=len(data), ranks=1)
    assert torch.equal(epoch.labels, labels_of(epoch.input_ids, data.manifest.eos_id))
    padding = epoch.labels == -100
    assert int(padding.sum()) == data.manifest.counts.padding_tokens > 0
    assert (epoch.input_ids[padding] == data.manifest.eos_id).all()
    assert torch.equal(epoch.labels[~padding], epoch.input_ids[~padding])
    assert int((epoch.labels == data.manifest.eos_id).sum()) == data.manifest.counts.documents


def test_documents_come_when_they_are_asked_for(data: PreparedData) -> None:
    with DataLoader(data, seed=SEED, global_batch_size=4) as plain:
        batch = plain.next()
    assert list(batch.inputs()) == ["input_ids", "labels"]
    with DataLoader(data, seed=SEED, global_batch_size=4, document_mask=True) as masked:
        batch = masked.next()
    inputs = batch.inputs()
    assert list(inputs) == ["input_ids", "labels", "document_ids", "position_ids"]
    assert all(value.dtype == torch.int64 and value.shape == (4, 8) for value in inputs.values())
    document_ids, position_ids = documents_of(inputs["input_ids"], data.manifest.eos_id)
    assert torch.equal(inputs["document_ids"], document_ids)
    assert torch.equal(inputs["position_ids"], position_ids)


class Reads:
    """Counts the reads of a data set; `gate` holds them back, `failure` stops them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Semaphore(0)
        self.threads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        original = PreparedData.read

        def watched(data: PreparedData, stored_B: NDArray[np.int64]) -> Tensor:
            self.threads.append(threading.current_thread().name)
            self.begun.release()
            assert self.gate.wait(timeout=60)
            if self.failure is not None:
                raise self.failure
            return original(data, stored_B)

        monkeypatch.setattr(PreparedData, "read", watched)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    reads = Reads(monkeypatch)
    yield reads
    reads.gate.set()


def test_one_batch_is_read_ahead_on_a_thread_of_its_own(data: PreparedData, reads: Reads) -> None:
    loader = DataLoader(data, seed=SEED, global_batch_size=4)
    assert reads.begun.acquire(timeout=60)  # before anybody asked
    for _ in range(3):
        loader.next()
        assert reads.begun.acquire(timeout=60)
    loader.close()
    assert reads.threads == ["data_0"] * 4
    assert not any(thread.name.startswith("data") for thread in threading.enumerate())


def test_closing_waits_for_the_batch_being_read(data: PreparedData, reads: Reads) -> None:
    reads.gate.clear()
    loader = DataLoader(data, seed=SEED, global_batch_size=4)
    assert reads.begun.acquire(timeout=60)
    threading.Timer(0.01, reads.gate.set).start()
    loader.close()
    assert not any(thread.name.startswith("data") for thread in threading.enumerate())
    with pytest.raises(RuntimeError, match="after shutdown"):
        loader.next()


def test_an_error_in_reading_surfaces_at_the_batch_it_belongs_to(data: PreparedData, reads: Reads) -> None:
    with DataLoader(data, seed=SEED, global_batch_size=4) as loader:
        assert reads.begun.acquire(timeout=60)
        reads.gate.clear()
        first = loader.next()
        assert first.position == Position(0, 4)
        assert reads.begun.acquire(timeout=60)
        reads.failure = OSError("disk gone")
        reads.gate.set()
        for _ in range(2):  # and again, however often it is asked
            with pytest.raises(OSError, match="disk gone"):
                loader.next()


def test_time_waited_is_that_of_the_last_batch(data: PreparedData, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.5, 20.0, 20.25])
    with DataLoader(data, seed=SEED, global_batch_size=4) as loader:
        monkeypatch.setattr(loader_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
        assert loader.waited == 0
        loader.next()
        assert loader.waited == 2.5
        loader.next()
        assert loader.waited == 0.25


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda data: DataLoader(data, seed=0, global_batch_size=6, ranks=4), "6 sequences .* over 4 data ranks"),
        (lambda data: DataLoader(data, seed=0, global_batch_size=4, rank=2, ranks=2), "no rank 2 of 2"),
        (lambda data: DataLoader(data, seed=-1, global_batch_size=4), "seed -1 is out of range"),
        (lambda data: DataLoader(data, seed=0, global_batch_size=4, position=Position(1, 10**6)), "in other data"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_at_once(
    data: PreparedData, build: Callable[[PreparedData], DataLoader], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        build(data)
    assert not any(thread.name.startswith("data") for thread in threading.enumerate())
