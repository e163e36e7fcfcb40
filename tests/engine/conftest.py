"""Fixtures of the engine's tests: containers that are made by hand and removed again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from sandbox_kernel.engine.client import Engine
from tests.engines import Engines

MakeContainer = Callable[..., Awaitable[str]]


@pytest.fixture
async def make_container(
    engine: Engine, engines: Engines, busybox_image: str, run_labels: dict[str, str]
) -> AsyncIterator[MakeContainer]:
    """Make a container (`cat` on an open stdin by default) and return its id."""
    made: list[str] = []

    async def make(start: bool = True, **changes: Any) -> str:
        host = {"NetworkMode": "none", "Init": True, **changes.pop("HostConfig", {})}
        body = {
            "Image": busybox_image,
            "Cmd": ["cat"],
            "OpenStdin": True,
            "Labels": run_labels,
            "HostConfig": host,
            **changes,
        }
        created = await engine.create_container(None, body)
        made.append(created.id)
        if start:
            await engine.start_container(created.id)
        return created.id

    yield make
    for container_id in made:
        engines.api.remove(container_id)


@pytest.fixture
async def container(make_container: MakeContainer) -> str:
    """A running container that does nothing."""
    return await make_container()
