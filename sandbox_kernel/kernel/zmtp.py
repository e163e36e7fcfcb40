"""The ZMTP limiter: what a kernel may make a client's libzmq hold (decision 3).

Neither libzmq nor jupyter_client bounds what it receives: one frame of 512 MiB, or a message
of endless parts, ends up in the memory of the notebook server. This filter stands on each
connection, on the way from the kernel to the client. It reads the framing and nothing else,
and passes every byte of an acceptable message on unchanged. It does no I/O.

A message that is too large is left out as a whole where that is still possible, so that the
messages around it arrive and the connection goes on; once part of it has been passed on, the
connection is refused instead. With CURVE every part is a frame of its own and the limits
hold for each part, since its ties to the others are encrypted.

Source of the framing: ZMTP 3.1, https://rfc.zeromq.org/spec/37/
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

GREETING_SIZE = 64
COMMAND_LIMIT = 1 << 16
"""Largest command frame, in bytes; real ones are below 1 KiB."""

HOLD_LIMIT = 1 << 18
"""Bytes of an unfinished message that are held back, so that it can still be left out."""

_CELL = b'"execute_input"'
_NOTED_LIMIT = 1 << 14
_NOTED_CONTENT = 256
_ERROR = b'"error"'
_ERROR_CONTENT = 1 << 17

_MORE, _LONG, _COMMAND = 1, 2, 4
_MECHANISMS = (b"NULL", b"CURVE")


class ZmtpError(Exception):
    """The bytes are not ZMTP 3 of a kind that a kernel speaks, or go beyond a limit."""


@dataclass(frozen=True)
class ZmtpLimits:
    """What one message may be.

    Parameters
    ----------
    message_bytes
        Sum of the sizes of the message's parts.
    parts
        Number of parts; a Jupyter message has six and one for each binary buffer.
    """

    message_bytes: int = 64 << 20
    parts: int = 4096


class ZmtpLimiter:
    """Filters the bytes of one connection.

    Attributes
    ----------
    messages
        Complete messages passed on.
    dropped
        Messages left out.
    cell
        The parts before the content of the latest message that announced a cell, or nothing.
        Encrypted ones are not seen.
    noted
        The parts of the messages that were to be noted, the content only where it is short;
        whoever takes them clears the list.

    Parameters
    ----------
    limits
        What a message may be.
    note
        What the headers of messages that are to be noted hold.
    after_error
        Gives, from the parts of an error, the bytes that are to follow it.
    """

    def __init__(
        self,
        limits: ZmtpLimits | None = None,
        note: Sequence[bytes] = (),
        after_error: Callable[[Sequence[bytes]], bytes] | None = None,
    ) -> None:
        self._limits = limits or ZmtpLimits()
        self._note = tuple(note)
        self._after_error = after_error
        self._is_error = False
        self.messages = 0
        self.dropped = 0
        self.cell: list[bytes] = []
        self.noted: list[list[bytes]] = []
        self._noting: list[bytes] = []
        self._content: bytearray | None = None
        self._commands = 0
        self._greeting = bytearray()
        self._header = bytearray()
        self._held = bytearray()
        self._payload_left = 0
        self._destination: list[bytes] | bytearray | None = None
        self._ends_message = False
        self._leaving_out = False
        self._partly_passed = False
        self._parts = 0
        self._bytes = 0

    @property
    def between_messages(self) -> bool:
        """Whether a message of somebody else's would be whole if it were inserted now."""
        return bool(self._commands) and not (self._header or self._payload_left or self._parts)

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes from the kernel; return the pieces to pass on, in order.

        Raises
        ------
        ZmtpError
            The connection has to be closed; nothing of it is valid any more.
        """
        passed: list[bytes] = []
        position = self._take_greeting(data, passed)
        if self._payload_left and isinstance(self._destination, list):
            self._destination = passed
        size = len(data)
        while position < size:
            if self._payload_left:
                piece = data[position : position + self._payload_left]
                position += len(piece)
                self._take_payload(piece)
                continue
            self._header.append(data[position])
            position += 1
            if len(self._header) == self._header_size():
                self._begin_frame(passed)
        return passed

    def _take_greeting(self, data: bytes, passed: list[bytes]) -> int:
        missing = GREETING_SIZE - len(self._greeting)
        if not missing:
            return 0
        piece = data[:missing]
        self._greeting += piece
        # Piece by piece: each side waits for the other's first bytes before it sends more.
        passed.append(piece)
        greeting = self._greeting
        if greeting[0] != 0xFF or (len(greeting) > 9 and greeting[9] & 1 != 1):
            raise ZmtpError("not a ZMTP greeting")
        if len(greeting) > 10 and greeting[10] != 3:
            raise ZmtpError(f"ZMTP version {greeting[10]}, not 3")
        if len(greeting) == GREETING_SIZE and bytes(greeting[12:32]).rstrip(b"\0") not in (
            _MECHANISMS
        ):
            raise ZmtpError("a security mechanism that kernels do not use")
        return len(piece)

    def _header_size(self) -> int:
        flags = self._header[0]
        if flags & ~(_MORE | _LONG | _COMMAND) or (flags & _COMMAND and flags & _MORE):
            raise ZmtpError(f"invalid frame flags 0x{flags:02x}")
        return 9 if flags & _LONG else 2

    def _begin_frame(self, passed: list[bytes]) -> None:
        header = bytes(self._header)
        self._header.clear()
        flags, size = header[0], int.from_bytes(header[1:], "big")
        if flags & _COMMAND:
            self._begin_command(header, size, passed)
        else:
            self._begin_part(header, size, not flags & _MORE, passed)
        self._payload_left = size
        if not size:
            self._end_frame()

    def _begin_command(self, header: bytes, size: int, passed: list[bytes]) -> None:
        if size > COMMAND_LIMIT:
            raise ZmtpError(f"a command of {size} bytes")
        self._ends_message = False
        if self._parts:
            raise ZmtpError("a command between the parts of a message")
        self._commands += 1
        self._destination = passed
        passed.append(header)

    def _begin_part(self, header: bytes, size: int, last: bool, passed: list[bytes]) -> None:
        self._ends_message = last
        self._parts += 1
        self._bytes += size
        if not self._leaving_out and (
            self._bytes > self._limits.message_bytes or self._parts > self._limits.parts
        ):
            self._leave_out()
        if self._leaving_out:
            self._destination = None
        elif last or self._partly_passed or len(self._held) + size > HOLD_LIMIT:
            if self._held:
                self._take_note(last, size)
                passed.append(bytes(self._held))
                self._held.clear()
            self._partly_passed = True
            self._destination = passed
            passed.append(header)
        else:
            self._destination = self._held
            self._held += header

    def _take_note(self, last: bool, size: int) -> None:
        if not last or len(self._held) > _NOTED_LIMIT:
            return
        if _CELL in self._held:
            self.cell = _payloads(bytes(self._held))
        elif any(sign in self._held for sign in self._note):
            self._noting = _payloads(bytes(self._held))
            self._content = bytearray() if size <= _NOTED_CONTENT else None
        elif self._after_error is not None and _ERROR in self._held and size <= _ERROR_CONTENT:
            self._noting = _payloads(bytes(self._held))
            self._content = bytearray()
            self._is_error = True

    def _leave_out(self) -> None:
        if self._partly_passed:
            raise ZmtpError(
                f"a message of more than {self._limits.message_bytes} bytes"
                f" or {self._limits.parts} parts"
            )
        self._held.clear()
        self._leaving_out = True
        self.dropped += 1

    def _take_payload(self, piece: bytes) -> None:
        self._payload_left -= len(piece)
        if self._content is not None:
            self._content += piece
        if isinstance(self._destination, bytearray):
            self._destination += piece
        elif self._destination is not None:
            self._destination.append(piece)
        if not self._payload_left:
            self._end_frame()

    def _end_frame(self) -> None:
        if not self._ends_message:
            return
        if not self._leaving_out:
            self.messages += 1
        if self._noting:
            parts = [*self._noting, bytes(self._content or b"")]
            if not self._is_error:
                self.noted.append(parts)
            elif self._after_error is not None and isinstance(self._destination, list):
                self._destination.append(self._after_error(parts))
            self._noting, self._content, self._is_error = [], None, False
        self._ends_message = False
        self._leaving_out = self._partly_passed = False
        self._parts = self._bytes = 0


def _payloads(frames: bytes) -> list[bytes]:
    """Return the payloads of frames that are known to be whole."""
    found, position = [], 0
    while position < len(frames):
        start = position + (9 if frames[position] & _LONG else 2)
        end = start + int.from_bytes(frames[position + 1 : start], "big")
        found.append(frames[start:end])
        position = end
    return found
