"""The relay itself, as a process on this machine: the program that a sandbox runs.

It is started exactly as in a sandbox, by the loader and with its text on stdin, by this
Python and by the oldest one supported where that is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox_kernel.engine.streams import Chunk
from sandbox_kernel.kernel import wire
from sandbox_kernel.kernel.link import RelayLink
from sandbox_kernel.kernel.program import relay_program
from sandbox_kernel.process.program import loader_argv
from tests.kernel.test_link import Recorder


def oldest_python() -> list[str]:
    """Return Python 3.8 where it is installed, and not merely a version manager's shim."""
    found = shutil.which("python3.8")
    works = found and subprocess.run([found, "-V"], capture_output=True).returncode == 0
    return [found] if found and works else []


PYTHONS = [sys.executable, *oldest_python()]


class Pipes:
    """A subprocess's pipes with the methods of an engine stream."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def read(self) -> Chunk | None:
        assert self.process.stdout is not None
        data = await self.process.stdout.read(1 << 16)
        return Chunk(1, data) if data else None

    async def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        await self.process.stdin.drain()


class EchoKernel:
    """Five listening ports; whatever comes is sent back."""

    def __init__(self) -> None:
        self.ports: list[int] = []
        self._servers: list[asyncio.Server] = []

    async def listen(self) -> None:
        for index in range(5):
            port = self.ports[index] if len(self.ports) > index else 0
            server = await asyncio.start_server(self._echo, "127.0.0.1", port)
            self._servers.append(server)
            if not port:
                self.ports.append(server.sockets[0].getsockname()[1])

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    def stop(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()


class Client(Recorder):
    """A sink that returns credit at once and can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.stream: object = None
        self.greedy = True
        self.held = 0

    def stream_data(self, data: bytes) -> None:
        super().stream_data(data)
        if self.greedy:
            self.stream.consume(len(data))  # type: ignore[attr-defined]
        else:
            self.held += len(data)
        self.event.set()

    def stream_opened(self) -> None:
        super().stream_opened()
        self.event.set()

    def stream_closed(self, reason: str) -> None:
        super().stream_closed(reason)
        self.event.set()

    async def until(self, true) -> None:  # type: ignore[no-untyped-def]
        async with asyncio.timeout(20):
            while not true():
                self.event.clear()
                await self.event.wait()


@pytest.fixture(params=PYTHONS, ids=lambda path: Path(path).name)
async def relay(request: pytest.FixtureRequest) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *loader_argv(request.param),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd="/",
    )
    assert process.stdin is not None
    process.stdin.write(relay_program())
    yield process
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


@contextlib.asynccontextmanager
async def running(
    process: asyncio.subprocess.Process, ports: list[int]
) -> AsyncIterator[RelayLink]:
    link = RelayLink(Pipes(process), "test")  # type: ignore[arg-type]
    report = await link.greet("127.0.0.1", ports, 10)
    assert report.uid == os.getuid()
    task = asyncio.ensure_future(link.run())
    try:
        yield link
    finally:
        task.cancel()
        await asyncio.wait({task})


def open_client(link: RelayLink, channel: str) -> Client:
    client = Client()
    client.stream = link.open(channel, client)
    return client


async def test_bytes_come_back_whole_and_in_order_on_every_channel(
    relay: asyncio.subprocess.Process,
) -> None:
    """MUX-10: whatever they look like, through several windows, all channels at once."""
    kernel = EchoKernel()
    await kernel.listen()
    payload = (wire.encode(wire.PING, 0, bytes(8)) + b"\x01\0\0\0\0\0\0\x05hello") * 100_000
    async with running(relay, kernel.ports) as link:

        async def round_trip(channel: str) -> str:
            client = open_client(link, channel)
            sent = 0
            while sent < len(payload):
                count = client.stream.send(payload[sent : sent + 300_000])  # type: ignore[attr-defined]
                sent += count
                if not count:
                    await client.until(lambda: client.writable)
                    client.writable = 0
            await client.until(lambda: len(client.data) == len(payload))
            return hashlib.sha256(client.data).hexdigest()

        digests = await asyncio.gather(*map(round_trip, wire.CHANNELS))
    kernel.stop()
    assert set(digests) == {hashlib.sha256(payload).hexdigest()}


