"""The wire between host and relay: frames and flow-control windows, without any I/O.

Both ends use this file: the host imports it, and the relay receives its text over the exec's
stdin. It therefore runs on Python 3.8 and needs the standard library only. What lives here
is arithmetic on bytes; sockets, tasks and policy live in ``channels.py`` and ``relay.py``.

A frame is a header of nine bytes (kind, stream, length; big-endian) and a payload. Stream 0
is the connection itself; the host numbers the other streams 1, 2, 3, … and never reuses a
number, so a frame for a stream that has ended is told apart from a forged one.

======== ========== ====== =========================================================
kind     direction  stream payload
======== ========== ====== =========================================================
HELLO    both       0      JSON object; the first frame of each side
OPEN     to relay   n      one byte: the channel's index in ``CHANNELS``
OPENED   to host    n      empty: the kernel accepted the connection
DATA     both       n      1 … ``MAX_DATA`` bytes, covered by credit
CREDIT   both       n      four bytes: how many more bytes the sender of it will take
CLOSE    both       n      UTF-8 reason, for people
PING     both       0      eight bytes
PONG     both       0      the eight bytes of the ping
======== ========== ====== =========================================================
"""

from __future__ import annotations

import struct
from typing import NamedTuple

VERSION = 1
CHANNELS = ("shell", "iopub", "stdin", "control", "hb")

HELLO, OPEN, OPENED, DATA, CREDIT, CLOSE, PING, PONG = range(1, 9)

MAX_DATA = 1 << 16
"""Largest payload of a DATA frame, in bytes: small, so that no stream holds the line long."""

WINDOW = 1 << 20
"""Bytes that may be under way on one stream in one direction before credit returns."""

_HEADER = struct.Struct(">BII")
_COUNT = struct.Struct(">I")
HEADER_SIZE = _HEADER.size

# kind -> (smallest, largest payload, whether the stream must be 0)
_SHAPES = {
    HELLO: (2, 1 << 14, True),
    OPEN: (1, 1, False),
    OPENED: (0, 0, False),
    DATA: (1, MAX_DATA, False),
    CREDIT: (4, 4, False),
    CLOSE: (0, 1 << 10, False),
    PING: (8, 8, True),
    PONG: (8, 8, True),
}


class WireError(Exception):
    """The peer broke the protocol; the connection cannot be used any further."""


class Frame(NamedTuple):
    """One decoded frame, or one piece of a DATA frame.

    A DATA frame may come out in several pieces, as its bytes arrive: joining the pieces of a
    stream gives the bytes that were sent, and nothing waits for the rest of a frame.
    """

    kind: int
    stream: int
    payload: bytes


def encode(kind: int, stream: int, payload: bytes = b"") -> bytes:
    """Return the bytes of one frame.

    Raises
    ------
    WireError
        If the frame is not one that a decoder would accept.
    """
    _check(kind, stream, len(payload))
    return _HEADER.pack(kind, stream, len(payload)) + payload


def encode_data(stream: int, data: bytes | memoryview) -> list[bytes]:
    """Return ``data`` as DATA frames of at most ``MAX_DATA`` bytes each."""
    view = memoryview(data)
    return [
        encode(DATA, stream, bytes(view[start : start + MAX_DATA]))
        for start in range(0, len(view), MAX_DATA)
    ]


def encode_credit(stream: int, count: int) -> bytes:
    """Return a CREDIT frame that lets the peer send ``count`` more bytes on ``stream``."""
    return encode(CREDIT, stream, _COUNT.pack(count))


def credit_of(frame: Frame) -> int:
    """Return the count that a CREDIT frame carries."""
    return int(_COUNT.unpack(frame.payload)[0])


def _check(kind: int, stream: int, length: int) -> None:
    shape = _SHAPES.get(kind)
    if shape is None:
        raise WireError(f"unknown frame kind {kind}")
    smallest, largest, on_connection = shape
    if not smallest <= length <= largest:
        raise WireError(f"frame kind {kind} with a payload of {length} bytes")
    if on_connection != (stream == 0):
        raise WireError(f"frame kind {kind} on stream {stream}")


