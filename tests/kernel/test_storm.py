"""Kernels that are restarted again and again, by people or since they crash (K3, K4)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from jupyter_client.multikernelmanager import AsyncMultiKernelManager

from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.sandbox.labels import KERNEL
from tests.clients.conftest import kernel_name
from tests.engines import Engines
from tests.kernel.conftest import MakeManager, connect, evaluate
from tests.kernel.test_provisioner import sandbox_of

__all__ = ["kernel_name"]  # the fixture

LOOK = """
import json, pathlib
lines = [p.read_bytes() for p in pathlib.Path("/proc").glob("[0-9]*/cmdline")]
print(json.dumps(sum(b"sleep" in line and b"7654" in line for line in lines)))
"""


@pytest.fixture
def endpoint(engines: Engines) -> Endpoint:
    """One way to the engine: here it makes no difference."""
    return engines.unix_endpoint


@pytest.mark.slow
async def test_ten_restarts_in_a_row_leave_one_kernel_and_nothing_of_the_others(
    make_manager: MakeManager, engines: Engines
) -> None:
    """K3, peers 3: in one sandbox, each with children, some while a cell runs."""
    manager = make_manager()
    await manager.start_kernel()
    before = sandbox_of(manager).id
    for number in range(10):
        client = await connect(manager)
        assert await evaluate(client, LOOK) == 0
        client.execute("import subprocess\nc = subprocess.Popen(['setsid', 'sleep', '7654'])")
        if number % 2:
            client.execute("import time\ntime.sleep(600)")
        client.stop_channels()
        await manager.restart_kernel(now=bool(number % 3))
    client = await connect(manager)
    assert await evaluate(client, LOOK) == 0
    client.stop_channels()
    assert sandbox_of(manager).id == before
    assert len(engines.api.containers(f"{KERNEL}={manager.kernel_id}")) == 1


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_a_kernel_that_keeps_crashing_is_given_up_and_says_why(
    kernel_name: str, tmp_path: Path, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    """K3, K4: after five attempts; what is left ends with the manager."""
    kernels = AsyncMultiKernelManager(connection_dir=str(tmp_path))
    kernel_id = await kernels.start_kernel(kernel_name=kernel_name)
    try:
        manager = kernels.get_kernel(kernel_id)
        restarts: list[bool] = []
        dead = asyncio.Event()
        kernels.add_restart_callback(kernel_id, lambda: restarts.append(True))
        kernels.add_restart_callback(kernel_id, dead.set, "dead")
        client = await connect(manager)

        async def crash() -> None:
            while not dead.is_set():
                client.execute("import os; os._exit(7)")
                await asyncio.sleep(1)

        crashing = asyncio.create_task(crash())
        await asyncio.wait_for(dead.wait(), 120)
        await crashing
        assert len(restarts) == 5
        assert caplog.text.count("The kernel ended with exit code 7.") >= 6
        assert not await manager.is_alive()
        client.stop_channels()
    finally:
        await kernels.shutdown_kernel(kernel_id, now=True)
    assert engines.api.containers(f"{KERNEL}={kernel_id}") == []
