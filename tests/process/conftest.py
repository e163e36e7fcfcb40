"""Live sandboxes to run commands in: dash, busybox ash and bash; and containers made by hand."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.images import DEFAULT_IMAGE
from sandbox_kernel.process.command import Process, start
from sandbox_kernel.process.result import Chunk, RunResult
from sandbox_kernel.process.run import run
from sandbox_kernel.sandbox.live import CODE_USER, LiveSandbox
from sandbox_kernel.sandbox.spec import SandboxSpec
from tests.engines import RUN_LABEL, Engines
from tests.sandbox.conftest import derived_image, python_image

__all__ = ["derived_image", "python_image"]

MakeSandbox = Callable[..., Awaitable[LiveSandbox]]
MakeContainer = Callable[..., Awaitable[str]]

# Long enough for a machine that does much else; what has to be fast is measured elsewhere.
PATIENCE = 20.0

STARTED = "echo up; "


async def sh(sandbox: LiveSandbox, text: str, *args: str, **options: Any) -> RunResult:
    """Run shell text in a sandbox to its end."""
    return await run(
        sandbox.engine, sandbox.id, ["sh", "-c", text, "sh", *args], user=CODE_USER, **options
    )


async def shell(sandbox: LiveSandbox, text: str, **options: Any) -> Process:
    """Start shell text in a sandbox."""
    return await start(sandbox.engine, sandbox.id, ["sh", "-c", text], user=CODE_USER, **options)


async def until_up(process: Process) -> bytes:
    """Wait for a command's first output and return it."""
    item = await anext(process)
    assert isinstance(item, Chunk)
    return item.data


async def until(process: Process, text: bytes) -> bytes:
    """Read a command's output up to a text."""
    got = b""
    while text not in got:
        got += await until_up(process)
    return got


async def commands(sandbox: LiveSandbox) -> list[bytes]:
    """Return the command lines of what still sleeps in a sandbox."""
    text = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$f 2>/dev/null; echo; done"
    found = (await sh(sandbox, text)).stdout.splitlines()
    return [line for line in found if line.startswith(b"sleep ")]


@pytest.fixture
async def make_sandbox(engine: Engine) -> AsyncIterator[MakeSandbox]:
    made: list[LiveSandbox] = []

    async def make(image: str = DEFAULT_IMAGE, **options: Any) -> LiveSandbox:
        sandbox = await LiveSandbox.create(
            engine,
            SandboxSpec(image=image, **options),
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


@pytest.fixture(scope="session")
def bash_image(derived_image: Callable[[str, str], str]) -> str:
    """An image whose sh is bash."""
    return derived_image("bash", "RUN ln -sf bash /bin/sh")


@pytest.fixture(params=["dash", "ash", "bash"])
def any_image(request: pytest.FixtureRequest) -> str:
    """Images whose sh is dash, busybox ash and bash in turn."""
    if request.param == "dash":
        return DEFAULT_IMAGE
    return str(request.getfixturevalue("busybox_image" if request.param == "ash" else "bash_image"))


@pytest.fixture
async def any_sandbox(make_sandbox: MakeSandbox, any_image: str) -> LiveSandbox:
    """A sandbox with each shell in turn."""
    return await make_sandbox(any_image)


@pytest.fixture
async def make_container(
    engine: Engine, engines: Engines, run_labels: dict[str, str]
) -> AsyncIterator[MakeContainer]:
    """Make a container by hand, as a sandbox never is, and return its id."""
    made: list[str] = []

    async def make(image: str, command: list[str], **host: Any) -> str:
        created = await engine.create_container(
            None,
            {
                "Image": image,
                "Cmd": command,
                "Labels": run_labels,
                "HostConfig": {"NetworkMode": "none", **host},
            },
        )
        made.append(created.id)
        await engine.start_container(created.id)
        return created.id

    yield make
    for container_id in made:
        engines.api.remove(container_id)
