"""Many commands at once: they take turns to start, and stops do not wait for one."""

from __future__ import annotations

import asyncio

import pytest

from sandbox_kernel.process import command, starting
from sandbox_kernel.process.command import start
from sandbox_kernel.process.run import run
from sandbox_kernel.process.starting import Starts
from sandbox_kernel.sandbox.live import CODE_USER, LiveSandbox
from tests.process.conftest import PATIENCE, MakeSandbox, shell, until_up


async def all_at_once(sandbox: LiveSandbox, count: int) -> None:
    results = await asyncio.gather(
        *(
            run(
                sandbox.engine,
                sandbox.id,
                ["sh", "-c", 'echo "$1"; exit "$1"', "sh", str(number % 250)],
                user=CODE_USER,
                timeout=60,
            )
            for number in range(count)
        )
    )
    found = [(result.stdout, result.returncode, result.reason) for result in results]
    assert found == [(b"%d\n" % code, code, "finished") for code in (n % 250 for n in range(count))]


async def test_150_commands_at_once_all_finish(make_sandbox: MakeSandbox) -> None:
    """W10, W23: also on a slow machine, and beyond 100, where aiohttp's own limit would be."""
    await all_at_once(await make_sandbox(pids_limit=4096), 150)


@pytest.mark.slow
async def test_500_commands_at_once_all_finish(make_sandbox: MakeSandbox) -> None:
    """W10, W23."""
    await all_at_once(await make_sandbox(pids_limit=4096), 500)


async def test_a_stop_does_not_wait_for_its_turn(sandbox: LiveSandbox) -> None:
    """W15, W23: while every turn is taken, commands are interrupted and ended as ever."""
    turns = Starts.of(sandbox.engine)
    one = await shell(sandbox, "echo up; exec sleep 1000")
    other = await shell(sandbox, "trap 'exit 4' INT; echo up; while :; do sleep 0.1; done")
    async with one, other, asyncio.TaskGroup() as holders:
        for process in (one, other):
            await until_up(process)
        free = asyncio.Event()
        taken = [asyncio.Event() for _ in range(starting.AT_ONCE_EACH)]

        async def hold(mine: asyncio.Event) -> None:
            async with turns.turn(sandbox.id):
                mine.set()
                await free.wait()

        for event in taken:
            holders.create_task(hold(event))
            await event.wait()
        waiting = asyncio.create_task(run(sandbox.engine, sandbox.id, ["true"], user=CODE_USER))
        try:
            async with asyncio.timeout(PATIENCE):
                await other.interrupt()
                assert (await other.wait()).code == 4
                assert (await one.kill()).found == "killed"
                assert (await one.kill(everything=True)).found == "swept"
            assert not waiting.done()
        finally:
            free.set()
        assert (await waiting).returncode == 0


async def test_the_time_to_start_begins_with_the_turn(
    sandbox: LiveSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W23, peers 7: who waits in line has not failed to start; who has the turn has a bound."""
    monkeypatch.setattr(command, "START_TIMEOUT", 0.001)
    monkeypatch.setattr(starting, "AT_ONCE_EACH", 1)
    monkeypatch.setattr(Starts, "_all", type(Starts._all)())
    async with Starts.of(sandbox.engine).turn(sandbox.id):
        waiting = asyncio.create_task(start(sandbox.engine, sandbox.id, ["true"], user=CODE_USER))
        done, _ = await asyncio.wait({waiting}, timeout=0.1)
        assert not done
    with pytest.raises(command.CommandStartError, match=r"did not start within 0\.001 s"):
        await waiting


async def test_one_that_never_starts_gives_its_turn_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """W23, peers 7: a container in which nothing can start does not keep others waiting."""
    monkeypatch.setattr(starting, "LONGEST_TURN", 0.01)
    monkeypatch.setattr(starting, "AT_ONCE", 1)
    turns = Starts()
    async with asyncio.timeout(PATIENCE), turns.turn("stuck"), turns.turn("other"):
        pass
    # Given back twice, it would be two turns from now on.
    monkeypatch.setattr(starting, "LONGEST_TURN", 1000.0)
    async with turns.turn("stuck"):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), turns.turn("other"):
                pass
