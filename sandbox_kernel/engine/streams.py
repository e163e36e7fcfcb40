"""Two-way byte streams with a process in a container (architecture decisions 1 and 7).

A `ByteStream` is the hijacked connection of an attach or an exec. It adds to aiodocker's
stream what that lacks: an end of input that works over TLS too, errors instead of
assertions when the connection is lost, keepalive, and a close that never lingers.

The end of a stream proves nothing: a killed engine or a cut line look just like a process
that ended. Whoever reads an end has to inspect.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiodocker.stream import Message as Chunk
from aiodocker.stream import Stream, _ExecParser

from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.engine.faults import RAISED_BY_CALLS, unavailable

__all__ = ["ByteStream", "Chunk", "ExecStream"]

_FLUSH_POLL = 0.002
_LINE_LIMIT = 4 * 1024 * 1024


class ByteStream:
    """The standard streams of a process, made by `Engine.attach_container` or `Engine.exec`.

    Reading and writing are independent: one task may read while another one writes.
    """

    def __init__(self, stream: Stream, endpoint: Endpoint) -> None:
        self._stream = stream
        self._endpoint = endpoint
        self._closed = False
        self._input_ended = False

    async def read(self) -> Chunk | None:
        """Return the next piece of output, or `None` at the end of the stream.

        A chunk's ``stream`` is 1 for stdout and 2 for stderr, its ``data`` is never empty.
        The engine is held back while nobody reads.
        """
        try:
            return await self._stream.read_out()
        except RAISED_BY_CALLS as error:
            if self._closed:
                return None
            raise unavailable(error, self._endpoint) from error

    async def write(self, data: bytes) -> None:
        """Send input to the process; returns when little of it is still buffered here."""
        if self._closed or self._input_ended:
            raise RuntimeError("the input of this stream has been ended")
        try:
            await self._stream.write_in(data)
        except RAISED_BY_CALLS as error:
            raise unavailable(error, self._endpoint) from error

    async def end_input(self) -> None:
        """Close the process's stdin, after everything written has been sent; output goes on."""
        if self._closed or self._input_ended:
            return
        self._input_ended = True
        transport = self._transport()
        if transport is None or transport.is_closing():
            return
        try:
            if transport.can_write_eof():
                transport.write_eof()
                return
            # TLS has no half close in asyncio, and a TLS close_notify makes the engine drop
            # output. A bare FIN below it works, once nothing is left in either of the two
            # buffers; the inner one is known to the protocol only.
            inner = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None)
            while transport.get_write_buffer_size() or (
                inner is not None and inner.get_write_buffer_size()
            ):
                await asyncio.sleep(_FLUSH_POLL)
                if transport.is_closing():
                    return
            transport.get_extra_info("socket").shutdown(socket.SHUT_WR)
        except RAISED_BY_CALLS as error:
            raise unavailable(error, self._endpoint) from error

    async def close(self) -> None:
        """Drop the connection at once; a reader gets the end. Idempotent.

        Input that was not yet sent is discarded. The process is not told otherwise than by
        the end of its stdin; to be sure that input arrives, end it and read to the end.
        """
        if self._closed:
            return
        self._closed = True
        transport = self._transport()
        if transport is not None:
            # An orderly close would wait for a peer that does not read, or for the other
            # half of a TLS shutdown, with nobody left to end that wait.
            transport.abort()
        _discard(self._stream)
        await asyncio.sleep(0)  # the turn in which the socket is closed

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def _transport(self) -> asyncio.Transport | None:
        response: aiohttp.ClientResponse | None = self._stream._resp
        connection = response.connection if response is not None else None
        return connection.transport if connection is not None else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class ExecStream(ByteStream):
    """The streams of one exec; `id` is what the engine calls it."""

    def __init__(self, stream: Stream, endpoint: Endpoint, exec_id: str) -> None:
        super().__init__(stream, endpoint)
        self.id = exec_id


async def connect(stream: Stream) -> None:
    """Make the connection of an aiodocker stream, and leave nothing behind on failure."""
    try:
        await stream._init()
    except BaseException:
        _discard(stream)
        raise
    response = stream._resp
    if response is not None and response.connection is not None:
        _join_output(stream, response.connection.protocol)
        keep_alive(response.connection.transport)


class OutputJoiner:
    """Takes the engine's frames apart, and joins what came at once of the same stream.

    The engine sends frames of some 14 kB, and aiodocker makes a message of each, with several
    copies: a third of what reading a large output costs here.

    Parameters
    ----------
    queue
        What takes a `Chunk` with its size, the end, and an exception.
    """

    _header = struct.Struct(">BxxxL")

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._held = b""
        self._stream = 0
        self._left = 0

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Take received bytes; the answer says that nothing is wrong and nothing left."""
        view = memoryview(self._held + data if self._held else data)
        self._held = b""
        pieces: list[memoryview] = []
        while view:
            if self._left:
                pieces.append(view[: self._left])
                view = view[self._left :]
                self._left -= len(pieces[-1])
                continue
            if len(view) < self._header.size:
                self._held = bytes(view)
                break
            stream, self._left = self._header.unpack_from(view)
            view = view[self._header.size :]
            if stream != self._stream:
                self._pass_on(pieces)
                pieces = []
                self._stream = stream
        self._pass_on(pieces)
        return False, b""

    def _pass_on(self, pieces: list[memoryview]) -> None:
        joined = b"".join(pieces)
        if joined:
            self._queue.feed_data(Chunk(self._stream, joined), len(joined))

    def feed_eof(self) -> None:
        """Pass on the end."""
        self._queue.feed_eof()

    def set_exception(self, error: BaseException) -> None:
        """Pass on what broke the connection."""
        self._queue.set_exception(error)


def _join_output(stream: Stream, protocol: Any) -> None:
    """Let an `OutputJoiner` read a stream, unless aiodocker reads it in a way not known here."""
    parser = getattr(protocol, "_payload_parser", None)
    if isinstance(parser, _ExecParser) and not parser.tty:
        joiner = OutputJoiner(stream._queue)
        joiner.feed_data(bytes(parser._buf))
        protocol.set_parser(joiner, stream._queue)


async def lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Give the lines of an answer as they come; aiohttp's own reader refuses long ones."""
    pending = bytearray()
    while chunk := await response.content.readany():
        pending += chunk
        while (end := pending.find(b"\n")) >= 0:
            line = bytes(pending[:end]).strip()
            del pending[: end + 1]
            if line:
                yield line
        if len(pending) > _LINE_LIMIT:
            raise ValueError("a line of the engine's answer is larger than any real one")
    if pending.strip():
        yield bytes(pending).strip()


def keep_alive(transport: Any) -> None:
    """Notice within about a minute that the machine at the other end has gone silent."""
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None or sock.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not every platform names all of these.
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _discard(stream: Stream) -> None:
    # Not `Stream.close()`: it asserts that the connection is still there.
    stream._closed = True
    if stream._resp is not None:
        stream._resp.close()
