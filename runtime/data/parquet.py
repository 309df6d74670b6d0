"""Reads the text column of a parquet file row by row; pyarrow is imported only here."""

import io
from collections.abc import Callable, Iterator

from optimus_compiler.runtime.data.json_line import TextFieldError
from optimus_compiler.runtime.data.streams import DamagedStreamError

ROWS = 16  # held at a time: there is no telling how large they are
BUFFER = 1 << 20  # bytes of the column read at a time


def read_rows(file: io.BufferedReader, field: str) -> Iterator[str | ValueError]:
    """The string in column `field` of each row, or what is wrong with that row.

    A page of the file, dictionary pages too, is held as a whole: pyarrow has no way to read a part of one, so a value
    of hundreds of MiB takes as much memory. Raises DamagedStreamError where the file cannot be read on, OSError when
    the disk fails.
    """
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(file, pre_buffer=False, buffer_size=BUFFER, page_checksum_verification=True)
        names = table.schema_arrow.names
        if field not in names:
            raise DamagedStreamError(str(TextFieldError.absent(field, ", ".join(names))))
        for group in range(table.num_row_groups):  # a batch does not reach into the next, which may be damaged
            for batch in table.iter_batches(ROWS, row_groups=[group], columns=[field], use_threads=False):
                for value in batch.column(0):
                    yield _text(value.as_py, field, value.type)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's own error; pyarrow reports corrupt pages as OSError without a number
        raise DamagedStreamError(f"the parquet file is corrupt ({' '.join(str(error).split())})") from error


def _text(read: Callable[[], object], field: str, kind: object) -> str | ValueError:
    try:
        text = read()
    except UnicodeDecodeError as error:
        return error
    if isinstance(text, str):
        return text
    return TextFieldError.no_string(field, "null" if text is None else str(kind))
