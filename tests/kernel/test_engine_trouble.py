"""A line that goes silent and an engine that is restarted, under a kernel (goal 7, K4)."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from tests.engines import Engines, FaultProxy
from tests.kernel.conftest import connect, evaluate
from tests.kernel.test_obituary import told
from tests.kernel.test_provisioner import is_dead, sandbox_of
from tests.kernel.test_reattach import kernel, outcomes, running
from tests.process.private import private_engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

IMAGE = "sandbox-kernel/python:latest"
SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)"


async def test_silence_is_noticed_within_fifteen_seconds_and_the_kernel_is_had_again(
    engines: Engines, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal 7: what was sent into the silence gets an error; the kernel has kept its variables."""
    proxy = FaultProxy(engines, tmp_path / "p.sock")
    await proxy.start()
    try:
        async with kernel(proxy.endpoint, resumable=120.0) as manager:
            client = await connect(manager)
            await evaluate(client, "kept = 5")
            proxy.freeze()
            began = time.monotonic()
            sent = client.execute("kept += 1")
            while "nothing was heard from the sandbox" not in caplog.text:
                await asyncio.sleep(0.05)
                assert time.monotonic() - began < 15
            assert await manager.is_alive()
            # As a network does that has dropped what it could not deliver.
            proxy.cut()
            proxy.thaw()
            [reply] = await outcomes(client, sent)
            assert reply["status"] == "error"
            assert "nothing was heard from the sandbox" in reply["evalue"]
            assert await evaluate(client, "print(kept)") in (5, 6)
            client.stop_channels()
    finally:
        await proxy.stop()


@pytest.mark.parametrize("options", [(), ("--live-restore",)], ids=["plain", "live-restore"])
async def test_the_restart_of_an_engine_is_told_and_a_restart_of_the_kernel_works(
    engines: Engines, options: tuple[str, ...]
) -> None:
    """K4: an engine removes at its start what is to be removed at its end, live-restore or not."""
    image = await asyncio.to_thread(engines.api.request, "GET", f"/images/{IMAGE}/get")
    with private_engine() as private:
        api = private.engines.api
        if options:
            private.end(signal.SIGTERM)
            private.start(*options)
        api.request("POST", "/images/load", None, image, "application/x-tar")
        async with kernel(private.engines.unix_endpoint, resumable=60.0) as manager:
            client = await connect(manager)
            before = sandbox_of(manager).id
            request = await running(client, SLEEP)
            private.end(signal.SIGKILL)
            private.start(*options)
            notice = await told(client, request)
            assert "The sandboxed kernel has died" in notice
            assert "engine" in notice
            assert await is_dead(manager, within=20)
            await manager.restart_kernel(now=True)
            await client.wait_for_ready(timeout=60)
            assert await evaluate(client, "print(4)") == 4
            assert sandbox_of(manager).id != before
            client.stop_channels()
