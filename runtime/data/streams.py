"""Opens a plain, gzip or zstd file as one stream of bytes in which damage is an error and never an early end."""

import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

FEED = 1 << 10  # compressed bytes decoded at a time: 4 bytes of zstd can stand for 128 KiB
BUFFER = 1 << 16


class DamagedStreamError(Exception):
    """What is wrong with a file from here on: nothing after this point of it can be read."""


def open_stream(path: Path, file: io.BufferedReader) -> io.BufferedReader:
    """The decompressed bytes of `file`, which is open at the start of `path`; the name says how it is compressed.

    All gzip members or zstd frames are read. Where they are truncated or corrupt, every byte before the fault is
    given and then DamagedStreamError raised. A zstd window above 128 MiB counts as a fault: memory is bounded.
    """
    name = path.name.lower()
    if name.endswith(".gz"):
        return io.BufferedReader(_Decoded(file, "gzip", lambda: zlib.decompressobj(wbits=31), zlib.error), BUFFER)
    if name.endswith(".zst"):
        import zstandard

        return io.BufferedReader(
            _Decoded(file, "zstd", zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError), BUFFER
        )
    return file


class _Decoder(Protocol):
    """What zlib and zstandard call a decompressobj: it stops after one gzip member or zstd frame."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


class _Decoded(io.RawIOBase):
    """Decompresses a file of frames. The decoders report a truncated frame as a plain end, hence the own loop."""

    def __init__(
        self, file: io.BufferedReader, kind: str, new_decoder: Callable[[], _Decoder], fault: type[Exception]
    ) -> None:
        self._file, self._kind, self._new_decoder, self._fault = file, kind, new_decoder, fault
        self._output = self._decode()
        self._pending = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._pending:
            decoded = next(self._output, None)
            if decoded is None:
                return 0
            self._pending = memoryview(decoded)
        count = min(len(buffer), len(self._pending))
        buffer[:count], self._pending = self._pending[:count], self._pending[count:]
        return count

    def _decode(self) -> Iterator[bytes]:
        decoder: _Decoder | None = None  # of the frame that has begun
        start = 0  # of that frame in the file
        while data := self._file.read(FEED):
            while data:
                here = self._file.tell() - len(data)
                if decoder is None:
                    decoder, start = self._new_decoder(), here
                try:
                    decoded = decoder.decompress(data)
                except self._fault as error:
                    yield from self._before_fault(start, here)
                    raise DamagedStreamError(f"the {self._kind} stream is corrupt ({error})") from error
                yield decoded
                data = decoder.unused_data
                if decoder.eof:
                    decoder = None
        if decoder is not None:
            raise DamagedStreamError(f"the {self._kind} stream is truncated: it ends before its end mark")

    def _before_fault(self, start: int, here: int) -> Iterator[bytes]:
        """What the bytes from `here` on still give, one at a time, of the frame that begins at `start`."""
        decoder = self._new_decoder()
        self._file.seek(start)
        while (left := here - self._file.tell()) > 0:
            decoder.decompress(self._file.read(min(FEED, left)))
        while byte := self._file.read(1):
            try:
                yield decoder.decompress(byte)
            except self._fault:
                return
