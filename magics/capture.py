"""`Record`: what a program wrote, in order, within a bound on memory.

Of each stream the beginning and the end are kept when it is more than the limit, and the cut is
counted and marked: never a silent loss.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from typing import Final

__all__ = ["STDERR", "STDOUT", "Record"]

STDOUT: Final = 1
STDERR: Final = 2

_SEGMENT: Final = 64 * 1024
_MOST_SEGMENTS: Final = 50_000

_Segment = tuple[int, bytearray]


class _Half:
    """The kept bytes of one stream, as segments that remember their place in the whole output."""

    def __init__(self, limit: int) -> None:
        self._head_limit = max(limit - limit // 2, 1)
        self._tail_limit = max(limit // 2, 1)
        self._head: list[_Segment] = []
        self._tail: deque[_Segment] = deque()
        self._head_size = self._tail_size = 0
        self.total = 0
        self.cut = 0
        self.missed = 0

    def add(self, place: int, data: bytes, join: bool) -> None:
        self.total += len(data)
        room = self._head_limit - self._head_size
        if room > 0:
            _append(self._head, place, data[:room], join)
            self._head_size += min(room, len(data))
            data = data[room:]
        if not data:
            return
        _append(self._tail, place, data, join)
        self._tail_size += len(data)
        while (excess := self._tail_size - self._tail_limit) > 0:
            oldest = self._tail[0][1]
            dropped = min(excess, len(oldest))
            if dropped == len(oldest):
                self._tail.popleft()
            else:
                del oldest[:dropped]
            self._tail_size -= dropped
            self.cut += dropped

    def miss(self, count: int) -> None:
        self.total += count
        self.missed += count

    @property
    def last_place(self) -> int:
        segments = self._tail or self._head
        return segments[-1][0] if segments else -1

    def segments(self) -> list[tuple[int, bytes]]:
        """Return everything kept, with the cut marked where it is."""
        found = [(place, bytes(data)) for place, data in self._head]
        if self.cut:
            mark = f"\n[... {self.cut} bytes cut ...]\n".encode()
            found.append((self._tail[0][0] if self._tail else self.last_place, mark))
        found += [(place, bytes(data)) for place, data in self._tail]
        if self.missed:
            found.append((self.last_place, f"\n[... {self.missed} bytes cut ...]\n".encode()))
        return found


class Record:
    """The output of one run; a thread may add to it while others read.

    Parameters
    ----------
    limit
        Bytes kept of each stream.
    """

    def __init__(self, limit: int) -> None:
        self._streams = {STDOUT: _Half(limit), STDERR: _Half(limit)}
        self._place = 0
        self._last = 0
        self._lock = threading.Lock()

    def add(self, stream: int, data: bytes) -> None:
        """Take the next bytes of a stream."""
        with self._lock:
            self._add(self._streams[stream], stream, data)

    def _add(self, half: _Half, stream: int, data: bytes) -> None:
        # One byte of each stream in turn would cost a hundred times its size: beyond a number of
        # segments the order between the streams becomes coarser.
        join = self._last == stream
        if not join:
            if self._place < _MOST_SEGMENTS or half.last_place < 0:
                self._place += 1
            else:
                join = True
            self._last = stream
        half.add(half.last_place if join and half.last_place >= 0 else self._place, data, join)

    def miss(self, stream: int, count: int) -> None:
        """Count bytes that were written and did not come here."""
        with self._lock:
            self._streams[stream].miss(max(count, 0))

    def total(self, stream: int) -> int:
        """Return how many bytes of a stream there were."""
        return self._streams[stream].total

    def cut(self, stream: int) -> int:
        """Return how many bytes of a stream are not kept."""
        half = self._streams[stream]
        return half.cut + half.missed

    def bytes_of(self, stream: int) -> bytes:
        """Return what is kept of a stream."""
        with self._lock:
            segments = self._streams[stream].segments()
        return b"".join(data for _, data in segments)

    def interleaved(self) -> bytes:
        """Return what is kept of both streams, in the order in which it came."""
        with self._lock:
            both = [half.segments() for half in self._streams.values()]
        return b"".join(data for _, data in heapq.merge(*both, key=lambda segment: segment[0]))


def _append(
    segments: list[_Segment] | deque[_Segment], place: int, data: bytes, join: bool
) -> None:
    if join and segments and len(segments[-1][1]) + len(data) <= _SEGMENT:
        segments[-1][1].extend(data)
    else:
        segments.append((place, bytearray(data)))
