"""One training process to a run directory: one left over from an earlier start must not write beside the next."""

import errno
import fcntl
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EBADF, errno.EINVAL)  # Lustre without flock, NFS, ...


@contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Keeps `directory`, which exists, for this process until the block ends, or the process dies.

    Raises ValueError when another process has it. A file system without locks lets everybody in.
    """
    folder = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is training in {directory}: stop it first, or give another --output"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            warnings.warn(
                f"{directory} is on a file system without locks ({error.strerror}): nothing keeps two runs from "
                "writing there at once",
                stacklevel=2,
            )
        yield
    finally:
        os.close(folder)
