"""Writes instances in stored order as .npy shards, each whole or not at all, and keeps those already written."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from optimus_compiler.runtime.data.files import npy_header, whole_file
from optimus_compiler.runtime.data.instances import Instances
from optimus_compiler.runtime.data.manifest import Shard

BLOCK_BYTES, BLOCK_ROWS = 1 << 25, 1 << 16  # what a thread gathers in memory at a time
MOST_THREADS = 16  # bounds memory; more would mostly wait for the interpreter's lock


def write_shards(
    folder: Path,
    records: Path,
    instances: Instances,
    *,
    shard_tokens: int,
    workers: int,
    progress: Callable[[int, int], None],
) -> list[Shard]:
    """Writes shard-00000.npy, ... into `folder`: [rows, context_length], at most `shard_tokens` tokens each.

    Up to `workers` threads write them, which wait for reads at the same time. Each finished shard gets a record in
    `records`; a shard that has one is kept. `progress` is told the shards done and to do.
    """
    rows = shard_tokens // instances.context_length
    starts = range(0, len(instances), rows)

    def write(number: int) -> Shard:
        return _write_shard(folder, records, instances, number, rows)

    shards: list[Shard] = []
    with ThreadPoolExecutor(min(workers, MOST_THREADS)) as pool:
        for shard in pool.map(write, range(len(starts))):  # an error here, or Ctrl-C, cancels those not begun
            shards.append(shard)
            progress(len(shards), len(starts))
    return shards


def _write_shard(folder: Path, records: Path, instances: Instances, number: int, rows: int) -> Shard:
    path, record = folder / f"shard-{number:05d}.npy", records / f"{number:05d}.json"
    first, last = number * rows, min((number + 1) * rows, len(instances))
    header = npy_header(instances.dtype, (last - first, instances.context_length))
    row_bytes = instances.context_length * instances.dtype.itemsize
    if record.is_file() and path.is_file() and path.stat().st_size == len(header) + (last - first) * row_bytes:
        return Shard.model_validate_json(record.read_bytes())
    with whole_file(path) as file:
        file.write(header)
        step = max(1, min(BLOCK_BYTES // row_bytes, BLOCK_ROWS))
        for start in range(first, last, step):
            file.write(instances.read(start, min(start + step, last)))
    shard = Shard(file=path.name, instances=last - first, sha256=file.sha256)
    with whole_file(record) as file:
        file.write(shard.model_dump_json().encode())
    return shard
