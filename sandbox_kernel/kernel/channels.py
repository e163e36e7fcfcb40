"""A kernel's five channels as clients see them: private local endpoints, joined to a relay.

A client connects to a Unix socket in a directory that only this user can enter, or to
loopback TCP where that is asked for (decision 6). Each connection becomes one stream of the
relay link, and each passes through a `ZmtpLimiter` on its way to the client. The endpoints
outlive the kernel process: a restart drops the connections, and clients make them anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from sandbox_kernel.kernel.beside import Beside
from sandbox_kernel.kernel.ledger import NOTED, Ledger, MessageReader, frames
from sandbox_kernel.kernel.link import LinkStream, RelayLink
from sandbox_kernel.kernel.wire import CHANNELS
from sandbox_kernel.kernel.zmtp import ZmtpError, ZmtpLimiter, ZmtpLimits

log = logging.getLogger(__name__)

BUFFER_LIMIT = 1 << 18
"""Bytes waiting for a client's socket beyond which the kernel gets no more credit."""

Address = str | tuple[str, int]
"""Path of a Unix socket, or host and port."""


class Channels:
    """The local endpoints of one kernel.

    Parameters
    ----------
    addresses
        Where clients connect, by channel.
    limits
        What one message from the kernel may be.
    name
        The kernel's short name, for log lines.

    Attributes
    ----------
    answered
        Whether the kernel has sent a message since its connections were made.
    cell
        The parts of the kernel's latest announcement of a cell, up to the content.
    ledger
        What the clients wait for.
    beside
        Says what follows an error about a file that lies beside the notebook.
    """

    def __init__(self, addresses: Mapping[str, Address], limits: ZmtpLimits, name: str) -> None:
        self._addresses = addresses
        self._limits = limits
        self._name = name
        self._servers: dict[str, asyncio.Server] = {}
        self._connections: set[ClientConnection] = set()
        self._link: RelayLink | None = None
        self._linked = asyncio.Event()
        self.answered = False
        self.cell: list[bytes] = []
        self.ledger = Ledger()
        self.beside: Beside | None = None

    async def listen(self) -> None:
        """Listen on every endpoint, in place of what earlier listeners left there."""
        await self.stop_listening()
        self.ledger.clear()
        loop = asyncio.get_running_loop()
        for channel in CHANNELS:
            address = self._addresses[channel]

            def connection(channel: str = channel) -> ClientConnection:
                beside = self.beside if channel == "iopub" else None
                after = beside.after if beside is not None else None
                limiter = ZmtpLimiter(self._limits, NOTED.get(channel, ()), after)
                return ClientConnection(self, channel, limiter)

            if isinstance(address, str):
                # The directory is private, so the socket's own mode does not matter.
                server = await loop.create_unix_server(connection, address)
            else:
                server = await loop.create_server(connection, *address)
            self._servers[channel] = server

    async def stop_listening(self) -> None:
        """Close the listeners and every connection."""
        self.drop_connections()
        for channel in CHANNELS:
            await self._leave(channel)

    async def hand_over(self, channel: str) -> str:
        """Leave one endpoint, so that somebody else can listen there until the next `listen`.

        Returns
        -------
        str
            The endpoint, as ZMQ writes it.
        """
        await self._leave(channel)
        return self.url(channel)

    def url(self, channel: str) -> str:
        """Return an endpoint as ZMQ writes it."""
        address = self._addresses[channel]
        return f"ipc://{address}" if isinstance(address, str) else "tcp://{}:{}".format(*address)

    async def _leave(self, channel: str) -> None:
        server = self._servers.pop(channel, None)
        if server is not None:
            server.close()
        self._drop(channel)
        if server is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.wait_closed(), 1.0)
        self._remove_socket(channel)

    def _remove_socket(self, channel: str) -> None:
        address = self._addresses[channel]
        if isinstance(address, str):
            Path(address).unlink(missing_ok=True)

    def use(self, link: RelayLink | None) -> None:
        """Join the connections, present and future, to this link; `None` ends them all."""
        self._link = link
        if link is None:
            self._linked.clear()
            self.drop_connections()
            return
        self._linked.set()
        for connection in self._connections:
            connection.join(link)

    def drop_connections(self) -> None:
        """End every connection; clients connect again by themselves."""
        self.answered = False
        for channel in CHANNELS:
            self._drop(channel)

    def _drop(self, channel: str) -> None:
        for connection in tuple(self._connections):
            if connection.channel == channel:
                connection.drop("the kernel's connections are renewed")

    async def flush(self) -> None:
        """Give what clients have just written a moment to get to the kernel.

        A console that exits has written its shutdown request and does not wait for anything.
        """
        for _ in range(3):
            await asyncio.sleep(0.01)

    async def kernel_listens(self) -> None:
        """Wait until the kernel accepts a connection on its heartbeat channel."""
        while True:
            await self._linked.wait()
            assert self._link is not None
            probe = _Probe()
            stream = self._link.open("hb", probe)
            try:
                await probe.heard.wait()
            finally:
                stream.close()
            if probe.opened:
                return

    # -- messages of this side's --------------------------------------------------------------

    def has_listener(self, channel: str) -> bool:
        """Whether a client is connected to the kernel on this channel."""
        return any(c.channel == channel and c.between_messages for c in self._connections)

    def insert(self, channel: str, message: Sequence[bytes], client: bytes | None = None) -> None:
        """Send clients a message between those of the kernel's.

        Parameters
        ----------
        channel, message
            On which channel, and its parts.
        client
            The identity of the one that it is for; `None` for all of them.
        """
        for connection in tuple(self._connections):
            if connection.channel == channel and client in (None, connection.identity):
                connection.insert(frames(message))

    # -- called by connections ----------------------------------------------------------------

    def add(self, connection: ClientConnection) -> None:
        """Take in a new connection, and join it where there is a link."""
        self._connections.add(connection)
        if self._link is not None:
            connection.join(self._link)

    def remove(self, connection: ClientConnection) -> None:
        """Forget a connection that has ended."""
        self._connections.discard(connection)

    def note_message(self, channel: str) -> None:
        """Note that the kernel has sent a message: it handles signals by now."""
        if channel != "hb":
            self.answered = True

    def note_cell(self, cell: list[bytes]) -> None:
        """Note which cell the kernel has begun; it may say so on several connections."""
        self.cell = cell

    def refuse(self, connection: ClientConnection, reason: str) -> None:
        """Log why a connection is closed because of what the kernel sent."""
        log.warning("kernel %s, channel %s: closed, %s", self._name, connection.channel, reason)

    def note_dropped(self, channel: str) -> None:
        """Log that a message was left out."""
        log.warning(
            "kernel %s, channel %s: a message of more than %d bytes or %d parts was left out",
            self._name,
            channel,
            self._limits.message_bytes,
            self._limits.parts,
        )


