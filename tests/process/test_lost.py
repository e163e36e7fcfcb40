"""Commands whose connection, container or engine goes away under them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.engine.client import ByteStream, Engine
from sandbox_kernel.errors import (
    SandboxEngineError,
    SandboxError,
    SandboxExecTimeoutError,
    SandboxGoneError,
    SandboxPausedError,
    SandboxUnavailableError,
    SandboxUnknownOutcomeError,
)
from sandbox_kernel.process.command import Process, start
from sandbox_kernel.process.result import CommandUnknownError
from sandbox_kernel.process.run import run
from sandbox_kernel.process.stop import sweep
from sandbox_kernel.sandbox.live import LiveSandbox
from tests.engines import Engines, FaultProxy, provide_busybox
from tests.process.conftest import PATIENCE, MakeContainer, commands, shell, until_up
from tests.process.private import PrivateEngine, private_engine

USER = "10001:10001"
IDLE = ["sleep", "600"]
CONTRACT = 15.0
"""Seconds after which the loss of an engine has to be an error (issue 3)."""


@pytest.fixture
async def proxy(engines: Engines, tmp_path: Path) -> AsyncIterator[FaultProxy]:
    made = FaultProxy(engines, tmp_path / "p.sock")
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def far(proxy: FaultProxy) -> AsyncIterator[Engine]:
    """The engine, over a line that can be cut and frozen."""
    async with Engine(proxy.endpoint) as opened:
        yield opened


@pytest.fixture
async def container(make_container: MakeContainer, busybox_image: str) -> str:
    return await make_container(busybox_image, IDLE, Init=True)


async def begin(engine: Engine, container: str, text: str, timeout: float | None = None) -> Process:
    process = await start(engine, container, ["sh", "-c", text], user=USER, timeout=timeout)
    await until_up(process)
    return process


async def left(engine: Engine, container: str) -> bytes:
    text = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"
    return (await run(engine, container, ["sh", "-c", text], user=USER)).stdout


async def lost(process: Process) -> CommandUnknownError:
    """Wait for the error that says that the engine was lost, no longer than the contract."""
    async with asyncio.timeout(CONTRACT):
        with pytest.raises(CommandUnknownError) as raised:
            await process.wait()
    assert raised.value.reason == "engine-lost"
    assert process.exit.code is None
    return raised.value


async def test_a_cut_line_is_an_unknown_outcome_and_the_command_can_still_be_killed(
    far: Engine, proxy: FaultProxy, container: str
) -> None:
    """W22, peers 9: EOF is no exit; a new connection finds it running, and ends it."""
    async with await begin(far, container, "echo up; exec sleep 7501") as process:
        proxy.cut()
        await lost(process)
        with pytest.raises(SandboxUnknownOutcomeError):
            await anext(process)
        assert await process.reattach() is None
        with pytest.raises(SandboxError):
            await process.write(b"to nobody")
        report = await process.kill()
        assert report.found == "killed"
        # Nobody took its status; the engine's record is not that of the wrapper.
        ended = await process.reattach(PATIENCE)
        assert ended is not None
        assert (ended.code, ended.reason) == (None, "unknown")
        assert b"7501" not in await left(far, container)


async def test_reattach_waits_for_the_end_of_a_command_that_was_lost(
    far: Engine, proxy: FaultProxy, container: str
) -> None:
    """W22, peers 9: a good run is not thrown away with the line."""
    text = "echo up; until [ -e /tmp/go ]; do sleep 0.1; done; exit 7"
    async with await begin(far, container, text) as process:
        proxy.cut()
        await lost(process)
        assert await process.reattach(0.3) is None
        waiting = asyncio.create_task(process.reattach(PATIENCE))
        while b"wait:" not in await left(far, container):
            pass
        await run(far, container, ["touch", "/tmp/go"], user=USER)
        ended = await waiting
        assert ended is not None
        assert (ended.code, ended.reason) == (7, "finished")
        # The wrapper was stopped meanwhile and goes on.
        assert process.identity is not None
        there = ["test", "-e", f"/proc/{process.identity.root}"]
        async with asyncio.timeout(PATIENCE):
            while (await run(far, container, there, user=USER)).returncode == 0:
                pass


async def test_leaving_stops_a_command_that_was_lost(
    far: Engine, proxy: FaultProxy, container: str
) -> None:
    """W21, W22."""
    process = await begin(far, container, "echo up; exec sleep 7502")
    with contextlib.suppress(CommandUnknownError):
        async with process:
            proxy.cut()
            await process.wait()
    assert process.exit.reason == "engine-lost"
    assert b"7502" not in await left(far, container)


async def test_a_frozen_line_is_noticed_while_a_command_is_silent(
    far: Engine, proxy: FaultProxy, container: str
) -> None:
    """W23: by the engine's heartbeat; afterwards the command can be found and killed."""
    async with await begin(far, container, "echo up; exec sleep 7503") as process:
        proxy.freeze()
        error = await lost(process)
        assert "may still be running" in str(error)
        proxy.thaw()
        assert await process.reattach() is None
        assert (await process.kill()).found == "killed"
    assert b"7503" not in await left(far, container)