class Decoder:
    """Turns received bytes into frames, holding back at most one small frame.

    ``feed`` raises `WireError` at the first byte that cannot be valid and ever after; what
    came before it has been returned by earlier calls or is lost with the connection.
    """

    def __init__(self) -> None:
        self._held = bytearray()
        self._stream = 0
        self._data_left = 0
        self._broken = ""

    def feed(self, data: bytes) -> list[Frame]:
        """Take the next received bytes and return the frames they complete."""
        if self._broken:
            raise WireError(self._broken)
        try:
            return self._decode(data)
        except WireError as error:
            self._broken = str(error)
            raise

    def _decode(self, data: bytes) -> list[Frame]:
        frames: list[Frame] = []
        position = 0
        if self._held:
            position = self._complete_held(data, frames)
        size = len(data)
        while position < size:
            if self._data_left:
                piece = data[position : position + self._data_left]
                self._data_left -= len(piece)
                position += len(piece)
                frames.append(Frame(DATA, self._stream, piece))
                continue
            if size - position < HEADER_SIZE:
                break
            kind, stream, length = _HEADER.unpack_from(data, position)
            _check(kind, stream, length)
            if kind == DATA:
                self._stream, self._data_left = stream, length
                position += HEADER_SIZE
                continue
            end = position + HEADER_SIZE + length
            if end > size:
                break
            frames.append(Frame(kind, stream, data[position + HEADER_SIZE : end]))
            position = end
        self._held += data[position:]
        return frames

    def _complete_held(self, data: bytes, frames: list[Frame]) -> int:
        """Finish the frame whose first bytes are held; return how much of ``data`` it took."""
        taken = self._top_up(data, 0, HEADER_SIZE)
        if len(self._held) < HEADER_SIZE:
            return taken
        kind, stream, length = _HEADER.unpack_from(self._held)
        _check(kind, stream, length)
        if kind == DATA:
            self._stream, self._data_left = stream, length
            self._held.clear()
            return taken
        taken = self._top_up(data, taken, HEADER_SIZE + length)
        if len(self._held) == HEADER_SIZE + length:
            frames.append(Frame(kind, stream, bytes(self._held[HEADER_SIZE:])))
            self._held.clear()
        return taken

    def _top_up(self, data: bytes, position: int, target: int) -> int:
        missing = max(0, target - len(self._held))
        piece = data[position : position + missing]
        self._held += piece
        return position + len(piece)


class SendWindow:
    """How much one side may still send on a stream.

    The peer's credit can never exceed `WINDOW`, so a larger total is a protocol error and
    the counter cannot be made to overflow.
    """

    def __init__(self) -> None:
        self.available = WINDOW

    def spend(self, count: int) -> None:
        """Account for ``count`` bytes sent."""
        self.available -= count

    def grant(self, count: int) -> None:
        """Account for credit received from the peer."""
        self.available += count
        if count == 0 or self.available > WINDOW:
            raise WireError(f"credit of {count} bytes beyond the window")


class ReceiveWindow:
    """How much the peer may still send on a stream, and when to return credit.

    Credit goes back once half of the window has been consumed: often enough that a stream
    never starves, seldom enough that the frames cost nothing.
    """

    def __init__(self) -> None:
        self._allowed = WINDOW
        self._consumed = 0

    def receive(self, count: int) -> None:
        """Account for ``count`` bytes received; raise if the peer ignored the window."""
        self._allowed -= count
        if self._allowed < 0:
            raise WireError(f"{-self._allowed} bytes beyond the window")

    def consume(self, count: int) -> int:
        """Account for ``count`` bytes passed on; return the credit to send now, or 0."""
        self._consumed += count
        if self._consumed < WINDOW // 2:
            return 0
        credit, self._consumed = self._consumed, 0
        self._allowed += credit
        return credit