class ClientConnection(asyncio.Protocol):
    """One client's connection to one channel, and its stream."""

    def __init__(self, channels: Channels, channel: str, limiter: ZmtpLimiter) -> None:
        self.channel = channel
        self._channels = channels
        self._limiter = limiter
        self._transport: asyncio.Transport | None = None
        self._stream: LinkStream | None = None
        self._unsent = bytearray()
        self._blocked = False
        self._unconsumed = 0
        self._reader = MessageReader() if channel == "shell" else None
        self._inserted = bytearray()

    @property
    def identity(self) -> bytes:
        """What the client's socket calls itself, where it is written down."""
        return self._reader.identity if self._reader is not None else b""

    @property
    def between_messages(self) -> bool:
        """Whether it is connected to the kernel, and no message is half passed on."""
        return self._limiter.between_messages

    def insert(self, message: bytes) -> None:
        """Send the client a message as soon as none of the kernel's is half passed on."""
        self._inserted += message
        self._send_inserted()

    def _send_inserted(self) -> None:
        if self._inserted and self.between_messages and self._transport is not None:
            self._transport.write(bytes(self._inserted))
            self._inserted.clear()

    def join(self, link: RelayLink) -> None:
        """Open this connection's stream on a link."""
        self._stream = link.open(self.channel, self)
        self.stream_writable()

    def drop(self, reason: str) -> None:
        """Close the connection at once."""
        log.debug("channel %s: connection dropped, %s", self.channel, reason)
        if self._transport is not None:
            self._transport.abort()
        self._forget_stream()
        self._channels.remove(self)

    def _forget_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    # -- from the client ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Prepare the socket; asyncio calls this."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=BUFFER_LIMIT)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._channels.add(self)

    def data_received(self, data: bytes) -> None:
        """Pass a client's bytes on, as far as there is credit; asyncio calls this."""
        if self._reader is not None:
            for message in self._reader.feed(data):
                self._channels.ledger.send(self._reader.identity, message)
        if self._stream is None or self._unsent:
            self._unsent += data
        else:
            self._unsent += data[self._stream.send(data) :]
        if self._unsent and self._transport is not None:
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """Treat the end of a client's input as the end of the connection."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """Close the stream with its connection; asyncio calls this."""
        self._forget_stream()
        self._channels.remove(self)

    # -- from the kernel ----------------------------------------------------------------------

    def stream_opened(self) -> None:
        """Note that the kernel accepted the connection; bytes tell the rest."""

    def stream_data(self, data: bytes) -> None:
        """Filter the kernel's bytes and write what passes to the client."""
        if self._transport is None or self._transport.is_closing():
            return
        messages, dropped = self._limiter.messages, self._limiter.dropped
        try:
            pieces = self._limiter.feed(data)
        except ZmtpError as error:
            self._channels.refuse(self, str(error))
            self.drop(str(error))
            return
        if self._limiter.messages > messages:
            self._channels.note_message(self.channel)
            if self.channel == "iopub" and self._limiter.cell:
                self._channels.note_cell(self._limiter.cell)
        for noted in self._limiter.noted:
            self._channels.ledger.hear(self.channel, noted)
        self._limiter.noted.clear()
        if self._limiter.dropped > dropped:
            self._channels.note_dropped(self.channel)
        for piece in pieces:
            self._transport.write(piece)
        self._send_inserted()
        self._unconsumed += len(data)
        self._consume()

    def stream_writable(self) -> None:
        """Send what waited for credit, or for the link."""
        if self._stream is None:
            return
        if self._unsent:
            del self._unsent[: self._stream.send(bytes(self._unsent))]
        if not self._unsent and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def stream_closed(self, reason: str) -> None:
        """Close the client's connection after what was written to it has been sent."""
        self._stream = None
        log.debug("channel %s: stream closed, %s", self.channel, reason)
        if self._transport is not None:
            self._transport.close()

    def pause_writing(self) -> None:
        """Stop returning credit while the client does not read; asyncio calls this."""
        self._blocked = True

    def resume_writing(self) -> None:
        """Return the credit that waited for the client; asyncio calls this."""
        self._blocked = False
        self._consume()

    def _consume(self) -> None:
        if self._blocked or self._stream is None:
            return
        count, self._unconsumed = self._unconsumed, 0
        if count:
            self._stream.consume(count)


class _Probe:
    """A stream that only asks whether the kernel listens."""

    def __init__(self) -> None:
        self.opened = False
        self.heard = asyncio.Event()

    def stream_opened(self) -> None:
        self.opened = True
        self.heard.set()

    def stream_data(self, data: bytes) -> None:
        pass

    def stream_writable(self) -> None:
        pass

    def stream_closed(self, reason: str) -> None:
        self.heard.set()