async def test_a_run_and_a_start_on_a_frozen_line_end_with_an_error(
    far: Engine, proxy: FaultProxy, container: str
) -> None:
    """W23, W21: within the same bound, cleaning up included, and with what there was."""
    text = "echo some; exec sleep 7504"
    running = asyncio.create_task(run(far, container, ["sh", "-c", text], user=USER))
    async with await begin(far, container, "echo up; exec sleep 7505"):
        # Started after the run, and up: so the run is as well, or soon.
        while b"7504" not in await left(far, container):
            pass
        proxy.freeze()
        async with asyncio.timeout(CONTRACT):
            starting = asyncio.create_task(start(far, container, ["true"], user=USER))
            with pytest.raises(CommandUnknownError) as raised:
                await running
            with pytest.raises(CommandUnknownError):
                await starting
        assert raised.value.result is not None
        assert raised.value.result.stdout == b"some\n"
        assert raised.value.result.reason == "engine-lost"
        proxy.thaw()
    await sweep(far, container, user=USER)
    assert {7504, 7505}.isdisjoint(await sleeping(far, container))


async def sleeping(engine: Engine, container: str) -> set[int]:
    words = (await left(engine, container)).split()
    return {int(word) for word in words if word.isdigit()}


async def test_commands_share_one_heartbeat_that_ends_with_the_last(
    engine: Engine, container: str
) -> None:
    """W23: not one for each command."""

    def beating() -> list[str]:
        return [t.get_name() for t in asyncio.all_tasks() if t.get_name() == "engine-heartbeat"]

    async with contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(
                await begin(engine, container, "echo up; exec sleep 7506")
            )
        assert beating() == ["engine-heartbeat"]
    assert beating() == []


async def test_an_engine_that_refuses_is_told_at_once(
    far: Engine, proxy: FaultProxy, container: str
) -> None:
    """W22, W23."""
    async with await begin(far, container, "echo up; exec sleep 7507") as process:
        await proxy.stop()
        error = await lost(process)
        assert isinstance(error.__cause__, SandboxUnavailableError)
        with pytest.raises(SandboxUnavailableError):
            await process.reattach()
        with pytest.raises(SandboxUnavailableError):
            await process.kill()


async def test_the_end_of_the_sandbox_is_said_and_a_kill_then_returns(
    engine: Engine, engines: Engines, make_container: MakeContainer, busybox_image: str
) -> None:
    """W18, W23: stopped or removed, by whoever it was."""
    for way, said in (("kill", "was stopped"), ("remove", "was removed")):
        container = await make_container(busybox_image, IDLE, Init=True)
        async with await begin(engine, container, "echo up; exec sleep 7508") as process:
            if way == "kill":
                await engine.kill_container(container)
            else:
                engines.api.remove(container)
            with pytest.raises(SandboxGoneError, match=said):
                async with asyncio.timeout(PATIENCE):
                    await process.wait()
            assert (await process.kill()).found == "gone"
            await process.kill(everything=True)
        with pytest.raises(SandboxError):
            await run(engine, container, ["true"], user=USER)


