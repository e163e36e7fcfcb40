"""Commands that go for their own wrapper, for its reports, or for what a stop needs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sandbox_kernel.errors import SandboxError, SandboxUnknownOutcomeError
from sandbox_kernel.process.command import start
from sandbox_kernel.process.result import CommandUnknownError
from sandbox_kernel.process.run import run
from sandbox_kernel.process.stop import StopReport, end_anyhow
from sandbox_kernel.sandbox.live import CODE_USER, LiveSandbox
from tests.process.conftest import PATIENCE, MakeSandbox, commands, sh, shell, until, until_up

FORGE = (Path(__file__).parent / "inside" / "forge.py").read_text()


@pytest.fixture
def forge(sandbox: LiveSandbox) -> Callable[..., Awaitable[object]]:
    async def forging(*words: str) -> object:
        argv = ["python3", "-c", FORGE, *words]
        return await run(sandbox.engine, sandbox.id, argv, user=CODE_USER, timeout=60)

    return forging


async def test_a_forged_report_is_not_believed(
    sandbox: LiveSandbox, forge: Callable[..., Awaitable[object]]
) -> None:
    """EXW-10, W3: it can be made, since the uid is the same, but the engine's record differs."""
    with pytest.raises(CommandUnknownError, match=r"0 was reported .* recorded 3") as raised:
        await forge("0")
    result = raised.value.result
    assert result is not None
    assert (result.returncode, result.reason) == (None, "unknown")
    with pytest.raises(CommandUnknownError, match=r"0 was reported .* recorded 137"):
        await forge("0", "kill-root")
    assert (await sh(sandbox, "exit 5")).returncode == 5


async def test_a_forger_gains_no_more_than_its_own_code_and_end(
    sandbox: LiveSandbox, forge: Callable[..., Awaitable[object]]
) -> None:
    """EXW-10: with the right code it is believed, as it would be when it detached a process."""
    result = await forge("137", "stay")
    assert getattr(result, "returncode", None) == 137
    async with await shell(sandbox, "echo up; exec sleep 7310") as other:
        await until_up(other)
        report = await other.kill(everything=True)
        assert report.found == "swept"
    assert b"7300" not in (await sh(sandbox, "cat /proc/[0-9]*/cmdline")).stdout


async def test_a_killed_wrapper_is_an_unknown_outcome(any_sandbox: LiveSandbox) -> None:
    """EXW-07, W22: never success, and the sandbox goes on."""
    for text in ("kill -9 -1; sleep 60", "kill -9 $PPID; sleep 0.3"):
        with pytest.raises(SandboxUnknownOutcomeError, match="wrapper was killed"):
            await sh(any_sandbox, text)
    assert (await sh(any_sandbox, "exit 5")).returncode == 5


KILL_ROOT = """
setsid sleep 7320 &
(setsid sh -c 'sleep 7321 & exit 0' &)
setsid sleep 7322 >/dev/null 2>&1 &
(setsid sleep 7323 >/dev/null 2>&1 &)
root=$PPID
while read -r _ _ _ parent _ </proc/$root/stat && [ "$parent" -gt 1 ]; do root=$parent; done
sleep 0.2
echo up
kill -9 $root
exec sleep 7324
"""


async def test_what_a_command_leaves_that_killed_its_wrapper_is_swept(
    any_sandbox: LiveSandbox,
) -> None:
    """EXW-07, W11: known by session, output and marker; another run lives."""
    async with await shell(any_sandbox, "echo up; exec sleep 7300") as other:
        await until_up(other)
        async with await shell(any_sandbox, KILL_ROOT) as process:
            await until_up(process)
            with pytest.raises(SandboxUnknownOutcomeError):
                await process.wait()
        assert await commands(any_sandbox) == [b"sleep 7300 "]


