"""Live sandboxes to run commands in: busybox ash, and dash and bash."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.images import DEFAULT_IMAGE
from sandbox_kernel.sandbox.live import LiveSandbox
from sandbox_kernel.sandbox.spec import SandboxSpec
from tests.engines import RUN_LABEL

MakeSandbox = Callable[..., Awaitable[LiveSandbox]]


@pytest.fixture
async def make_sandbox(engine: Engine) -> AsyncIterator[MakeSandbox]:
    made: list[LiveSandbox] = []

    async def make(image: str = DEFAULT_IMAGE, **options: object) -> LiveSandbox:
        sandbox = await LiveSandbox.create(
            engine,
            SandboxSpec(image=image, **options),  # type: ignore[arg-type]
            owner="tests",
            extra_labels={RUN_LABEL: os.environ["SANDBOX_TEST_RUN"]},
        )
        made.append(sandbox)
        return sandbox

    try:
        yield make
    finally:
        for sandbox in made:
            await sandbox.destroy()


@pytest.fixture
async def sandbox(make_sandbox: MakeSandbox) -> LiveSandbox:
    return await make_sandbox()


@pytest.fixture(params=["dash", "ash"])
async def any_sandbox(
    request: pytest.FixtureRequest, make_sandbox: MakeSandbox, busybox_image: str
) -> LiveSandbox:
    """The same in an image whose sh is dash and in one whose sh is busybox ash."""
    return await make_sandbox(busybox_image if request.param == "ash" else DEFAULT_IMAGE)
