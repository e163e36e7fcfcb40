"""Ending commands: kill, timeout, cancellation."""

from __future__ import annotations

import asyncio
import time

import pytest

from sandbox_kernel.errors import (
    SandboxExecTimeoutError,
    SandboxSpecRejectedError,
    SandboxUnknownOutcomeError,
)
from sandbox_kernel.process.command import Process, start
from sandbox_kernel.process.result import CommandTimeoutError, Exit
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


async def test_a_command_that_is_silent_too_long_is_stopped(any_sandbox: LiveSandbox) -> None:
    """Issue 3: each output gives it more time; the error carries what there was."""
    text = "for i in 1 2 3 4; do echo $i; sleep 0.7; done; setsid sleep 7021 & sleep 7022"
    with pytest.raises(CommandTimeoutError) as raised:
        await sh(any_sandbox, text, idle_timeout=2.0)
    error = raised.value
    assert (error.reason, error.timeout) == ("idle-timeout", 2.0)
    assert "nothing for 2 s" in str(error)
    assert error.result is not None
    assert (error.result.reason, error.result.returncode) == ("idle-timeout", 137)
    assert error.result.stdout == b"1\n2\n3\n4\n"
    assert await commands(any_sandbox) == []
    assert (await sh(any_sandbox, "sleep 0.3; exit 3", idle_timeout=30)).returncode == 3


async def test_a_timeout_carries_what_there_was(sandbox: LiveSandbox) -> None:
    """W19, peers 10: as a result, with its reason; and a code is never made up."""
    with pytest.raises(CommandTimeoutError) as raised:
        await sh(sandbox, "echo out; echo err >&2; exec sleep 7023", timeout=1.5)
    result = raised.value.result
    assert result is not None
    assert (result.stdout_text, result.stderr_text) == ("out\n", "err\n")
    assert (result.returncode, result.reason) == (137, "timeout")
    assert result.duration >= 1.5


async def test_a_timeout_that_leaves_no_time_is_refused(sandbox: LiveSandbox) -> None:
    """Rules: before anything runs."""
    for name in ("timeout", "idle_timeout"):
        for value in (0, -1, float("nan")):
            with pytest.raises(SandboxSpecRejectedError, match=rf"^{name} "):
                await sh(sandbox, "true", **{name: value})


async def test_signals_reach_the_commands_group(any_sandbox: LiveSandbox) -> None:
    """Issue 3: children too; only one that dies of an interrupt was interrupted."""
    text = "echo up; sleep 7031 & sleep 7032 & wait"
    async with await shell(any_sandbox, text) as process:
        await until_up(process)
        await process.signal(15)
        assert (await process.wait()).code == 143
        assert process.exit.reason == "finished"
        await process.interrupt()  # after the end nothing happens
    assert await commands(any_sandbox) == []
    async with await shell(any_sandbox, "echo up; exec sleep 7033") as process:
        await until_up(process)
        await process.interrupt()
        ended = await process.wait()
        assert (ended.code, ended.reason) == (130, "interrupted")
    text = "trap 'exit 5' INT; echo up; while :; do sleep 0.1; done"
    async with await shell(any_sandbox, text) as process:
        await until_up(process)
        await process.interrupt()
        ended = await process.wait()
        assert (ended.code, ended.reason) == (5, "finished")
    async with await shell(any_sandbox, "echo up; exec sleep 7034") as process:
        await until_up(process)
        for number in (0, 65, -9):
            with pytest.raises(SandboxSpecRejectedError, match="signum"):
                await process.signal(number)
        await process.signal(9)
        ended = await process.wait()
        assert (ended.code, ended.reason) == (137, "killed")


async def test_a_process_of_another_command_that_holds_the_output_is_reported(
    any_sandbox: LiveSandbox,
) -> None:
    """W12, W13, W16: at once, with the status; the other command is left alone."""
    async with await shell(any_sandbox, "echo up; read x; echo late; exec sleep 7041") as process:
        await until_up(process)
        take = f"exec 9>/proc/{process.pid}/fd/1; echo up; exec sleep 7042"
        async with await shell(any_sandbox, take) as other:
            await until_up(other)
            report = await process.kill()
            assert report.found == "killed"
            assert report.held
            assert report.left == (f"holder {other.pid}",)
            assert [item async for item in process] == [process.exit]
            assert process.exit == Exit(137, "killed", held=True)
            assert b"sleep 7042 " in await commands(any_sandbox)


async def test_a_holder_that_cannot_be_looked_at_makes_a_stop_fail(sandbox: LiveSandbox) -> None:
    """W12, W15: a process that made itself unreadable, and only when it does hold the output."""
    hide = (
        "import ctypes, os, sys, time\n"
        "if len(sys.argv) > 1: os.open(f'/proc/{sys.argv[1]}/fd/1', os.O_WRONLY)\n"
        "assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0\n"
        "os.write(1, b'up\\n'); time.sleep(7043)\n"
    )

    async def hidden(*words: str) -> Process:
        argv = ["python3", "-c", hide, *words]
        return await start(sandbox.engine, sandbox.id, argv, user=CODE_USER)

    async with await hidden() as bystander:
        await until_up(bystander)
        async with await shell(sandbox, "echo up; exec sleep 7044") as process:
            await until_up(process)
            await process.kill()
            assert (process.exit.code, process.exit.reason) == (137, "killed")
    async with await shell(sandbox, "echo up; exec sleep 7045") as process:
        await until_up(process)
        async with await hidden(str(process.pid)) as holder:
            await until_up(holder)
            with pytest.raises(SandboxUnknownOutcomeError, match="still holds") as raised:
                await process.kill()
            assert f"the stop reported: unreadable {holder.pid}" in raised.value.__notes__
            with pytest.raises(SandboxUnknownOutcomeError):
                await anext(process)
    assert await commands(sandbox) == []


async def test_a_kill_beside_the_end_keeps_the_commands_own_code(any_sandbox: LiveSandbox) -> None:
    """W17: whichever comes first, the code is one of the two and is what the reader gets."""
    for delay in (0.0, 0.02, 0.05, 0.1):
        async with await shell(any_sandbox, f"echo up; sleep {delay}; exit 8") as process:
            await until_up(process)
            await process.kill()
            items = [item async for item in process]
            assert items[-1] == process.exit
            assert process.exit in (Exit(8, "finished"), Exit(137, "killed"))


async def test_a_second_cancellation_does_not_cut_a_stop_short(sandbox: LiveSandbox) -> None:
    """W15: nor a third; the stop is over when the cancelled kill is."""
    async with await shell(sandbox, "echo up; setsid sleep 7051 & exec sleep 7052") as process:
        await until_up(process)
        killing = asyncio.create_task(process.kill())
        await asyncio.sleep(0)
        for _ in range(3):
            killing.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await killing
        assert await commands(sandbox) == []
        ended = await process.wait()
        assert (ended.code, ended.reason) == (137, "killed")


async def test_many_stops_of_one_command_are_one(sandbox: LiveSandbox) -> None:
    """W17: idempotent, together and after another."""
    async with await shell(sandbox, "echo up; exec sleep 7053") as process:
        await until_up(process)
        reports = await asyncio.gather(*(process.kill() for _ in range(5)))
        assert {report.found for report in reports} == {"killed"}
        assert (await process.kill()).found == "nothing"
        assert process.exit.reason == "killed"
