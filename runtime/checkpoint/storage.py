"""The files of a checkpoint: DCP's own format, written box by box to the disk, with checksums."""

import io
import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from optimus_compiler.runtime.checkpoint.manifest import StoredFile
from optimus_compiler.runtime.files import synced_file

# One process is a job like any other here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class CheckedWriter(FileSystemWriter):
    """DCP's writer, one file a rank, that holds one box in memory at a time and knows the checksum of its file.

    torch's own (2.13) keeps a copy of everything it writes until the file is complete. Its reader reads these files.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files: dict[str, StoredFile] = {}  # what this rank has written

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        results: list[WriteResult] = []
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        if not plan.items:
            return written
        with synced_file(Path(self.path) / name) as file:
            for item in plan.items:
                start = file.tell()
                box = planner.resolve_data(item)
                assert isinstance(box, torch.Tensor)
                file.write(_saved(box))
                length = file.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            self.files[name] = StoredFile(bytes=file.tell(), sha256=file.sha256)
        return written


def _saved(box: torch.Tensor) -> memoryview:
    """What torch.save writes of a box; in memory first, for it replaces errors of the disk by its own."""
    buffer = io.BytesIO()
    torch.save(box.detach().cpu().clone(), buffer)  # a copy: of a view it saves all of the flat tensor behind
    return buffer.getbuffer()


class CheckpointReader(FileSystemReader):
    """DCP's reader, which reads a checkpoint's metadata once for all its loads."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata
