"""The bytes between the host and the program that carries files, without any I/O.

Both sides use this module: the host imports it, and `courier.py` is sent into the sandbox with
it, so it keeps to the standard library and Python 3.8. A frame is its kind (one byte), the
length of its payload (four bytes, big-endian) and the payload. One exec serves one order.

======== ========== =====================================================================
kind     direction  payload
======== ========== =====================================================================
ORDER    to courier JSON object; the first frame
ENTRY    both       a file, folder or link that follows (`Entry`)
DATA     both       1 … ``MAX_DATA`` bytes of the file of the last ENTRY
END      both       its end: how many bytes it had, and whether it changed meanwhile
COMMIT   to courier empty: everything was sent, put it into place
CREDIT   to courier four bytes: how many more bytes the host will take
KEEP     both       empty: still there
HELLO    to host    the order's nonce; the first frame
PLAN     to host    how many entries and bytes will follow, for progress
SKIPPED  to host    why (a code of `trouble.py`) and the path of what is left out
FAILED   to host    why, the errno, and the path; nothing follows
DONE     to host    how many entries and bytes it was; nothing follows
======== ========== =====================================================================

What the courier sends counts against credit, so that a host that does not read has at most
``WINDOW`` bytes under way, and no engine holds back anything else because of them.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

VERSION = 1

(ORDER, ENTRY, DATA, END, COMMIT, CREDIT, KEEP, HELLO, PLAN, SKIPPED, FAILED, DONE) = range(1, 13)

FILE, FOLDER, LINK, OTHER = range(1, 5)
"""Kinds of an entry; the last is a FIFO, a socket or a device."""

MAX_DATA = 1 << 20
MAX_PATH = 4096
MAX_ORDER = 1 << 20
WINDOW = 4 << 20
UNKNOWN_SIZE = (1 << 64) - 1
"""Announced for a file whose size is not known beforehand."""

NONCE_SIZE = 32

_HEADER = struct.Struct(">BI")
_ENTRY = struct.Struct(">BHQqH")
_END = struct.Struct(">QB")
_PAIR = struct.Struct(">QQ")
_COUNT = struct.Struct(">I")
_WHY = struct.Struct(">BH")
HEADER_SIZE = _HEADER.size

# kind -> (smallest, largest payload)
_SHAPES = {
    ORDER: (2, MAX_ORDER),
    ENTRY: (_ENTRY.size, _ENTRY.size + 2 * MAX_PATH),
    DATA: (1, MAX_DATA),
    END: (_END.size, _END.size),
    COMMIT: (0, 0),
    CREDIT: (_COUNT.size, _COUNT.size),
    KEEP: (0, 0),
    HELLO: (NONCE_SIZE, NONCE_SIZE),
    PLAN: (_PAIR.size, _PAIR.size),
    SKIPPED: (_WHY.size, _WHY.size + MAX_PATH),
    FAILED: (_WHY.size, _WHY.size + MAX_PATH),
    DONE: (_PAIR.size, _PAIR.size),
}


class WireError(Exception):
    """The peer broke the protocol; the connection cannot be used any further."""


class Frame(NamedTuple):
    """One decoded frame, or one piece of a DATA frame as its bytes arrived.

    The payload of a piece of DATA is a view into what was fed, so that nothing is copied.
    """

    kind: int
    payload: bytes | memoryview


class Entry(NamedTuple):
    """What an ENTRY frame says.

    The path is relative to what the order is about, in the sandbox's own bytes, and empty for
    that itself; `target` is a link's.
    """

    kind: int
    mode: int
    size: int
    mtime_ns: int
    path: bytes
    target: bytes = b""


class Why(NamedTuple):
    """What a SKIPPED or FAILED frame says."""

    code: int
    errno: int
    path: bytes


def header(kind: int, length: int) -> bytes:
    """Return the first bytes of a frame whose payload is written apart.

    Raises
    ------
    WireError
        If the frame is not one that a decoder would accept.
    """
    _check(kind, length)
    return _HEADER.pack(kind, length)


def encode(kind: int, payload: bytes = b"") -> bytes:
    """Return the bytes of one frame."""
    return header(kind, len(payload)) + payload


def encode_entry(entry: Entry) -> bytes:
    """Return an ENTRY frame."""
    if len(entry.path) > MAX_PATH or len(entry.target) > MAX_PATH:
        raise WireError("a path is too long")
    packed = _ENTRY.pack(entry.kind, entry.mode, entry.size, entry.mtime_ns, len(entry.path))
    return encode(ENTRY, packed + entry.path + entry.target)


def decode_entry(payload: bytes) -> Entry:
    """Return what an ENTRY frame says."""
    kind, mode, size, mtime_ns, length = _ENTRY.unpack_from(payload)
    rest = payload[_ENTRY.size :]
    if not FILE <= kind <= OTHER or mode > 0o7777 or length > len(rest):
        raise WireError("an entry that cannot be")
    path, target = rest[:length], rest[length:]
    if len(path) > MAX_PATH or len(target) > MAX_PATH or (target and kind != LINK):
        raise WireError("an entry that cannot be")
    return Entry(kind, mode, size, mtime_ns, path, target)


def encode_end(size: int, changed: bool) -> bytes:
    """Return an END frame: the file had ``size`` bytes."""
    return encode(END, _END.pack(size, changed))


def decode_end(payload: bytes) -> tuple[int, bool]:
    """Return what an END frame says."""
    size, changed = _END.unpack(payload)
    if changed > 1:
        raise WireError("an end that cannot be")
    return size, bool(changed)


def encode_pair(kind: int, count: int, size: int) -> bytes:
    """Return a PLAN or DONE frame."""
    return encode(kind, _PAIR.pack(count, size))


def decode_pair(payload: bytes) -> tuple[int, int]:
    """Return what a PLAN or DONE frame says."""
    count, size = _PAIR.unpack(payload)
    return count, size


def encode_credit(count: int) -> bytes:
    """Return a CREDIT frame."""
    return encode(CREDIT, _COUNT.pack(count))


def decode_credit(payload: bytes) -> int:
    """Return what a CREDIT frame says."""
    (count,) = _COUNT.unpack(payload)
    return int(count)


def encode_why(kind: int, why: Why) -> bytes:
    """Return a SKIPPED or FAILED frame; a path that is too long is cut, as it is for people."""
    return encode(kind, _WHY.pack(why.code, why.errno & 0xFFFF) + why.path[:MAX_PATH])


def decode_why(payload: bytes) -> Why:
    """Return what a SKIPPED or FAILED frame says."""
    code, number = _WHY.unpack_from(payload)
    return Why(code, number, payload[_WHY.size :])


def _check(kind: int, length: int) -> None:
    shape = _SHAPES.get(kind)
    if shape is None:
        raise WireError(f"unknown frame kind {kind}")
    if not shape[0] <= length <= shape[1]:
        raise WireError(f"frame kind {kind} with a payload of {length} bytes")


class Decoder:
    """Turns received bytes into frames, holding back at most one frame that is not DATA.

    ``feed`` raises `WireError` at the first byte that cannot be valid and ever after.
    """

    def __init__(self) -> None:
        self._held = bytearray()
        self._data_left = 0
        self._broken = ""

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        """Take the next received bytes and return the frames that they complete."""
        if self._broken:
            raise WireError(self._broken)
        try:
            return self._decode(memoryview(data))
        except WireError as error:
            self._broken = str(error)
            raise

    def _decode(self, view: memoryview) -> list[Frame]:
        frames = []
        held = self._held
        while view:
            if self._data_left:
                piece = view[: self._data_left]
                self._data_left -= len(piece)
                view = view[len(piece) :]
                frames.append(Frame(DATA, piece))
                continue
            if len(held) < HEADER_SIZE:
                view = self._hold(view, HEADER_SIZE)
                if len(held) < HEADER_SIZE:
                    break
            kind, length = _HEADER.unpack_from(held)
            _check(kind, length)
            if kind == DATA:
                self._data_left = length
                held.clear()
                continue
            view = self._hold(view, HEADER_SIZE + length)
            if len(held) == HEADER_SIZE + length:
                frames.append(Frame(kind, bytes(held[HEADER_SIZE:])))
                held.clear()
        return frames

    def _hold(self, view: memoryview, target: int) -> memoryview:
        missing = target - len(self._held)
        self._held += view[:missing]
        return view[missing:]
