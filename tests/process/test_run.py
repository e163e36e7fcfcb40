"""Commands in real sandboxes, by each way to the engine: start, streams, exit."""

from __future__ import annotations

import asyncio
import time

import pytest

from sandbox_kernel.errors import (
    SandboxError,
    SandboxSpecRejectedError,
    SandboxStartError,
)
from sandbox_kernel.process.command import start
from sandbox_kernel.process.result import Chunk, Exit
from sandbox_kernel.process.run import run
from sandbox_kernel.sandbox.live import CODE_USER, LiveSandbox
from tests.process.conftest import sh


async def test_a_command_gets_its_arguments_variables_directory_and_input_exactly(
    any_sandbox: LiveSandbox,
) -> None:
    """W1, W8, W9, C1: in dash and in busybox ash."""
    words = ["", "a b", "two\nlines\n", "$(id) `id` 'q' \"\\n", "-e", "ünïcödé\udc80\x81\x82\x88"]
    text = 'pwd; printf "%s|" "$@"; printf "%s" "$V"; cat; echo err >&2; exit 7'
    result = await sh(
        any_sandbox, text, *words, env={"V": "x\n'y'\n"}, cwd="/tmp", stdin=b"in\0put"
    )
    expected = "|".join(words).encode("utf-8", "surrogateescape")
    assert result.stdout == b"/tmp\n" + expected + b"|x\n'y'\nin\0put"
    assert result.stderr == b"err\n"
    assert (result.returncode, result.reason) == (7, "finished")


async def test_variables_of_any_name_reach_the_command(any_sandbox: LiveSandbox) -> None:
    """C1: the wrapper has variables too, and theirs are the command's; even those of a shell."""
    names = "nonce root mode value line count path program found started session self out err"
    names += " setsid directory newline IFS OLDPWD PWD LC_ALL PATH HOME SHLVL ENV PS4 words ifs"
    env = {name: f"own {name}\nand: more" for name in names.split()}
    env["PATH"] = "/none:/usr/bin:/bin"
    result = await run(
        any_sandbox.engine,
        any_sandbox.id,
        ["cat", "/proc/self/environ"],
        user=CODE_USER,
        env=env,
        cwd="/tmp",
    )
    got = dict(item.split("=", 1) for item in result.stdout_text.split("\0")[:-1])
    assert {name: got.get(name) for name in env} == env
    assert result.stderr == b""
    # A program is looked for along the command's own PATH.
    with pytest.raises(SandboxStartError, match="no such program"):
        await run(
            any_sandbox.engine, any_sandbox.id, ["cat"], user=CODE_USER, env={"PATH": "/none"}
        )


async def test_codes_and_texts_that_look_like_ours_are_the_commands_own(
    any_sandbox: LiveSandbox,
) -> None:
    """W3, EXW-10, peers 9: 126, 127, 137 and forged reports are passed on as they are."""
    for code in (0, 126, 127, 137, 255):
        result = await sh(any_sandbox, f"exit {code}")
        assert (result.returncode, result.reason) == (code, "finished")
    forged = "\x1e%s exit 0\n\x1ee ready 1 2 3\nOCI runtime exec failed\n"
    result = await sh(any_sandbox, f"printf '{forged}' forged >&2; kill -9 $$")
    assert result.stderr.decode() == forged.replace("%s", "forged")
    assert result.returncode == 137


async def test_nothing_about_the_command_stands_in_the_exec(sandbox: LiveSandbox) -> None:
    """W2, B12: neither argv nor environment of ours holds a secret or the nonce."""
    text = "for p in $PPID 1; do cat /proc/$p/cmdline /proc/$p/environ; done; env"
    result = await sh(sandbox, f"{text} # sEcReT")
    assert b"sEcReT" not in result.stdout
    async with await start(
        sandbox.engine, sandbox.id, ["cat"], user=CODE_USER, env={"TOKEN": "sEcReT"}
    ) as process:
        inspected = str(await sandbox.engine.inspect_container(sandbox.id))
        assert "sEcReT" not in inspected
        assert process.pid > 1


async def test_what_cannot_start_is_told_apart_and_nothing_runs(any_sandbox: LiveSandbox) -> None:
    """W3, peers 9."""
    engine, container = any_sandbox.engine, any_sandbox.id
    with pytest.raises(SandboxStartError, match="no such program"):
        await run(engine, container, ["no-such-program"], user=CODE_USER)
    with pytest.raises(SandboxStartError, match="working directory"):
        await run(engine, container, ["true"], user=CODE_USER, cwd="/no/such")
    with pytest.raises(SandboxSpecRejectedError):
        await run(engine, container, ["true"], user=CODE_USER, env={"a b": ""})
    with pytest.raises(SandboxSpecRejectedError):
        await run(engine, container, [], user=CODE_USER)


async def test_input_ends_while_output_keeps_flowing(sandbox: LiveSandbox) -> None:
    """W8: by the socket and over mTLS; writing after the end is a typed error."""
    data = bytes(range(256)) * 8192
    async with await start(
        sandbox.engine, sandbox.id, ["sh", "-c", "cat; echo more"], user=CODE_USER
    ) as process:
        await process.write(data)
        await process.end_input()
        with pytest.raises(SandboxError):
            await process.write(b"late")
        got = b""
        async for item in process.output:
            if isinstance(item, Chunk):
                got += item.data
            else:
                assert item == Exit(0, "finished")
    assert got == data + b"more\n"


async def test_a_holder_keeps_the_command_running_and_its_output_whole(
    any_sandbox: LiveSandbox,
) -> None:
    """W7, EXW-08, peers 8: a child that writes 3 s after the exit is heard, code intact."""
    result = await sh(any_sandbox, "echo main; (sleep 3; echo late) & exit 3")
    assert result.stdout == b"main\nlate\n"
    assert result.returncode == 3


async def test_a_paused_reader_loses_nothing_and_delays_nobody(sandbox: LiveSandbox) -> None:
    """W10: 3 MB pending, read 5 s after the exit, beside another command."""
    text = "head -c 3000000 /dev/zero; exit 9"
    async with await start(
        sandbox.engine, sandbox.id, ["sh", "-c", text], user=CODE_USER
    ) as process:
        begun = time.monotonic()
        assert (await sh(sandbox, "exit 4")).returncode == 4
        assert time.monotonic() - begun < 3
        await asyncio.sleep(5)  # the case itself: a reader that sleeps
        size = 0
        async for item in process:
            if isinstance(item, Chunk):
                size += len(item.data)
        assert (size, process.exit.code) == (3_000_000, 9)


async def test_too_much_output_ends_the_command(sandbox: LiveSandbox) -> None:
    """W10, RES-13: the cap is an error of its own, not a full disk."""
    with pytest.raises(SandboxError, match="more than 1000000 bytes"):
        await sh(sandbox, "yes", output_limit=1_000_000)
    assert b"yes" not in (await sh(sandbox, "cat /proc/[0-9]*/comm")).stdout


async def test_a_capture_keeps_head_and_tail(sandbox: LiveSandbox) -> None:
    """Peers 11 and 12."""
    result = await sh(sandbox, "seq 100000", capture_limit=1000)
    assert result.truncated
    assert result.stdout_bytes == 588895
    assert result.stdout.startswith(b"1\n2\n")
    assert result.stdout.endswith(b"100000\n")
