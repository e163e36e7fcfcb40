"""What a command costs besides its own work, where that can be counted (W24)."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox_kernel.process.run import run
from sandbox_kernel.sandbox.live import CODE_USER, LiveSandbox
from tests.process.conftest import sh, shell, until_up

# The pids of a process and of all below it.
TREE = r"""
tree() {
    echo "$1"
    for child in $(cat /proc/$1/task/*/children 2>/dev/null); do tree "$child"; done
}
tree "$1"
"""
TICKS = r"""
ticks() {
    for pid; do
        read -r line </proc/$pid/stat && set -- ${line##*) } && echo "$pid ${12} ${13}"
    done
}
ticks "$@"
sleep 1
echo after
ticks "$@"
"""


async def test_what_waits_for_a_command_uses_no_processor_time(sandbox: LiveSandbox) -> None:
    """W24: neither the wrapper nor what stands between the command and the engine polls."""
    async with await shell(sandbox, "echo up; exec sleep 1000") as process:
        await until_up(process)
        assert process.identity is not None
        found = await sh(sandbox, TREE, str(process.identity.root))
        pids = found.stdout_text.split()
        # The init, three shells, the command, and two that pass its output on.
        assert len(pids) >= 5
        assert str(process.pid) in pids
        before, _, after = (await sh(sandbox, TICKS, *pids)).stdout.partition(b"after\n")
        assert len(before.splitlines()) == len(pids)
        assert after == before


async def test_a_command_asks_the_engine_no_more_than_a_bare_exec(
    sandbox: LiveSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W24: it is started once, and asked about at its end."""
    asked: list[str] = []
    call = sandbox.engine.call

    def counted(doing: str, *args: Any, **options: Any) -> Any:
        asked.append(doing)
        return call(doing, *args, **options)

    monkeypatch.setattr(sandbox.engine, "call", counted)
    await run(sandbox.engine, sandbox.id, ["true"], user=CODE_USER)
    assert asked[:2] == ["run a command", "inspect the command"]
    # The engine's record can be a moment behind the end of the stream.
    assert set(asked[2:]) <= {"inspect the command", "ping the engine"}
