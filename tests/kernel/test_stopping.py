"""What is stopped with a kernel: everything that it started, and nothing of another one."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator

import pytest
from jupyter_client.asynchronous import AsyncKernelClient

from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.engine.thread import EngineThread
from sandbox_kernel.sandbox import labels
from tests.engines import Engines, remove_leftovers
from tests.kernel.conftest import MakeManager, connect, evaluate
from tests.kernel.test_provisioner import is_dead

LEAVE = """
import os, subprocess
for how in (["setsid"], ["setsid", "env", "-i"], ["nohup"]):
    subprocess.Popen([*how, "/bin/sleep", "{seconds}"], stdout=-3, stderr=-3)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv("/bin/sleep", ["sleep", "{seconds}"])
    os._exit(0)
"""
LOOK = """
import json, pathlib
lines = [p.read_bytes().split(b"\\0") for p in pathlib.Path("/proc").glob("[0-9]*/cmdline")]
print(json.dumps(sorted(int(l[-2]) for l in lines if len(l) > 2 and l[0].endswith(b"sleep"))))
"""


@pytest.fixture
def endpoint(engines: Engines) -> Endpoint:
    """One way to the engine: here it makes no difference."""
    return engines.unix_endpoint


@pytest.fixture
def workspace(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A workspace of a person of this test alone, of whom nothing is left at its end."""
    name = f"user-{uuid.uuid4().hex}"
    monkeypatch.setenv("JUPYTERHUB_USER", name)
    yield "shared"
    remove_leftovers(engines, f"{labels.OWNER}={name}")


async def leave(client: AsyncKernelClient, seconds: int) -> None:
    await evaluate(client, LEAVE.format(seconds=seconds))
    while (await evaluate(client, LOOK)).count(seconds) < 4:
        pass


async def test_a_kernel_takes_what_it_started_along_and_leaves_others_alone(
    make_manager: MakeManager, workspace: str
) -> None:
    """K3, W11, EXW-04, peers 3: at both restarts and at the shutdown, in a sandbox of two."""
    one, other = (make_manager(workspace=workspace) for _ in range(2))
    for manager in (one, other):
        await manager.start_kernel()
    client, watcher = await connect(one), await connect(other)
    await leave(watcher, 8000)
    for number, now in enumerate((False, True)):
        await leave(client, 8001 + number)
        await one.restart_kernel(now=now)
        await client.wait_for_ready(timeout=60)
        assert await evaluate(client, LOOK) == [8000] * 4
    await leave(client, 8003)
    client.stop_channels()
    await one.shutdown_kernel()
    assert await evaluate(watcher, LOOK) == [8000] * 4
    watcher.stop_channels()


async def test_a_kernel_whose_wrapper_was_killed_is_dead_and_starts_again(
    make_manager: MakeManager,
) -> None:
    """K4, EXW-07: `kill -9 -1` in a cell ends the wrapper too; a restart ends what it left."""
    manager = make_manager()
    await manager.start_kernel()
    client = await connect(manager)
    client.execute("!kill -9 -1")
    session = manager.provisioner._session
    assert await is_dead(manager, within=20)
    assert session.exit_code == 137
    assert session.process.end.code is None
    await manager.restart_kernel(now=True)
    await client.wait_for_ready(timeout=60)
    assert await evaluate(client, "print(7)") == 7
    client.stop_channels()


async def test_a_kernel_whose_stream_broke_lives_and_its_end_is_noticed(
    make_manager: MakeManager,
) -> None:
    """K4, W22, peers 9: the connection that carries its output is not the kernel."""
    manager = make_manager()
    await manager.start_kernel()
    client = await connect(manager)
    process = manager.provisioner._session.process
    # As a router does that forgets one connection; no proxy can tell this one from the relay's.
    await EngineThread.current().call(process._process._stream.close)
    async with asyncio.timeout(20):
        await EngineThread.current().call(process._process.over)
    assert process.end.reason == "engine-lost"
    assert await evaluate(client, "print(7)") == 7
    assert await manager.is_alive()
    client.execute("import os; os._exit(3)")
    assert await is_dead(manager, within=20)
    # The wrapper could report it to nobody.
    assert manager.provisioner._session.exit_code in (3, 137)
    client.stop_channels()
