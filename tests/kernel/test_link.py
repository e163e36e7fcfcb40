"""The host's end of the relay link against a scripted relay.

The relay is scripted here since ours never sends what these tests are about; everything else
about the relay is tested with the real one, in ``test_relay.py`` and in real kernels.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from sandbox_kernel.engine.streams import Chunk
from sandbox_kernel.errors import SandboxProtocolError, SandboxUnavailableError
from sandbox_kernel.kernel import link as link_module
from sandbox_kernel.kernel import wire
from sandbox_kernel.kernel.link import RelayLink
from sandbox_kernel.kernel.wire import Decoder, Frame


class ScriptedRelay:
    """The stream of a relay that says what the test wants."""

    def __init__(self) -> None:
        self.to_host: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self.decoder = Decoder()
        self.heard: list[Frame] = []
        self.on_frame: Callable[[Frame], None] = lambda frame: None

    async def read(self) -> Chunk | None:
        return await self.to_host.get()

    async def write(self, data: bytes) -> None:
        for frame in self.decoder.feed(data):
            self.heard.append(frame)
            self.on_frame(frame)

    def say(self, data: bytes | None, stream: int = 1) -> None:
        self.to_host.put_nowait(None if data is None else Chunk(stream, data))

    def greet_back(self, frame: Frame) -> None:
        if frame.kind == wire.HELLO:
            nonce = json.loads(frame.payload)["nonce"]
            answer = {"nonce": nonce, "python": "3.11", "uid": 10002, "status": {}, "routes": 0}
            self.say(wire.encode(wire.HELLO, 0, json.dumps(answer).encode()))


class Recorder:
    """A sink that notes what it is told."""

    def __init__(self) -> None:
        self.data = b""
        self.opened = False
        self.closed: list[str] = []
        self.writable = 0
        self.event = asyncio.Event()

    def stream_opened(self) -> None:
        self.opened = True

    def stream_data(self, data: bytes) -> None:
        self.data += data

    def stream_writable(self) -> None:
        self.writable += 1
        self.event.set()

    def stream_closed(self, reason: str) -> None:
        self.closed.append(reason)


async def greeted() -> tuple[ScriptedRelay, RelayLink]:
    relay = ScriptedRelay()
    relay.on_frame = relay.greet_back
    link = RelayLink(relay, "test")  # type: ignore[arg-type]
    await link.greet("127.0.0.1", [1, 2, 3, 4, 5], 5)
    return relay, link


@pytest.mark.parametrize(
    "noise",
    [
        b"A" * 100,
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"sh-5.2$ ",
        b"OCI runtime exec failed: exec failed: unable to start container process\r\n",
        wire.encode(wire.PONG, 0, bytes(8)),
        wire.encode(
            wire.HELLO,
            0,
            b'{"nonce": "guessed", "python": "3", "uid": 0, "status": {}, "routes": 0}',
        ),
        wire.encode(wire.HELLO, 0, b"[" * 5000),
        wire.encode(wire.HELLO, 0, b'"text"'),
    ],
)
async def test_whatever_answers_instead_of_our_relay_is_refused(noise: bytes) -> None:
    """MUX-04: with a bounded, escaped text and no crash."""
    relay = ScriptedRelay()
    relay.say(noise)
    relay.say(None)
    with pytest.raises(SandboxProtocolError) as caught:
        await RelayLink(relay, "test").greet("127.0.0.1", [1, 2, 3, 4, 5], 5)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 600
    assert str(caught.value).isprintable()


async def test_a_relay_that_never_answers_is_given_up() -> None:
    """MUX-07: one byte and then silence does not hold the start."""
    relay = ScriptedRelay()
    relay.say(b"\x01")
    with pytest.raises(SandboxProtocolError, match="did not answer"):
        await RelayLink(relay, "test").greet("127.0.0.1", [1, 2, 3, 4, 5], 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "frame",
    [
        b"\x04\x00\x00\x00\x01\xff\xff\xff\xff",
        wire.encode(wire.DATA, 7, b"for a stream that was never opened"),
        wire.encode(wire.OPEN, 1, b"\0"),
        wire.encode(wire.HELLO, 0, b"{}"),
        wire.encode(wire.PING, 0, bytes(8)),
        wire.encode_credit(1, 1),
        wire.encode_credit(1, 2**31),
        b"".join(wire.encode_data(1, bytes(wire.WINDOW + 1))),
    ],
)
async def test_a_broken_protocol_ends_this_link_with_one_error(frame: bytes) -> None:
    """MUX-05, MUX-08: and every stream learns of it, once."""
    relay, link = await greeted()
    sink = Recorder()
    link.open("iopub", sink)
    relay.say(frame)
    with pytest.raises(SandboxProtocolError):
        await asyncio.wait_for(link.run(), 5)
    assert len(sink.closed) == 1


async def test_frames_for_a_stream_that_has_ended_are_ignored() -> None:
    """They were under way when this side closed it."""
    relay, link = await greeted()
    sink = Recorder()
    stream = link.open("shell", sink)
    stream.close()
    relay.say(wire.encode(wire.DATA, 1, b"late") + wire.encode(wire.CLOSE, 1, b"late"))
    relay.say(wire.encode(wire.PONG, 0, b"unasked!") * 10)
    relay.say(None)
    await asyncio.wait_for(link.run(), 5)
    assert sink.data == b""
    assert sink.closed == []


async def test_silence_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """MUX-19, goal 7: a cut line looks like silence, and silence has a limit."""
    monkeypatch.setattr(link_module, "PING_INTERVAL", 0.02)
    monkeypatch.setattr(link_module, "SILENCE_LIMIT", 0.1)
    relay, link = await greeted()
    sink = Recorder()
    link.open("hb", sink)
    with pytest.raises(SandboxUnavailableError, match="nothing was heard"):
        await asyncio.wait_for(link.run(), 5)
    assert any(frame.kind == wire.PING for frame in relay.heard)
    assert len(sink.closed) == 1


async def test_what_a_relay_says_to_people_is_bounded_and_escaped() -> None:
    """MUX-20: a flood on its stderr costs nothing."""
    relay, link = await greeted()
    for _ in range(200):
        relay.say(b"\x1b]0;pwn\x07" * 1000, stream=2)
    relay.say(None)
    await asyncio.wait_for(link.run(), 5)
    assert len(link._diagnostics) <= 4096
    assert link.diagnostics().isprintable()


async def test_a_sender_waits_for_credit_and_goes_on_with_it() -> None:
    """MUX-08: no more than one window is under way, and nothing is lost."""
    relay, link = await greeted()
    sink = Recorder()
    stream = link.open("shell", sink)
    running = asyncio.ensure_future(link.run())
    data = bytes(wire.WINDOW + 1000)
    assert stream.send(data) == wire.WINDOW
    assert stream.send(data[wire.WINDOW :]) == 0
    relay.say(wire.encode_credit(1, 2000))
    await asyncio.wait_for(sink.event.wait(), 5)
    assert stream.send(data[wire.WINDOW :]) == 1000
    relay.say(None)
    await asyncio.wait_for(running, 5)
