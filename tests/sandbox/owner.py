"""A process that makes or finds a sandbox, says so, and waits: it is there to be killed."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.endpoint import Endpoint, TlsFiles
from sandbox_kernel.sandbox.live import LiveSandbox
from sandbox_kernel.sandbox.spec import SandboxSpec


async def main(settings: dict[str, Any]) -> None:
    """Get the sandbox and wait for the end."""
    paths = settings["tls"]
    owner = settings.get("owner", "tester")
    tls = TlsFiles(**{name: Path(path) for name, path in paths.items()}) if paths else None
    async with Engine(Endpoint(settings["url"], tls, "a test")) as engine:
        if settings["connect"]:
            sandbox = await LiveSandbox.connect(
                engine, settings["connect"], owner=owner, take_over=settings["take_over"]
            )
        else:
            sandbox = await LiveSandbox.create(
                engine,
                SandboxSpec(**settings["spec"]),
                owner=owner,
                extra_labels=settings["marks"],
            )
        if settings["pause"]:
            await sandbox.pause(longest=settings["pause"])
        print(json.dumps([sandbox.id, sandbox.volume]), flush=True)
        await asyncio.Event().wait()


asyncio.run(main(json.loads(sys.argv[1])))
