"""Byte streams of attach and exec, over the socket and over mutual TLS alike."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import time

import pytest

from sandbox_kernel.engine.client import ByteStream, Engine
from sandbox_kernel.errors import SandboxUnavailableError
from tests.engine.conftest import MakeContainer
from tests.engines import FaultProxy

USER = "10001:10001"


async def drain(stream: ByteStream) -> dict[int, bytes]:
    got = {1: bytearray(), 2: bytearray()}
    while (chunk := await stream.read()) is not None:
        got[chunk.stream] += chunk.data
    return {number: bytes(data) for number, data in got.items()}


async def test_a_command_gives_both_outputs_and_its_exit_code(
    engine: Engine, container: str
) -> None:
    """E2: an exec over either road carries both output streams and the exit code."""
    command = ["sh", "-c", "echo out; echo err >&2; exit 3"]
    async with await engine.exec(container, command, user=USER) as stream:
        got = await drain(stream)
    state = await engine.inspect_exec(stream.id)
    assert got == {1: b"out\n", 2: b"err\n"}
    assert (state.running, state.exit_code) == (False, 3)


async def test_user_environment_and_folder_are_those_asked_for(
    engine: Engine, container: str
) -> None:
    """B12: only what is named is added, and values may hold anything."""
    command = ["sh", "-c", 'id -u; id -g; pwd; printf %s "$X"']
    async with await engine.exec(
        container, command, user=USER, env={"X": "a=b\n'$Y'"}, cwd="/workspace", stdin=False
    ) as stream:
        got = await drain(stream)
    assert got[1] == b"10001\n10001\n/workspace\na=b\n'$Y'"


async def test_a_command_that_does_not_exist_is_told_by_its_exit_code(
    engine: Engine, container: str
) -> None:
    """C1: 126 or 127, never 0 or a hang."""
    async with await engine.exec(container, ["/no/such"], user=USER) as stream:
        await drain(stream)
    assert (await engine.inspect_exec(stream.id)).exit_code in {126, 127}


async def test_a_running_command_has_no_exit_code(engine: Engine, container: str) -> None:
    """E2: "running" and "exited with 0" are never confused."""
    async with await engine.exec(container, ["cat"], user=USER) as stream:
        # The stream is there before the process is; its echo shows that it runs.
        await stream.write(b"x")
        assert await stream.read() is not None
        state = await engine.inspect_exec(stream.id)
        assert (state.running, state.exit_code) == (True, None)
        await stream.end_input()
        assert await stream.read() is None
    assert (await engine.inspect_exec(stream.id)).exit_code == 0


@pytest.mark.parametrize("size", [0, 1, 65_536, 5_000_000])
async def test_all_input_arrives_before_its_end(engine: Engine, container: str, size: int) -> None:
    """E2: half close, over TLS too, loses neither input nor the output that follows."""
    data = os.urandom(size)
    command = ["sh", "-c", "md5sum; sleep 0.1; echo after; exit 6"]
    async with await engine.exec(container, command, user=USER) as stream:

        async def feed() -> None:
            for start in range(0, size, 65_536):
                await stream.write(data[start : start + 65_536])
            await stream.end_input()
            await stream.end_input()

        _, got = await asyncio.gather(feed(), drain(stream))
    expected = hashlib.md5(data).hexdigest().encode()
    assert got[1].split() == [expected, b"-", b"after"]
    assert (await engine.inspect_exec(stream.id)).exit_code == 6


async def test_both_directions_flow_at_once(engine: Engine, container: str) -> None:
    """E2: an echo of many megabytes is complete in both directions."""
    piece, count = os.urandom(1 << 20), 12
    async with await engine.exec(container, ["cat"], user=USER) as stream:

        async def feed() -> None:
            for _ in range(count):
                await stream.write(piece)
            await stream.end_input()

        _, got = await asyncio.gather(feed(), drain(stream))
    assert got[1] == piece * count


async def test_a_reader_that_pauses_holds_the_command_back(engine: Engine, container: str) -> None:
    """E2: what nobody reads is not collected in memory here."""
    command = ["sh", "-c", "dd if=/dev/zero bs=65536 count=1600 2>/dev/null; sleep 60"]
    async with await engine.exec(container, command, user=USER, stdin=False) as stream:
        assert await stream.read() is not None
        await asyncio.sleep(1.0)
        queue = stream._stream._queue
        assert queue is not None
        assert queue._flow_size < 1 << 20


async def test_attaching_before_the_start_misses_nothing(
    engine: Engine, make_container: MakeContainer
) -> None:
    """Decision 7: input of the main process is held from its first byte to its end."""
    container = await make_container(start=False, StdinOnce=True)
    async with await engine.attach_container(container) as stream:
        await engine.start_container(container)
        await stream.write(b"ping\n")
        chunk = await stream.read()
        assert chunk is not None
        assert (chunk.stream, chunk.data) == (1, b"ping\n")
        await stream.end_input()
        assert await stream.read() is None
    assert (await engine.inspect_container(container))["State"]["ExitCode"] == 0


async def test_closing_ends_a_pending_read_and_is_idempotent(
    engine: Engine, container: str
) -> None:
    """E2: nobody is left waiting on a stream that was closed."""
    stream = await engine.exec(container, ["cat"], user=USER)
    reading = asyncio.create_task(stream.read())
    await asyncio.sleep(0.05)
    await stream.close()
    async with asyncio.timeout(2):
        assert await reading is None
    await stream.close()
    assert stream.closed
    assert await stream.read() is None
    await stream.end_input()
    with pytest.raises(RuntimeError, match="ended"):
        await stream.write(b"x")


async def test_closing_does_not_wait_for_a_peer_that_reads_nothing(
    engine: Engine, container: str
) -> None:
    """E2: unsent input is dropped, so that clean-up stays bounded."""
    stream = await engine.exec(container, ["sleep", "60"], user=USER)

    async def feed() -> None:
        with contextlib.suppress(SandboxUnavailableError):
            while not stream.closed:
                await stream.write(b"x" * (1 << 20))

    feeding = asyncio.create_task(feed())
    await asyncio.sleep(0.5)
    began = time.monotonic()
    await stream.close()
    assert time.monotonic() - began < 1
    async with asyncio.timeout(5):
        await feeding


async def test_a_cut_line_looks_like_an_end_and_inspection_tells(
    proxy: FaultProxy, make_container: MakeContainer
) -> None:
    """E4: the end of a stream proves nothing; a write after it is an error, not an assertion."""
    container = await make_container()
    async with Engine(proxy.endpoint) as engine:
        stream = await engine.exec(container, ["cat"], user=USER)
        await stream.write(b"it runs")
        assert await stream.read() is not None
        proxy.cut()
        async with asyncio.timeout(5):
            assert await stream.read() is None
        with pytest.raises(SandboxUnavailableError) as caught:
            await stream.write(b"x")
        assert caught.value.kind == "lost"
        await stream.end_input()
        await stream.close()
        state = await engine.inspect_exec(stream.id)
        # The engine has seen the cut as the end of input, or is about to.
        assert state.running or state.exit_code == 0


async def test_a_stream_is_kept_alive_on_a_network(engine: Engine, container: str) -> None:
    """E2: a machine that vanished is noticed within about a minute."""
    async with await engine.exec(container, ["cat"], user=USER) as stream:
        transport = stream._transport()
        assert transport is not None
        sock = transport.get_extra_info("socket")
        if sock.family == socket.AF_INET:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30


async def test_a_terminal_merges_the_outputs(engine: Engine, container: str) -> None:
    """C1: with a terminal everything is stdout."""
    command = ["sh", "-c", "echo a; echo b >&2; test -t 1 && echo tty"]
    async with await engine.exec(container, command, user=USER, tty=True) as stream:
        got = await drain(stream)
    assert got == {1: b"a\r\nb\r\ntty\r\n", 2: b""}
