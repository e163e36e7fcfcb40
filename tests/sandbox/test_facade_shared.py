"""Sandboxes of persistent workspaces by the public API: several hold one, and let go of it."""

from __future__ import annotations

import uuid
from typing import Any

from sandbox_kernel import EngineSettings
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.sandbox.workspaces import Workspaces


async def test_closing_leaves_the_sandbox_to_those_who_hold_it(
    create: Any, settings: EngineSettings, endpoint: Endpoint, owner: str
) -> None:
    """B6, B7: two creators get one sandbox; the last one who closes ends it; the files stay."""
    key = f"notebook-{uuid.uuid4().hex}"
    spec = {"durability": "persistent", "workspace": key}
    try:
        async with create(spec=spec) as first, create(spec=spec) as second:
            assert first.id == second.id
            await first.shell("echo kept > file", check=True)
            await first.close()
            assert (await second.shell("cat file", check=True)).stdout_text == "kept\n"
            third = await create(spec=spec)
            await second.close()
            assert (await third.shell("cat file", check=True)).stdout_text == "kept\n"
            await third.close()
        async with create(spec=spec) as again:
            assert again.id != third.id
            assert (await again.shell("cat file", check=True)).stdout_text == "kept\n"
            await again.destroy()
    finally:
        async with Engine(endpoint) as engine:
            await Workspaces(engine, owner).remove(key)