async def test_a_kill_in_a_container_that_ends_returns(
    engine: Engine, engines: Engines, container: str
) -> None:
    """W18: the container goes between the kill's question and its answer, or before it."""
    async with await begin(engine, container, "echo up; exec sleep 7509") as process:
        killing = asyncio.create_task(process.kill())
        await engine.kill_container(container)
        async with asyncio.timeout(PATIENCE):
            with contextlib.suppress(SandboxGoneError, SandboxUnknownOutcomeError):
                await killing
            await process.kill()


async def pause(sandbox: LiveSandbox) -> None:
    """Freeze a sandbox, which a busy machine refuses now and then."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with contextlib.suppress(SandboxEngineError):
                await sandbox.engine.pause_container(sandbox.id)
                return


async def test_a_paused_sandbox_refuses_a_kill_and_takes_it_later(sandbox: LiveSandbox) -> None:
    """W18."""
    async with await shell(sandbox, "echo up; exec sleep 7510") as process:
        await until_up(process)
        await pause(sandbox)
        try:
            for everything in (False, True):
                with pytest.raises(SandboxPausedError):
                    await process.kill(everything=everything)
            with pytest.raises(SandboxPausedError):
                await process.interrupt()
        finally:
            await sandbox.engine.unpause_container(sandbox.id)
        assert process.exit.code is None
        await process.kill()
        assert (process.exit.code, process.exit.reason) == (137, "killed")
    assert await commands(sandbox) == []


async def test_a_timeout_stays_one_when_its_stop_fails(sandbox: LiveSandbox) -> None:
    """W20: and says how the stop failed."""
    async with await shell(sandbox, "echo up; exec sleep 7511", timeout=1.5) as process:
        await until_up(process)
        await pause(sandbox)
        try:
            with pytest.raises(SandboxExecTimeoutError) as raised:
                async with asyncio.timeout(PATIENCE):
                    await process.wait()
        finally:
            await sandbox.engine.unpause_container(sandbox.id)
        notes = "\n".join(raised.value.__notes__)
        assert "the stop failed" in notes
        assert "paused" in notes
        assert "may miss some" in notes
        assert "could not be stopped" in str(raised.value)
        await process.kill()
    assert await commands(sandbox) == []


async def test_leaving_a_program_that_a_pause_keeps_alive_says_so(sandbox: LiveSandbox) -> None:
    """W15, W18: and whatever else went wrong is not hidden by that."""

    async def leave(error: BaseException | None) -> None:
        async with await shell(sandbox, "echo up; exec sleep 7512") as process:
            await until_up(process)
            await pause(sandbox)
            if error is not None:
                raise error

    for error in (None, ZeroDivisionError()):
        try:
            with pytest.raises(type(error) if error else SandboxPausedError):
                await leave(error)
        finally:
            await sandbox.engine.unpause_container(sandbox.id)
        await sweep(sandbox.engine, sandbox.id, user=USER)
    assert await commands(sandbox) == []


async def test_a_stop_that_hears_nothing_in_time_leaves_nobody_waiting(
    sandbox: LiveSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W19, W20, W23: the stop gives no last word, and the engine is slow to say why."""
    monkeypatch.setattr("sandbox_kernel.process.stop._text", lambda name: ":")
    monkeypatch.setattr("sandbox_kernel.process.stop._ENGINE_TIMEOUT", 0.2)
    inspect = Engine.inspect_container

    async def slow(self: Engine, container_id: str) -> dict[str, Any]:
        await asyncio.sleep(1)
        return await inspect(self, container_id)

    monkeypatch.setattr(Engine, "inspect_container", slow)
    async with asyncio.timeout(2 * PATIENCE):
        with pytest.raises(SandboxExecTimeoutError, match="could not be stopped"):
            await run(sandbox.engine, sandbox.id, ["sleep", "7513"], user=USER, timeout=1)
    monkeypatch.undo()
    await sweep(sandbox.engine, sandbox.id, user=USER)


