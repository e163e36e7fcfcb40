"""``jupyter sandbox attach``: a console on a kernel that runs (K6)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
from jupyter_client.manager import AsyncKernelManager

from sandbox_kernel.sandbox.labels import OWNER
from tests.clients.conftest import kernel_name
from tests.engines import Engines, remove_leftovers, wait_until
from tests.kernel.conftest import connect, evaluate
from tests.kernel.test_provisioner import sandbox_of

__all__ = ["kernel_name"]  # the fixture

pytestmark = pytest.mark.timeout(300)
BIN = Path(sys.executable).parent
SERVER = """
import sys
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name=sys.argv[1])
client.execute_interactive("kept = 5")
print(manager.provisioner._session.sandbox.short_id, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def endpoint(engines: Engines) -> Any:
    """One way to the engine: here it makes no difference."""
    return engines.unix_endpoint


@pytest.fixture
def person(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = f"attach-{uuid.uuid4().hex}"
    monkeypatch.setenv("JUPYTERHUB_USER", name)
    monkeypatch.setenv("SANDBOX_DOCKER_HOST", engines.unix)
    monkeypatch.setenv("TERM", "dumb")
    yield name
    remove_leftovers(engines, f"{OWNER}={name}")


@contextlib.contextmanager
def spawned(*words: str, **options: Any) -> Iterator[Any]:
    child = pexpect.spawn(str(BIN / words[0]), list(words[1:]), encoding="utf-8", timeout=60,
                          env=dict(os.environ), **options)  # fmt: skip
    try:
        yield child
    finally:
        child.close(force=True)


def attach(*words: str) -> contextlib.AbstractContextManager[Any]:
    return spawned("jupyter-sandbox", "attach", *words)


@pytest.mark.slow
async def test_a_console_shares_a_kernel_that_is_served(
    kernel_name: str, person: str, engines: Engines
) -> None:
    """K6: it sees the variables, and the kernel goes on after it."""
    manager = AsyncKernelManager(kernel_name=kernel_name, kernel_id=uuid.uuid4().hex)
    await manager.start_kernel()
    try:
        client = await connect(manager)
        await evaluate(client, "kept = 5")

        def converse() -> None:
            with attach() as console:
                console.expect(r"In \[\d+\]")
                console.sendline("kept += 37; print('now', kept)")
                console.expect("now 42")
                console.expect(r"In \[\d+\]")
                console.sendline("exit(True)")
                console.expect("keeping kernel alive")
                console.expect(pexpect.EOF)

        await asyncio.to_thread(converse)
        assert await evaluate(client, "print(kept)") == 42
        client.stop_channels()
        await asyncio.to_thread(refuse_what_is_none, sandbox_of(manager).short_id)
    finally:
        await manager.shutdown_kernel(now=True)


def refuse_what_is_none(running: str) -> None:
    with attach("nothing-of-that-name") as console:
        console.expect(f"There is no sandbox.*{running}")


def test_a_kernel_that_outlived_its_server_has_a_console_again(
    kernel_name: str, person: str, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K6: more than once; and what ends it is to ask for that."""
    monkeypatch.setenv("SANDBOX_DOCKER_RESUMABLE", "120")
    with spawned("python", "-c", SERVER, kernel_name) as server:
        server.expect(r"([0-9a-f]{12})\r\n")
        sandbox = server.match[1]
        server.kill(9)
    with attach(sandbox[:6]) as console:
        console.expect(r"In \[\d+\]")
        console.sendline("kept = kept + 37; print('now', kept)")
        console.expect("now 42")
        console.expect(r"In \[\d+\]")
        console.sendline("exit(True)")
        console.expect("keeping kernel alive")
        console.expect(pexpect.EOF)
    with attach(sandbox) as console:
        console.expect(r"In \[\d+\]")
        console.sendline("print('still', kept)")
        console.expect("still 42")
        console.sendline("exit")
        console.expect(pexpect.EOF)
    wait_until(lambda: not engines.api.containers(f"{OWNER}={person}"), 20, "the sandbox's end")
