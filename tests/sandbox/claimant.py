"""A process that makes a sandbox within a limit when it is told to, and says how that went."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.policy import Quota
from sandbox_kernel.sandbox.live import LiveSandbox
from sandbox_kernel.sandbox.spec import SandboxSpec


async def main(settings: dict[str, Any]) -> None:
    """Wait for a line, claim, answer, and hold the sandbox until the input ends."""
    async with Engine(Endpoint(settings["url"], None, "a test")) as engine:
        await asyncio.to_thread(sys.stdin.readline)
        try:
            sandbox = await LiveSandbox.create(
                engine,
                SandboxSpec(image=settings["image"]),
                owner=settings["owner"],
                quota=Quota(settings["most"], "a test"),
            )
        except SandboxSpecRejectedError:
            print("refused", flush=True)
            return
        print("up", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await sandbox.destroy()


asyncio.run(main(json.loads(sys.argv[1])))