async def test_a_fault_of_our_own_ends_a_command_for_whoever_waits(
    sandbox: LiveSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W23."""

    async def broken(self: Process) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(Process, "_end_because", broken)
    async with await shell(sandbox, "echo up; exec sleep 7514", timeout=1) as process:
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(CommandUnknownError, match="ZeroDivisionError: a fault"):
                await process.wait()
        monkeypatch.undo()
    assert await commands(sandbox) == []


async def test_an_engine_that_is_back_is_asked_to_stop_what_is_left(sandbox: LiveSandbox) -> None:
    """W15, W23: one silence does not leave a program behind."""
    async with await shell(sandbox, "echo up; exec sleep 7515") as process:
        await until_up(process)
        process._lose("it was silent for a while")
        await lost(process)
    assert await commands(sandbox) == []


async def test_input_whose_end_was_given_up_has_ended(
    sandbox: LiveSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W8: with an error of ours."""

    async def never(self: ByteStream) -> None:
        await asyncio.Event().wait()

    async with await shell(sandbox, "echo up; exec sleep 7516") as process:
        await until_up(process)
        monkeypatch.setattr(ByteStream, "end_input", never)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.end_input(), 0.2)
        with pytest.raises(SandboxError, match="has been ended"):
            await process.write(b"x")


# -- an engine of one's own -------------------------------------------------------------------


@pytest.fixture
def private() -> Iterator[PrivateEngine]:
    with private_engine() as made:
        yield made


@contextlib.asynccontextmanager
async def on(private: PrivateEngine, text: str) -> AsyncIterator[tuple[Engine, str, Process]]:
    """Run shell text in a container that does not end with a connection, unlike a sandbox."""
    image = provide_busybox(private.engines)
    async with Engine(private.engines.unix_endpoint) as engine:
        body = {"Image": image, "Cmd": IDLE, "HostConfig": {"NetworkMode": "none", "Init": True}}
        body["Labels"] = {"io.sandbox-kernel.version": "test"}
        container = (await engine.create_container(None, body)).id
        await engine.start_container(container)
        async with await begin(engine, container, text) as process:
            yield engine, container, process


async def test_a_killed_engine_is_an_error(private: PrivateEngine) -> None:
    """W23."""
    async with on(private, "echo up; exec sleep 7520") as (_, _, process):
        private.end(signal.SIGKILL)
        await lost(process)
        with pytest.raises(SandboxUnavailableError):
            await process.kill()
        private.start()
        # Without live-restore an engine's containers end when it comes back.
        with pytest.raises(SandboxGoneError):
            await process.reattach()
        assert (await process.kill()).found == "gone"


async def test_a_frozen_engine_is_an_error_and_goes_on_where_it_was(
    private: PrivateEngine,
) -> None:
    """W23."""
    async with on(private, "echo up; exec sleep 7521") as (engine, container, process):
        private.signal(signal.SIGSTOP)
        try:
            await lost(process)
            async with asyncio.timeout(CONTRACT):
                with pytest.raises(SandboxError):
                    await process.kill()
        finally:
            private.signal(signal.SIGCONT)
        assert await process.reattach() is None
        assert (await process.kill()).found == "killed"
        assert b"7521" not in await left(engine, container)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_command_outlives_an_engine_that_is_restarted_with_live_restore(
    private: PrivateEngine, number: signal.Signals
) -> None:
    """W22, W23: the engine forgets the exec; the command is found by what was known of it."""
    private.end(signal.SIGTERM)
    private.start("--live-restore")
    text = "echo up; (setsid sleep 7523 &); exec sleep 7522"
    async with on(private, text) as (engine, container, process):
        private.end(number)
        await lost(process)
        private.start("--live-restore")
        assert await process.reattach() is None
        assert {7522, 7523} <= await sleeping(engine, container)
        waiting = asyncio.create_task(process.reattach(PATIENCE))
        while b"wait:" not in await left(engine, container):
            pass
        assert (await process.kill()).found == "killed"
        assert {7522, 7523}.isdisjoint(await sleeping(engine, container))
        ended = await waiting
        assert ended is not None
        assert (ended.code, ended.reason) in ((137, "finished"), (None, "unknown"))
