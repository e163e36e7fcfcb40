"""Fixtures of the engine's tests: containers that are made by hand and removed again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.engine.client import Engine
from tests.engines import Engines, FaultProxy

MakeContainer = Callable[..., Awaitable[str]]


@pytest.fixture
def container_body(busybox_image: str, run_labels: dict[str, str]) -> dict[str, Any]:
    """The body of a container that does nothing until its stdin ends."""
    return {
        "Image": busybox_image,
        "Cmd": ["cat"],
        "OpenStdin": True,
        "Labels": run_labels,
        "HostConfig": {"NetworkMode": "none", "Init": True},
    }


@pytest.fixture
async def make_container(
    engine: Engine, engines: Engines, container_body: dict[str, Any]
) -> AsyncIterator[MakeContainer]:
    """Make a container (`cat` on an open stdin by default) and return its id."""
    made: list[str] = []

    async def make(start: bool = True, **changes: Any) -> str:
        host = {**container_body["HostConfig"], **changes.pop("HostConfig", {})}
        created = await engine.create_container(
            None, {**container_body, **changes, "HostConfig": host}
        )
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


@pytest.fixture
async def proxy(engines: Engines, tmp_path: Path) -> AsyncIterator[FaultProxy]:
    """A line to the engine that can be cut."""
    made = FaultProxy(engines, tmp_path / "p.sock")
    await made.start()
    yield made
    await made.stop()