async def test_a_client_that_does_not_read_delays_no_other(
    relay: asyncio.subprocess.Process,
) -> None:
    """MUX-11: its stream stops at one window, and control goes on."""
    kernel = EchoKernel()
    await kernel.listen()
    async with running(relay, kernel.ports) as link:
        stuck = open_client(link, "iopub")
        stuck.greedy = False
        sent = 0
        while sent < 3 * wire.WINDOW and stuck.held < wire.WINDOW:
            count = stuck.stream.send(bytes(100_000))  # type: ignore[attr-defined]
            sent += count
            if not count:
                await stuck.until(lambda: stuck.writable or stuck.held == wire.WINDOW)
                stuck.writable = 0
        control = open_client(link, "control")
        control.stream.send(b"ping")  # type: ignore[attr-defined]
        await control.until(lambda: control.data == b"ping")
        assert stuck.held <= wire.WINDOW
    kernel.stop()


async def test_a_kernel_that_is_slow_to_listen_is_reached_when_it_does(
    relay: asyncio.subprocess.Process,
) -> None:
    kernel = EchoKernel()
    await kernel.listen()
    kernel.stop()
    async with running(relay, kernel.ports) as link:
        early = open_client(link, "shell")
        early.stream.send(b"early")  # type: ignore[attr-defined]
        await asyncio.sleep(0.1)
        assert not early.opened
        await kernel.listen()
        await early.until(lambda: early.data == b"early")
    kernel.stop()


async def test_waiting_for_a_kernel_and_idling_cost_no_processor_time(
    relay: asyncio.subprocess.Process,
) -> None:
    """An idle relay must not take time from the kernel that it serves."""
    kernel = EchoKernel()
    await kernel.listen()
    kernel.stop()
    async with running(relay, kernel.ports) as link:
        for channel in wire.CHANNELS:
            open_client(link, channel)
        before = cpu_ticks(relay.pid)
        await asyncio.sleep(2)
        assert cpu_ticks(relay.pid) - before < 20


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


async def test_the_end_of_the_kernels_connection_closes_the_stream(
    relay: asyncio.subprocess.Process,
) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with running(relay, [port] * 5) as link:
        client = open_client(link, "stdin")
        await client.until(lambda: client.closed)
        assert client.closed == ["the kernel closed the connection"]
    server.close()


async def test_the_relay_ends_with_its_input(relay: asyncio.subprocess.Process) -> None:
    """CLI-07: it does not outlive the connection to its host."""
    async with running(relay, [1, 2, 3, 4, 5]):
        assert relay.stdin is not None
        relay.stdin.close()
        assert await asyncio.wait_for(relay.wait(), 5) == 0


async def test_a_relay_that_hears_no_ping_ends_itself(relay: asyncio.subprocess.Process) -> None:
    """ENG-02, F12: after a silent cut neither side sees an end of input."""
    hello = {
        "version": wire.VERSION,
        "nonce": "n",
        "address": "127.0.0.1",
        "ports": [1, 2, 3, 4, 5],
        "silence": 0.2,
    }
    await Pipes(relay).write(wire.encode(wire.HELLO, 0, json.dumps(hello).encode()))
    assert await asyncio.wait_for(relay.wait(), 10) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"garbage that is no frame",
        wire.encode(wire.PING, 0, bytes(8)),
        wire.encode(wire.HELLO, 0, b"not json"),
        wire.encode(wire.HELLO, 0, b'{"version": 99, "nonce": "n", "ports": [], "silence": 1}'),
    ],
)
async def test_a_host_that_is_none_ends_the_relay(
    relay: asyncio.subprocess.Process, data: bytes
) -> None:
    await Pipes(relay).write(data)
    assert await asyncio.wait_for(relay.wait(), 10) == 1
