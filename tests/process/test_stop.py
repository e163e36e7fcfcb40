"""Ending commands: kill, timeout, cancellation."""

from __future__ import annotations

import asyncio
import time

import pytest

from sandbox_kernel.errors import SandboxExecTimeoutError
from sandbox_kernel.process.result import CommandTimeoutError
from sandbox_kernel.process.run import run
from sandbox_kernel.sandbox.live import CODE_USER, LiveSandbox
from tests.process.conftest import commands, sh, shell, until_up

ESCAPES = """
trap '' HUP INT TERM
setsid sleep 7001 &
(setsid sh -c 'sleep 7002 & exit 0' &)
nohup sleep 7003 >/dev/null 2>&1 &
env -i /usr/bin/setsid sleep 7004 >/dev/null 2>&1 &
env -i setsid sleep 7005 >/dev/null 2>&1 </dev/null &
sleep 0.2
echo up
exec sleep 7006
"""


async def test_a_kill_ends_the_whole_tree_and_nothing_else(any_sandbox: LiveSandbox) -> None:
    """W11, W13, W16, EXW-04, peers 1-3, 14: escapes die, another run lives; 137."""
    async with (
        await shell(any_sandbox, "echo up; exec sleep 6000") as other,
        await shell(any_sandbox, ESCAPES) as process,
    ):
        await until_up(other)
        await until_up(process)
        begun = time.monotonic()
        await process.kill()
        assert time.monotonic() - begun < 3
        assert [item async for item in process] == [process.exit]
        assert (process.exit.code, process.exit.reason) == (137, "killed")
        await process.kill()
        assert await commands(any_sandbox) == [b"sleep 6000 "]
    assert await commands(any_sandbox) == []


async def test_a_kill_keeps_the_code_of_a_command_that_had_exited(any_sandbox: LiveSandbox) -> None:
    """W13: its own code while a holder remained; all its output (W16)."""
    async with await shell(any_sandbox, "sleep 7010 & echo up; exit 3") as process:
        await until_up(process)
        async with asyncio.timeout(10):
            await process._intake.status.wait()
        await process.kill()
        assert process.exit.code == 3
    assert await commands(any_sandbox) == []


async def test_a_kill_of_what_has_ended_keeps_its_code(sandbox: LiveSandbox) -> None:
    """W17."""
    async with await shell(sandbox, "exit 12") as process:
        await process.wait()
        await process.kill()
        assert process.exit.code == 12
        assert process.exit.reason == "finished"


async def test_a_timeout_counts_every_byte_and_leaves_nothing(any_sandbox: LiveSandbox) -> None:
    """W19, peers 1, 10."""
    begun = time.monotonic()
    with pytest.raises(SandboxExecTimeoutError) as raised:
        await sh(
            any_sandbox,
            "head -c 2000000 /dev/zero; echo abc >&2; setsid sleep 7020 & sleep 7021",
            timeout=1.5,
        )
    assert time.monotonic() - begun < 8
    assert isinstance(raised.value, TimeoutError)
    assert isinstance(raised.value, CommandTimeoutError)
    assert (raised.value.stdout_bytes, raised.value.stderr_bytes) == (2_000_000, 4)
    assert await commands(any_sandbox) == []


async def test_a_timeout_comes_first_for_a_reader_that_is_behind(sandbox: LiveSandbox) -> None:
    """W19: however slowly the output is read."""
    async with await shell(
        sandbox, "head -c 5000000 /dev/zero; sleep 7030", timeout=1.0
    ) as process:
        with pytest.raises(SandboxExecTimeoutError):
            await process.wait()
        with pytest.raises(SandboxExecTimeoutError):
            await anext(process)


@pytest.mark.parametrize("after", [0.0, 0.01, 0.04, 0.08, 0.12, 0.2, 0.5])
async def test_a_cancelled_run_leaves_no_process_and_no_task(
    sandbox: LiveSandbox, after: float
) -> None:
    """W14, W21: cancelled at any moment of its start, nothing runs then or later."""
    before = asyncio.all_tasks()
    task = asyncio.create_task(
        run(sandbox.engine, sandbox.id, ["sleep", "7040"], user=CODE_USER, timeout=None)
    )
    await asyncio.sleep(after)  # the moment is the case
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await commands(sandbox) == []
    left = {t for t in asyncio.all_tasks() - before if not t.done()}
    assert not {t for t in left if t.get_name().startswith("process-")}
