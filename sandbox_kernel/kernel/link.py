"""The host's end of the connection to a relay: hello, streams with credit, pings.

A `RelayLink` owns the exec stream on which one relay runs. It trusts nothing that it reads:
a frame that the protocol does not allow ends this link with one error, what a stream may
have under way is bounded by its window, and silence has a limit. What the bytes mean, and
who connects to whom, is the business of ``channels.py``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sandbox_kernel.engine.streams import ByteStream
from sandbox_kernel.errors import SandboxProtocolError, SandboxUnavailableError
from sandbox_kernel.kernel import wire
from sandbox_kernel.kernel.wire import Decoder, Frame, ReceiveWindow, SendWindow, WireError

log = logging.getLogger(__name__)

PING_INTERVAL = 5.0
SILENCE_LIMIT = 14.0
"""Seconds without any byte from the relay after which the link counts as lost; it is looked for
each second, so that it is noticed within 15 s."""

_LOOK_INTERVAL = 1.0
_STALL = 3.0

RELAY_SILENCE = 20.0
"""Seconds without a ping after which a relay ends itself."""

_KEPT_DIAGNOSTICS = 4096


class Sink(Protocol):
    """Who receives what arrives on a stream."""

    def stream_opened(self) -> None:
        """Note that the kernel accepted the connection."""

    def stream_data(self, data: bytes) -> None:
        """Take bytes from the kernel; they count as under way until `LinkStream.consume`."""

    def stream_writable(self) -> None:
        """Note that credit arrived after `LinkStream.send` could not take everything."""

    def stream_closed(self, reason: str) -> None:
        """Note the end of the stream, once; nothing follows."""


class LinkStream:
    """One stream of a link; made by `RelayLink.open`."""

    def __init__(self, link: RelayLink, number: int, sink: Sink) -> None:
        self.number = number
        self.sink = sink
        self.starved = False
        self.send_window = SendWindow()
        self.receive_window = ReceiveWindow()
        self._link = link

    def send(self, data: bytes) -> int:
        """Send as much of ``data`` as credit allows; return how much that was.

        When it was not everything, `Sink.stream_writable` is called once there is credit.
        """
        count = min(len(data), self.send_window.available)
        self.starved = count < len(data)
        if count:
            self.send_window.spend(count)
            self._link.queue(*wire.encode_data(self.number, memoryview(data)[:count]))
        return count

    def consume(self, count: int) -> None:
        """Let the relay send ``count`` more bytes, since as many have been passed on."""
        credit = self.receive_window.consume(count)
        if credit:
            self._link.queue(wire.encode_credit(self.number, credit))

    def close(self) -> None:
        """End the stream from this side; the sink hears nothing more."""
        self._link.forget(self)


@dataclass(frozen=True)
class RelayReport:
    """What a relay says of itself in its hello.

    Parameters
    ----------
    python
        Version of the Python that runs it.
    uid
        Its user id.
    status
        Capability sets, ``NoNewPrivs`` and ``Seccomp`` as the sandbox's kernel shows them.
    routes
        How many routes lead out of the sandbox.
    """

    python: str
    uid: int
    status: dict[str, str]
    routes: int


class RelayLink:
    """The connection to one relay.

    Parameters
    ----------
    stream
        The exec stream on which the relay's program has been sent.
    name
        The sandbox's short id, for log lines.
    frozen
        Asked whether the relay cannot answer because its sandbox is paused.
    """

    def __init__(
        self, stream: ByteStream, name: str, frozen: Callable[[], bool] = lambda: False
    ) -> None:
        self._stream = stream
        self._frozen = frozen
        self._name = name
        self._decoder = Decoder()
        self._early: list[Frame] = []
        self._streams: dict[int, LinkStream] = {}
        self._last_stream = 0
        self._outgoing: deque[bytes] = deque()
        self._has_outgoing = asyncio.Event()
        self._heard = 0.0
        self._diagnostics = bytearray()
        self._ended = False

    async def greet(self, address: str, ports: Sequence[int], timeout: float) -> RelayReport:
        """Exchange hellos and return the relay's report.

        Parameters
        ----------
        address, ports
            Where the kernel listens in the sandbox, or will.
        timeout
            Seconds to wait for the relay.

        Raises
        ------
        SandboxProtocolError
            Whatever answered is not our relay, or nothing did within ``timeout`` seconds.
        """
        nonce = secrets.token_hex(16)
        hello = {
            "version": wire.VERSION,
            "nonce": nonce,
            "address": address,
            "ports": list(ports),
            "silence": RELAY_SILENCE,
        }
        await self._stream.write(wire.encode(wire.HELLO, 0, json.dumps(hello).encode()))
        try:
            async with asyncio.timeout(timeout):
                frame = await self._first_frame()
        except TimeoutError as error:
            raise SandboxProtocolError(f"the relay did not answer within {timeout:g} s") from error
        try:
            answer = json.loads(frame.payload)
            if frame.kind != wire.HELLO or answer["nonce"] != nonce:
                raise SandboxProtocolError("the answer to our hello is not the relay's")
            return RelayReport(
                python=str(answer["python"]),
                uid=int(answer["uid"]),
                status={str(k): str(v) for k, v in answer["status"].items()},
                routes=int(answer["routes"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SandboxProtocolError("the relay's hello cannot be read") from error

    async def _first_frame(self) -> Frame:
        while True:
            data = await self._read()
            if data is None:
                raise SandboxProtocolError(f"the relay ended at once{self.diagnostics()}")
            try:
                frames = self._decoder.feed(data)
            except WireError as error:
                shown = ascii(data[:200])
                raise SandboxProtocolError(f"the relay's first bytes are {shown}") from error
            if frames:
                self._early = frames[1:]
                return frames[0]

    async def run(self) -> None:
        """Serve the link until the relay ends it; every stream is closed afterwards.

        Raises
        ------
        SandboxProtocolError
            The relay broke the protocol.
        SandboxUnavailableError
            The relay has not been heard of for `SILENCE_LIMIT` seconds, or the engine is lost.
        """
        self._heard = asyncio.get_running_loop().time()
        reason = "the relay has ended"
        try:
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(self._write_all())
                pinger = group.create_task(self._ping_for_ever())
                try:
                    await self._read_all()
                finally:
                    writer.cancel()
                    pinger.cancel()
        except* (SandboxProtocolError, SandboxUnavailableError) as errors:
            error = errors.exceptions[0]
            reason = str(error)
            raise error from None
        finally:
            self._end(reason)

    async def _read_all(self) -> None:
        try:
            for frame in self._early:
                self._handle(frame)
            while (data := await self._read()) is not None:
                for frame in self._decoder.feed(data):
                    self._handle(frame)
        except WireError as error:
            raise SandboxProtocolError(f"the relay broke the protocol: {error}") from error

    async def _read(self) -> bytes | None:
        while (chunk := await self._stream.read()) is not None:
            self._heard = asyncio.get_running_loop().time()
            if chunk.stream == 1:
                return chunk.data
            self._diagnostics += chunk.data
            del self._diagnostics[:-_KEPT_DIAGNOSTICS]
        return None

    def _handle(self, frame: Frame) -> None:
        if frame.kind == wire.PONG:
            return
        stream = self._streams.get(frame.stream)
        if stream is None:
            # Data after close is normal: it was under way when this side closed.
            if not 0 < frame.stream <= self._last_stream:
                raise WireError(f"frame kind {frame.kind} for stream {frame.stream}")
        elif frame.kind == wire.DATA:
            stream.receive_window.receive(len(frame.payload))
            stream.sink.stream_data(frame.payload)
        elif frame.kind == wire.CREDIT:
            stream.send_window.grant(wire.credit_of(frame))
            if stream.starved:
                stream.sink.stream_writable()
        elif frame.kind == wire.OPENED:
            stream.sink.stream_opened()
        elif frame.kind == wire.CLOSE:
            del self._streams[stream.number]
            stream.sink.stream_closed(ascii(frame.payload.decode(errors="replace"))[1:-1])
        else:
            raise WireError(f"frame kind {frame.kind} from the relay")

    async def _write_all(self) -> None:
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            batch = b"".join(self._outgoing)
            self._outgoing.clear()
            await self._stream.write(batch)

    async def _ping_for_ever(self) -> None:
        clock = asyncio.get_running_loop().time
        interval = min(_LOOK_INTERVAL, PING_INTERVAL)
        number, ping_at = 0, clock()
        while True:
            now = clock()
            if now >= ping_at:
                number, ping_at = number + 1, now + PING_INTERVAL
                self.queue(wire.encode(wire.PING, 0, number.to_bytes(8, "big")))
            await asyncio.sleep(interval)
            # What came while this process stood still has not been read yet.
            if self._frozen() or clock() - now > interval + _STALL:
                self._heard = clock()
            silence = clock() - self._heard
            if silence > SILENCE_LIMIT:
                raise SandboxUnavailableError(
                    "lost", f"nothing was heard from the sandbox for {silence:.0f} s"
                )

    def open(self, channel: str, sink: Sink) -> LinkStream:
        """Open a stream to one of the kernel's channels, waiting for the kernel to listen."""
        self._last_stream += 1
        stream = LinkStream(self, self._last_stream, sink)
        self._streams[stream.number] = stream
        index = wire.CHANNELS.index(channel)
        self.queue(wire.encode(wire.OPEN, stream.number, bytes([index])))
        return stream

    def forget(self, stream: LinkStream) -> None:
        """Close a stream from this side."""
        if self._streams.pop(stream.number, None) is not None:
            self.queue(wire.encode(wire.CLOSE, stream.number))

    def queue(self, *frames: bytes) -> None:
        """Queue frames for the relay; the streams' windows bound how many there can be."""
        if not self._ended:
            self._outgoing.extend(frames)
            self._has_outgoing.set()

    def diagnostics(self) -> str:
        """Return the last lines that the relay wrote for people, made harmless; or nothing."""
        text = self._diagnostics.decode(errors="replace").strip()
        return f" ({ascii(text[-300:])[1:-1]})" if text else ""

    def _end(self, reason: str) -> None:
        self._ended = True
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.sink.stream_closed(reason)