async def test_a_stopped_wrapper_goes_on_when_its_command_is_stopped(
    any_sandbox: LiveSandbox,
) -> None:
    """EXW-07, W13: SIGSTOP to the wrapper delays the end, and hides no status."""
    async with await shell(any_sandbox, "kill -STOP $PPID; echo up; exit 6") as process:
        await until_up(process)
        await process.kill()
        assert process.exit.code in (6, 137)
    async with await shell(any_sandbox, "kill -STOP $PPID; echo up; exec sleep 7330") as process:
        await until_up(process)
        await process.kill()
        assert (process.exit.code, process.exit.reason) == (137, "killed")
    assert await commands(any_sandbox) == []


async def test_a_thread_outliving_its_main_thread_does_not_hide_a_process(
    sandbox: LiveSandbox,
) -> None:
    """W11: such a process looks like a zombie and holds files all the same."""
    text = (
        "import ctypes, threading, time, os\n"
        "def stay():\n time.sleep(0.3); os.write(1, b'up\\n'); time.sleep(7340)\n"
        "threading.Thread(target=stay).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    async with await shell(sandbox, f'python3 -c "{text}"; exit 3') as process:
        await until(process, b"up")
        await process.kill()
        assert process.exit.reason == "killed"
    assert b"7340" not in (await sh(sandbox, "cat /proc/[0-9]*/cmdline")).stdout


async def test_no_zombies_are_left(any_sandbox: LiveSandbox) -> None:
    """Peers 6: not of killed trees, nor of orphans, nor of wrappers."""
    for _ in range(5):
        async with await shell(
            any_sandbox, "for i in 1 2 3; do (sleep 60 &); done; echo up; exec sleep 60"
        ) as process:
            await until_up(process)
            await process.kill()
    text = "grep -l '^State:.Z' /proc/[0-9]*/status; exit 0"
    async with asyncio.timeout(PATIENCE):
        while (await sh(any_sandbox, text)).stdout:
            pass


async def test_a_command_that_ignores_all_signals_is_ended(any_sandbox: LiveSandbox) -> None:
    """W11."""
    text = "trap '' HUP INT QUIT TERM USR1 USR2 TSTP PIPE ALRM; echo up; while :; do sleep 60; done"
    async with await shell(any_sandbox, text) as process:
        await until_up(process)
        await process.interrupt()
        await process.signal(15)
        await process.kill()
        assert (process.exit.code, process.exit.reason) == (137, "killed")
    assert await commands(any_sandbox) == []


async def test_a_full_tmp_and_planted_names_hinder_nothing(any_sandbox: LiveSandbox) -> None:
    """W5, W6, EXW-01, EXW-02, EXW-05, EXW-11: the wrapper has no files."""
    fill = (
        "cd /tmp; for i in $(seq 2000); do : >exec.$i.pid; done; mkfifo wrapper.fifo; "
        "head -c 1g /dev/zero >f; exit 0"
    )
    await sh(any_sandbox, fill)
    assert (await sh(any_sandbox, "ls /tmp | wc -l; exit 6")).returncode == 6
    async with await shell(any_sandbox, "echo up; exec sleep 7350") as process:
        await until_up(process)
        await process.kill()
        assert process.exit.code == 137


async def test_a_fork_bomb_is_ended_by_a_kill(make_sandbox: MakeSandbox) -> None:
    """RES-01, RES-02: it holds every process that the sandbox may have and ignores signals."""
    sandbox = await make_sandbox(pids_limit=64)
    bomb = (
        "import os, signal\n"
        "for s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\n"
        "os.write(1, b'up\\n')\n"
        "while True:\n"
        " try: os.fork()\n"
        " except OSError: pass\n"
    )
    process = await start(sandbox.engine, sandbox.id, ["python3", "-c", bomb], user=CODE_USER)
    async with process:
        await until_up(process)
        report = await process.kill()
        assert report.found in ("killed", "swept", "container")
    if report.found == "container":
        await asyncio.wait_for(sandbox.ended, PATIENCE)
    else:
        assert (await sh(sandbox, "exit 5")).returncode == 5


async def test_a_kill_needs_no_process_that_the_limit_could_refuse(
    make_sandbox: MakeSandbox,
) -> None:
    """RES-02: every process that the sandbox may have is taken, and none is given back."""
    sandbox = await make_sandbox(pids_limit=32)
    text = (
        "import os, time\n"
        "while True:\n"
        " try:\n"
        "  if os.fork() == 0: time.sleep(7360)\n"
        " except OSError: break\n"
        "os.write(1, b'up\\n')\n"
        "time.sleep(7360)\n"
    )
    process = await start(sandbox.engine, sandbox.id, ["python3", "-c", text], user=CODE_USER)
    async with process:
        await until_up(process)
        report = await process.kill()
        assert report.found in ("killed", "swept", "container")
        assert process.exit.reason == "killed"
    if report.found == "container":
        await asyncio.wait_for(sandbox.ended, PATIENCE)


async def test_a_command_that_kills_whatever_comes_to_stop_it_is_ended_all_the_same(
    sandbox: LiveSandbox,
) -> None:
    """W11, EXW-07: by whoever kills first, or by the engine, which ends the container."""
    text = (
        "import os, time\n"
        "os.write(1, b'up\\n'); time.sleep(0.3)\n"
        "while True:\n"
        " try: os.kill(-1, 9)\n"
        " except OSError: pass\n"
    )
    process = await start(sandbox.engine, sandbox.id, ["python3", "-c", text], user=CODE_USER)
    async with process:
        await until_up(process)
        with pytest.raises(SandboxUnknownOutcomeError):
            await process.wait()
        report = await process.kill()
        assert report.found in {"swept", "container"}
    if report.found == "container":
        ended = await asyncio.wait_for(sandbox.ended, PATIENCE)
        assert ended.kind == "removed"
    else:
        assert b"os.kill(-1" not in (await sh(sandbox, "cat /proc/[0-9]*/cmdline")).stdout


async def test_where_no_exec_can_start_the_container_is_killed(sandbox: LiveSandbox) -> None:
    """W11, RES-02: the last resort, which the report names."""
    # A user whom the image does not have stands in for a sandbox in which nothing can start.
    failed = SandboxError("The stop failed")
    report = await end_anyhow(sandbox.engine, sandbox.id, user="nobody-here", because=failed)
    assert report == StopReport("container")
    ended = await asyncio.wait_for(sandbox.ended, PATIENCE)
    assert ended.kind == "removed"


async def test_what_a_stop_cannot_end_is_ended_with_everything_of_the_user(
    sandbox: LiveSandbox,
) -> None:
    """W11: the step between a stop of one command and the end of the container."""
    async with await shell(sandbox, "echo up; exec sleep 7380") as process:
        await until_up(process)
        failed = SandboxError("The stop failed")
        report = await end_anyhow(sandbox.engine, sandbox.id, user=CODE_USER, because=failed)
        assert report == StopReport("swept")
        with pytest.raises(SandboxUnknownOutcomeError):
            await process.wait()
    assert not sandbox.ended.done()


async def test_kill_everything_ends_every_process_of_the_user(any_sandbox: LiveSandbox) -> None:
    """W11: other commands and what was detached long ago, and the container stays."""
    await sh(any_sandbox, "(setsid env -i sleep 7370 >/dev/null 2>&1 </dev/null &)")
    async with (
        await shell(any_sandbox, "echo up; exec sleep 7371") as other,
        await shell(any_sandbox, "echo up; exec sleep 7372") as process,
    ):
        await until_up(other)
        await until_up(process)
        report = await process.kill(everything=True)
        assert report.found == "swept"
        assert (process.exit.code, process.exit.reason) == (137, "killed")
        with pytest.raises(SandboxUnknownOutcomeError):
            await other.wait()
    assert await commands(any_sandbox) == []
    # Also when the command itself has ended before.
    text = "(setsid env -i sleep 7373 >/dev/null 2>&1 </dev/null &)"
    async with await shell(any_sandbox, text) as process:
        assert (await process.wait()).code == 0
        assert await commands(any_sandbox) == [b"sleep 7373 "]
        assert (await process.kill(everything=True)).found == "swept"
        assert (process.exit.code, process.exit.reason) == (0, "finished")
    assert await commands(any_sandbox) == []
