"""A kernel that lives on when what connects it breaks (goal 7, K4): relay, line, streams."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager

from sandbox_kernel.engine.thread import EngineThread
from sandbox_kernel.kernel import session as session_module
from sandbox_kernel.sandbox.live import CODE_USER, CONTROL_USER
from tests.engines import Engines, FaultProxy
from tests.kernel.conftest import connect, evaluate, sandbox_spec
from tests.kernel.test_obituary import told
from tests.kernel.test_provisioner import is_dead, sandbox_of

FIND_RELAY = """
for place in /proc/[0-9]*; do
    case $(tr '\\0' ' ' <"$place/cmdline" 2>/dev/null) in
    python3*-I*) [ -O "$place" ] && kill -{signal} "${{place#/proc/}}" ;;
    esac
done
"""


@pytest.fixture
async def proxy(engines: Engines, tmp_path: Path) -> AsyncIterator[FaultProxy]:
    made = FaultProxy(engines, tmp_path / "p.sock")
    await made.start()
    yield made
    await made.stop()


@contextlib.asynccontextmanager
async def kernel(endpoint: Any, **config: Any) -> AsyncIterator[AsyncKernelManager]:
    manager = AsyncKernelManager(kernel_id=uuid.uuid4().hex)
    manager._kernel_spec = sandbox_spec(endpoint, **config)
    await manager.start_kernel()
    try:
        yield manager
    finally:
        await manager.shutdown_kernel(now=True)


async def inside(manager: AsyncKernelManager, text: str, user: str) -> None:
    """Run shell text in a kernel's sandbox, beside the kernel."""
    sandbox = sandbox_of(manager)

    async def run() -> None:
        await sandbox.run_quietly(["sh", "-c", text], user)

    await EngineThread.current().call(run)


async def to_the_relay(manager: AsyncKernelManager, what: str) -> None:
    await inside(manager, FIND_RELAY.format(signal=what), CONTROL_USER)


async def running(client: AsyncKernelClient, code: str) -> str:
    """Start a cell that prints something at its beginning; return its id when it has."""
    request: str = client.execute(code)
    async with asyncio.timeout(30):
        while True:
            message = await client.get_iopub_msg()
            mine = message["parent_header"].get("msg_id") == request
            if mine and message["msg_type"] == "stream":
                return request


async def outcomes(client: AsyncKernelClient, *requests: str) -> list[dict[str, Any]]:
    """Wait for the ends of cells as a notebook does, and return their replies."""
    idle: set[str] = set()
    replies: dict[str, dict[str, Any]] = {}
    async with asyncio.timeout(60):
        while not idle.issuperset(requests):
            message = await client.get_iopub_msg()
            if message["content"].get("execution_state") == "idle":
                idle.add(message["parent_header"]["msg_id"])
        # The reply to a later request says that no second one to these was on its way.
        last = client.kernel_info()
        while last not in replies:
            message = await client.get_shell_msg()
            answered = message["parent_header"]["msg_id"]
            assert answered not in replies
            replies[answered] = message["content"]
    return [replies[request] for request in requests]


WAIT = """\
import os, time
print('up', flush=True)
while not os.path.exists('/tmp/go'):
    time.sleep(0.05)
"""


async def test_a_cell_survives_the_loss_of_the_relay(engines: Engines) -> None:
    """K4, goal 7: it goes on, its one reply arrives, and it says that output may be missing."""
    async with kernel(engines.unix_endpoint) as manager:
        client = await connect(manager)
        await evaluate(client, "kept = 5")
        request = await running(client, WAIT + "\nkept += 1")
        await to_the_relay(manager, "KILL")
        notice = await told(client, request)
        assert "The relay in the sandbox has ended" in notice
        assert "Output of this cell may be missing" in notice
        await inside(manager, "touch /tmp/go", CODE_USER)
        [reply] = await outcomes(client, request)
        assert reply["status"] == "ok"
        assert await evaluate(client, "print(kept)") == 6
        assert await manager.is_alive()
        client.stop_channels()


async def test_a_reply_that_was_lost_becomes_an_error_and_the_kernel_goes_on(
    engines: Engines,
) -> None:
    """K4, goal 7: what it had answered when the relay was killed had not got through."""
    async with kernel(engines.unix_endpoint) as manager:
        client = await connect(manager)
        await evaluate(client, "kept = 5")
        request = await running(client, WAIT + "\nkept += 1\nopen('/tmp/done', 'w').close()")
        await to_the_relay(manager, "STOP")
        await inside(manager, "touch /tmp/go; until [ -e /tmp/done ]; do :; done", CODE_USER)
        queued = client.execute("kept += 10")
        await asyncio.sleep(0.5)
        await to_the_relay(manager, "KILL")
        for reply in await outcomes(client, request, queued):
            assert reply["status"] == "error"
            assert reply["ename"] == "SandboxConnectionError"
            assert "not known" in reply["evalue"]
        assert await evaluate(client, "print(kept)") == 6
        client.stop_channels()


