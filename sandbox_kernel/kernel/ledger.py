"""What clients have asked of a kernel and not been answered yet (goal 7).

A connection that breaks takes along what was under way on it: a request, its reply, or the news
that the kernel is idle again. A client would wait for these for ever, so this book is kept: what
is written down comes from the client's bytes and the kernel's, hence is bounded, and read with
care. It does no I/O. Encrypted messages cannot be read, and are not written down.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from sandbox_kernel.kernel.obituary import LARGEST_HEADER, parent_header, picked
from sandbox_kernel.kernel.zmtp import GREETING_SIZE

__all__ = ["NOTED", "Ledger", "MessageReader", "Request", "frames"]

NOTED = {"shell": (b'_reply"',), "iopub": (b'"status"',)}
"""What the headers of the messages hold that end a request, by channel."""

_DELIMITER = b"<IDS|MSG>"
_MOST_REQUESTS = 512
_LEADING_PARTS = 3
_LONGEST_COMMAND = 1 << 12
_LONGEST_IDENTITY = 255
_MORE, _LONG, _COMMAND = 1, 2, 4


@dataclass
class Request:
    """One request.

    Parameters
    ----------
    header
        Its header, as far as it can be used.
    client
        The identity of the client's socket.
    aside
        Whether it runs beside the others, in a subshell, so that their ends tell nothing of it.
    replied, idle
        What has been heard of its end.
    """

    header: dict[str, str]
    client: bytes
    aside: bool = False
    replied: bool = False
    idle: bool = False

    @property
    def kind(self) -> str:
        """The type of the message."""
        return self.header.get("msg_type", "")


@dataclass
class Ledger:
    """The requests of all clients that have not come to their end."""

    _open: dict[str, Request] = field(default_factory=dict)

    def send(self, client: bytes, parts: Sequence[bytes]) -> None:
        """Note a client's message, if it is a request.

        Parameters
        ----------
        client
            The identity of the client's socket.
        parts
            The parts of the message, up to the header at least.
        """
        try:
            header = json.loads(parts[2]) if parts[0] == _DELIMITER else None
        except (ValueError, IndexError, RecursionError):
            return
        usable = picked(header)
        if not isinstance(header, dict) or not usable.get("msg_type", "").endswith("_request"):
            return
        self._open.pop(usable["msg_id"], None)
        while len(self._open) >= _MOST_REQUESTS:
            del self._open[next(iter(self._open))]
        aside = bool(header.get("subshell_id"))
        self._open[usable["msg_id"]] = Request(usable, client, aside)

    def hear(self, channel: str, parts: Sequence[bytes]) -> None:
        """Note a message of the kernel's that can be the end of a request."""
        request = self._open.get(parent_header(parts).get("msg_id", ""))
        if request is None:
            return
        if channel == "shell":
            request.replied = True
        elif b'"idle"' in parts[-1]:
            request.idle = True
        if request.replied and request.idle:
            self.close(request)

    def open(self) -> list[Request]:
        """Return the requests whose end has not been heard of, the oldest first."""
        return list(self._open.values())

    def is_open(self, request: Request) -> bool:
        """Whether the end of a request is still to come."""
        return self._open.get(request.header["msg_id"]) is request

    def close(self, request: Request) -> None:
        """Forget a request."""
        self._open.pop(request.header["msg_id"], None)

    def clear(self) -> None:
        """Forget all of them: another kernel owes them nothing."""
        self._open.clear()


class MessageReader:
    """Reads the messages that a client sends, on their way to the kernel and without holding them.

    What is not ZMTP ends the reading, and nothing else: the kernel will judge it.

    Attributes
    ----------
    identity
        What the client's socket calls itself.
    """

    def __init__(self) -> None:
        self.identity = b""
        self._greeting = bytearray()
        self._header = bytearray()
        self._flags = 0
        self._left = 0
        self._kept: bytearray | None = None
        self._parts: list[bytes] = []
        self._blind = False

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Take the client's next bytes; return the first parts of each message that is whole."""
        found: list[list[bytes]] = []
        position = 0
        while position < len(data) and not self._blind:
            if len(self._greeting) < GREETING_SIZE:
                piece = data[position : position + GREETING_SIZE - len(self._greeting)]
                self._greeting += piece
                position += len(piece)
                whole = len(self._greeting) == GREETING_SIZE
                self._blind = whole and bytes(self._greeting[12:32]).rstrip(b"\0") != b"NULL"
            elif self._left:
                piece = data[position : position + self._left]
                position += len(piece)
                self._left -= len(piece)
                if self._kept is not None:
                    self._kept += piece
                if not self._left:
                    self._end_frame(found)
            else:
                self._header.append(data[position])
                position += 1
                if len(self._header) == (9 if self._header[0] & _LONG else 2):
                    self._begin_frame(found)
        return found

    def _begin_frame(self, found: list[list[bytes]]) -> None:
        self._flags = self._header[0]
        self._left = int.from_bytes(self._header[1:], "big")
        self._header.clear()
        limit = _LONGEST_COMMAND if self._flags & _COMMAND else LARGEST_HEADER
        wanted = self._flags & _COMMAND or len(self._parts) < _LEADING_PARTS
        self._kept = bytearray() if wanted and self._left <= limit else None
        if self._flags & ~(_MORE | _LONG | _COMMAND):
            self._blind = True
        elif not self._left:
            self._end_frame(found)

    def _end_frame(self, found: list[list[bytes]]) -> None:
        kept, self._kept = bytes(self._kept or b""), None
        if self._flags & _COMMAND:
            self._take_command(kept)
            return
        if len(self._parts) < _LEADING_PARTS:
            self._parts.append(kept)
        if not self._flags & _MORE:
            found.append(self._parts)
            self._parts = []

    def _take_command(self, command: bytes) -> None:
        name, rest = _short(command)
        while name == b"READY" and rest:
            what, rest = _short(rest)
            size = int.from_bytes(rest[:4], "big")
            value, rest = rest[4 : 4 + size], rest[4 + size :]
            if what.lower() == b"identity":
                self.identity = value[:_LONGEST_IDENTITY]


def _short(data: bytes) -> tuple[bytes, bytes]:
    """Split off a text that is preceded by its size in one byte."""
    size = data[0] if data else 0
    return data[1 : 1 + size], data[1 + size :]


def frames(parts: Sequence[bytes]) -> bytes:
    """Return a message as ZMTP carries it."""
    made = bytearray()
    for number, part in enumerate(parts, 1):
        more = _MORE if number < len(parts) else 0
        made += bytes([more | _LONG]) + len(part).to_bytes(8, "big") + part
    return bytes(made)
