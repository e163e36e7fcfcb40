"""A command's output on its way to a reader (W9, W10): reports taken out, spooled, captured.

No engine here. `Reports` finds the wrapper's reports; `Spool` keeps what is not yet read, in
memory up to a bound and then in a file; `Capture` keeps the head and the tail.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import deque
from typing import IO, Protocol

from sandbox_kernel.process.result import Chunk

__all__ = ["Capture", "Captures", "Reports", "Sink", "Spool"]

MEMORY_BOUND = 4 * 1024 * 1024
_LONGEST_REPORT = 256


class Sink(Protocol):
    """Where a command's output goes."""

    def put(self, chunk: Chunk) -> None:
        """Take a chunk without waiting; raises `OSError` when it cannot be kept."""

    def end(self) -> None:
        """Say that nothing follows."""

    def close(self) -> None:
        """Say that nobody wants any more of it."""


class Reports:
    """Takes the wrapper's reports out of a stream, however the bytes were cut into chunks.

    Bytes that could be the beginning of a report, and only those, wait for what follows.
    """

    def __init__(self, nonce: str) -> None:
        self._marker = b"\x1e" + nonce.encode() + b" "
        self._held = b""

    def feed(self, data: bytes) -> tuple[bytes, list[list[str]]]:
        """Return the command's own bytes and the words of each report that is complete."""
        data = self._held + data
        self._held = b""
        reports: list[list[str]] = []
        own = bytearray()
        while (at := data.find(self._marker)) >= 0:
            own += data[:at]
            end = data.find(b"\n", at)
            if end < 0:
                if len(data) - at <= _LONGEST_REPORT:
                    self._held = data[at:]
                    return bytes(own), reports
                break
            reports.append(data[at + len(self._marker) : end].decode("ascii", "replace").split())
            data = data[end + 1 :]
        for size in range(min(len(self._marker) - 1, len(data)), 0, -1):
            if self._marker.startswith(data[-size:]):
                self._held = data[-size:]
                data = data[:-size]
                break
        return bytes(own + data), reports

    def rest(self) -> bytes:
        """Return what still waited, at the end of the stream."""
        held, self._held = self._held, b""
        return held


class Spool:
    """A queue of chunks that never makes the writer wait; `None` is its end.

    Parameters
    ----------
    memory
        Bytes kept in memory; what comes beyond goes to an unnamed file until all of it is read.
    """

    def __init__(self, memory: int = MEMORY_BOUND) -> None:
        self._memory = memory
        self._queued: deque[Chunk] = deque()
        self._size = 0
        self._file: IO[bytes] | None = None
        self._index: deque[tuple[int, int, int]] = deque()
        self._written = 0
        self._ended = False
        self._wake = asyncio.Event()

    def put(self, chunk: Chunk) -> None:
        """Append a chunk; once the file is in use, order demands that everything goes there."""
        if self._ended:
            return
        size = len(chunk.data)
        if self._index or self._size + size > self._memory:
            if self._file is None:
                # Without a buffer: a disk that is full is told here, and spoils nothing before.
                self._file = tempfile.TemporaryFile(  # noqa: SIM115
                    prefix="sandbox-kernel-", buffering=0
                )
            self._file.seek(self._written)
            left = memoryview(chunk.data)
            while left:
                left = left[self._file.write(left) :]
            self._index.append((chunk.stream, self._written, size))
            self._written += size
        else:
            self._queued.append(chunk)
            self._size += size
        self._wake.set()

    def end(self) -> None:
        """Say that nothing follows."""
        self._ended = True
        self._wake.set()

    async def get(self) -> Chunk | None:
        """Wait for the next chunk; `None` at the end, again and again."""
        while True:
            if self._queued:
                chunk = self._queued.popleft()
                self._size -= len(chunk.data)
                return chunk
            if self._index and self._file is not None:
                stream, start, size = self._index.popleft()
                self._file.seek(start)
                chunk = Chunk(stream, self._file.read(size))
                if not self._index:
                    self._file.truncate(0)
                    self._written = 0
                return chunk
            if self._ended:
                return None
            self._wake.clear()
            await self._wake.wait()

    def close(self) -> None:
        """Drop what is left, the file included."""
        self._queued.clear()
        self._index.clear()
        self._size = self._written = 0
        if self._file is not None:
            self._file.close()
            self._file = None
        self.end()


class Captures:
    """Keeps the beginning and the end of both streams, for a call that collects them."""

    def __init__(self, limit: int) -> None:
        self.out = Capture(limit)
        self.err = Capture(limit)

    def put(self, chunk: Chunk) -> None:
        """Take a chunk."""
        (self.out if chunk.stream == 1 else self.err).add(chunk.data)

    def end(self) -> None:
        """Wait for nothing: nobody reads on."""

    def close(self) -> None:
        """Keep what was taken."""


class Capture:
    """Keeps the first and the last half of a limit and counts everything."""

    def __init__(self, limit: int) -> None:
        self._half = max(limit // 2, 1)
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        """Take the next bytes."""
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]

    @property
    def cut(self) -> int:
        """How many bytes in the middle are not kept."""
        return max(self.total - 2 * self._half, 0)

    def value(self) -> bytes:
        """Return what is kept, with the cut marked."""
        if not self.cut:
            return bytes(self._head + self._tail)
        mark = f"\n[... {self.cut} bytes cut ...]\n".encode()
        return bytes(self._head) + mark + bytes(self._tail[-self._half :])
