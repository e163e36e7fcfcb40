"""Commands on a terminal."""

from __future__ import annotations

import asyncio

import pytest

from sandbox_kernel.errors import SandboxError, SandboxSpecRejectedError, SandboxStartError
from sandbox_kernel.process.command import Process, start
from sandbox_kernel.process.result import Chunk, CommandTimeoutError
from sandbox_kernel.sandbox.live import CODE_USER, LiveSandbox
from tests.process.conftest import PATIENCE, commands, until

SIZE = (31, 101)


async def on_terminal(sandbox: LiveSandbox, text: str, **options: float) -> Process:
    return await start(
        sandbox.engine,
        sandbox.id,
        ["sh", "-c", text],
        user=CODE_USER,
        tty=SIZE,
        **options,  # type: ignore[arg-type]
    )


async def whole(process: Process) -> bytes:
    """Read to the end and leave."""
    got = b""
    async with process, asyncio.timeout(PATIENCE):
        async for item in process:
            if isinstance(item, Chunk):
                assert item.stream == 1
                got += item.data
    return got


async def test_a_command_has_a_terminal_of_the_size_that_was_asked_for(
    any_sandbox: LiveSandbox,
) -> None:
    """Issue 3: a pty; cooked, with echo, and the exit code exact."""
    process = await on_terminal(any_sandbox, "stty size; stty -a; [ -t 0 ] && [ -t 2 ]; exit 7")
    got = await whole(process)
    assert got.startswith(b"31 101\r\n")
    words = got.replace(b";", b" ").split()
    assert {b"echo", b"icanon", b"isig", b"opost", b"icrnl"} <= set(words)
    assert (process.exit.code, process.exit.reason) == (7, "finished")


async def test_reports_stay_out_of_the_one_stream(any_sandbox: LiveSandbox) -> None:
    """W9, EXW-10: whatever the command does to the terminal, and much at once."""
    process = await on_terminal(any_sandbox, "seq 20000; stty raw -echo; printf end >&2; exit 126")
    expected = "".join(f"{i}\r\n" for i in range(1, 20001)).encode() + b"end"
    assert await whole(process) == expected
    assert process.exit.code == 126
    # Text that looks like a report is the command's own.
    process = await on_terminal(any_sandbox, "stty -opost; printf '\\036 hello\\n\\036x exit 0\\n'")
    assert await whole(process) == b"\x1e hello\n\x1ex exit 0\n"


async def test_input_is_echoed_and_read_and_ends(any_sandbox: LiveSandbox) -> None:
    """W8: no byte is read before the terminal is the command's own."""
    async with await on_terminal(any_sandbox, "cat; echo more") as process:
        await process.write(b"one\ntwo\n")
        await process.end_input()
        with pytest.raises(SandboxError):
            await process.write(b"late")
        got = await until(process, b"more")
        assert got.count(b"one\r\n") == 2
        assert got.count(b"two\r\n") == 2
        assert (await process.wait()).code == 0


async def test_a_resize_is_told_to_the_command(any_sandbox: LiveSandbox) -> None:
    """Issue 3."""
    text = "trap 'stty size' WINCH; echo up; while :; do sleep 0.1; done"
    async with await on_terminal(any_sandbox, text) as process:
        await until(process, b"up")
        await process.resize(44, 55)
        await until(process, b"44 55\r\n")
        with pytest.raises(SandboxSpecRejectedError, match="tty"):
            await process.resize(0, 80)
    async with await start(any_sandbox.engine, any_sandbox.id, ["cat"], user=CODE_USER) as process:
        with pytest.raises(SandboxError, match="no terminal"):
            await process.resize(24, 80)


async def test_an_interrupt_comes_by_key_and_by_signal(any_sandbox: LiveSandbox) -> None:
    """Issue 3: Ctrl-C ends what stands in front; the wrapper stays and tells the code."""
    async with await on_terminal(any_sandbox, "echo up; exec sleep 7701") as process:
        await until(process, b"up")
        await process.write(b"\x03")
        assert (await process.wait()).code == 130
        assert process.exit.reason == "finished"  # not ours: somebody typed it
    for number, code, reason in ((2, 130, "interrupted"), (15, 143, "finished")):
        async with await on_terminal(any_sandbox, "echo up; exec sleep 7702") as process:
            await until(process, b"up")
            await process.signal(number)
            ended = await process.wait()
            assert (ended.code, ended.reason) == (code, reason)
    text = "trap 'echo caught; exit 4' INT; echo up; while :; do sleep 0.1; done"
    async with await on_terminal(any_sandbox, text) as process:
        await until(process, b"up")
        await process.interrupt()
        assert b"caught" in await until(process, b"caught")
        assert (await process.wait()).code == 4


async def test_a_kill_and_a_timeout_end_the_whole_terminal(any_sandbox: LiveSandbox) -> None:
    """W11, W13, W19: what left the session, too; a stopped command cannot hide."""
    text = "(setsid sleep 7711 &) ; nohup sleep 7712 & trap '' HUP; sleep 0.2; echo up; "
    async with await on_terminal(any_sandbox, text + "exec sleep 7713") as process:
        await until(process, b"up")
        await process.write(b"\x1a")  # Ctrl-Z
        await process.kill()
        assert (process.exit.code, process.exit.reason) == (137, "killed")
    with pytest.raises(CommandTimeoutError) as raised:
        await whole(await on_terminal(any_sandbox, "echo up; exec sleep 7714", timeout=1.5))
    assert raised.value.stdout_bytes == len(b"up\r\n")
    assert await commands(any_sandbox) == []


async def test_what_cannot_start_on_a_terminal_is_told(any_sandbox: LiveSandbox) -> None:
    """W3."""
    with pytest.raises(SandboxStartError, match="no such program"):
        await start(any_sandbox.engine, any_sandbox.id, ["no-such"], user=CODE_USER, tty=SIZE)
    with pytest.raises(SandboxSpecRejectedError, match="tty"):
        await start(any_sandbox.engine, any_sandbox.id, ["true"], user=CODE_USER, tty=(0, 1 << 20))
