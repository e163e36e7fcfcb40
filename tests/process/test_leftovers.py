"""What a command leaves behind when it ends, and its end."""

from __future__ import annotations

from sandbox_kernel.sandbox.live import LiveSandbox
from tests.process.conftest import commands, shell, until_up


async def test_what_a_command_detached_is_ended_after_it(any_sandbox: LiveSandbox) -> None:
    """W11, peers 3: a stop after the end reaches what the command left, and no other command."""
    detach = "setsid sleep 7401 >/dev/null 2>&1 </dev/null & echo up"
    async with (
        await shell(any_sandbox, "echo up; exec sleep 6401") as other,
        await shell(any_sandbox, detach) as process,
    ):
        await until_up(other)
        await until_up(process)
        assert (await process.wait()).code == 0
        assert (await process.kill()).found == "nothing"
        assert len(await commands(any_sandbox)) == 2
        assert (await process.kill_leftovers()).left == ()
        assert await commands(any_sandbox) == [b"sleep 6401 "]
        assert (await process.wait()).reason == "finished"


async def test_a_command_that_runs_is_ended_with_them(sandbox: LiveSandbox) -> None:
    """W11: nobody needs to know whether it has ended."""
    async with await shell(sandbox, "setsid sleep 7402 & echo up; exec sleep 7403") as process:
        await until_up(process)
        await process.kill_leftovers()
        assert (await process.wait()).reason == "killed"
        assert await commands(sandbox) == []