async def test_a_kernel_of_a_resumable_sandbox_survives_a_cut_line(
    proxy: FaultProxy,
) -> None:
    """Goal 7: relay, process and lease have new connections; signals and the end are as ever."""
    async with kernel(proxy.endpoint, resumable=60.0) as manager:
        manager.kernel_spec.interrupt_mode = "signal"
        client = await connect(manager)
        await evaluate(client, "kept = 5")
        before = sandbox_of(manager).id
        request = await running(client, "import time\nprint('up', flush=True)\ntime.sleep(600)")
        await proxy.stop()
        await asyncio.sleep(1)
        await proxy.start()
        await told(client, request)
        assert await manager.is_alive()
        await manager.interrupt_kernel()
        [reply] = await outcomes(client, request)
        assert reply["ename"] == "KeyboardInterrupt"
        assert await evaluate(client, "print(kept)") == 5
        assert sandbox_of(manager).id == before
        client.execute("import os; os._exit(3)")
        assert await is_dead(manager, within=20)
        assert await manager.provisioner.poll() == 3
        await manager.restart_kernel(now=True)
        await client.wait_for_ready(timeout=60)
        assert await evaluate(client, "print('kept' in globals() and 1 or 0)") == 0
        client.stop_channels()


async def test_a_kernel_whose_sandbox_ends_with_the_line_says_so(proxy: FaultProxy) -> None:
    """K4, B13: and is dead for its manager, which can start another one."""
    async with kernel(proxy.endpoint) as manager:
        client = await connect(manager)
        before = sandbox_of(manager).id
        request = await running(client, "import time\nprint('up', flush=True)\ntime.sleep(600)")
        proxy.cut()
        notice = await told(client, request)
        assert "The sandboxed kernel has died" in notice
        assert "connection" in notice
        assert await is_dead(manager, within=10)
        await manager.restart_kernel(now=True)
        await client.wait_for_ready(timeout=60)
        assert sandbox_of(manager).id != before
        client.stop_channels()


@pytest.mark.slow
async def test_a_relay_that_cannot_be_had_again_is_told(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K4: it is tried for a number of times, and no longer."""
    monkeypatch.setattr(session_module, "RELAY_TRIES", 0)
    async with kernel(engines.unix_endpoint) as manager:
        client = await connect(manager)
        request = await running(client, "import time\nprint('up', flush=True)\ntime.sleep(600)")
        await to_the_relay(manager, "KILL")
        assert "The relay in the sandbox has ended" in await told(client, request)
        assert await is_dead(manager, within=10)
        client.stop_channels()


@pytest.mark.slow
async def test_an_encrypted_kernel_ends_with_its_connection(engines: Engines) -> None:
    """K4: which replies were lost cannot be seen, so that its clients are told and it ends."""
    manager = AsyncKernelManager(kernel_id=uuid.uuid4().hex, transport_encryption="required")
    manager._kernel_spec = sandbox_spec(engines.unix_endpoint)
    await manager.start_kernel()
    try:
        client = await connect(manager)
        await to_the_relay(manager, "KILL")
        async with asyncio.timeout(20):
            while (message := await client.get_iopub_msg())["msg_type"] != "stream":
                pass
        assert "The sandboxed kernel has died" in message["content"]["text"]
        assert await is_dead(manager, within=10)
        client.stop_channels()
    finally:
        await manager.shutdown_kernel(now=True)


@pytest.mark.slow
async def test_a_kernel_may_be_paused_for_longer_than_the_line_may_be_silent(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B8: a relay that is frozen on purpose is not lost."""
    monkeypatch.setattr("sandbox_kernel.kernel.link.SILENCE_LIMIT", 2.0)
    async with kernel(engines.unix_endpoint) as manager:
        client = await connect(manager)
        await evaluate(client, "kept = 5")
        sandbox = sandbox_of(manager)
        first = manager.provisioner._session._relay
        await EngineThread.current().call(sandbox.pause)
        await asyncio.sleep(5)
        assert sandbox.paused
        assert await manager.is_alive()
        await EngineThread.current().call(sandbox.resume)
        assert await evaluate(client, "print(kept)") == 5
        assert manager.provisioner._session._relay is first
        client.stop_channels()
