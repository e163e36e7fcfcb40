"""A process that makes a sandbox, says so, and then waits: it is there to be killed."""

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
    """Make the sandbox and wait for the end."""
    paths = settings["tls"]
    tls = TlsFiles(**{name: Path(path) for name, path in paths.items()}) if paths else None
    async with Engine(Endpoint(settings["url"], tls, "a test")) as engine:
        sandbox = await LiveSandbox.create(
            engine, SandboxSpec(**settings["spec"]), owner="tester", extra_labels=settings["marks"]
        )
        print(json.dumps([sandbox.id, sandbox.volume]), flush=True)
        await asyncio.Event().wait()


asyncio.run(main(json.loads(sys.argv[1])))
