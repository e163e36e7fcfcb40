"""Fixtures of the kernel's tests: managers whose kernelspec is made for one test."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager

from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.kernel.kernelspec import COMMAND, PROVISIONER
from tests.engines import Engines

MakeManager = Callable[..., AsyncKernelManager]


def engine_config(endpoint: Endpoint) -> dict[str, str]:
    """Return the provisioner's settings for an engine."""
    config = {"host": endpoint.url}
    if endpoint.tls is not None:
        config["tls_cert_path"] = str(endpoint.tls.cert)
        config["tls_key_path"] = str(endpoint.tls.key)
        config["tls_ca_path"] = str(endpoint.tls.ca)
    return config


def sandbox_spec(endpoint: Endpoint, argv: list[str] | None = None, **config: Any) -> KernelSpec:
    """Return a kernelspec as `jupyter sandbox install` writes it, with more settings."""
    return KernelSpec(
        argv=list(argv or COMMAND),
        display_name="test",
        language="python",
        interrupt_mode="message",
        metadata={
            "supported_encryption": ["curve"],
            "kernel_provisioner": {
                "provisioner_name": PROVISIONER,
                "config": {**engine_config(endpoint), **config},
            },
        },
    )


@pytest.fixture
async def make_manager(endpoint: Endpoint) -> AsyncIterator[MakeManager]:
    """Make kernel managers; what they started is shut down at the end."""
    made: list[AsyncKernelManager] = []

    def make(argv: list[str] | None = None, **config: Any) -> AsyncKernelManager:
        manager = AsyncKernelManager(kernel_id=uuid.uuid4().hex)
        manager._kernel_spec = sandbox_spec(endpoint, argv, **config)
        made.append(manager)
        return manager

    yield make
    for manager in made:
        if manager.has_kernel:
            await manager.shutdown_kernel(now=True)


async def connect(manager: AsyncKernelManager) -> AsyncKernelClient:
    """Return a client of a started kernel that is ready."""
    client: AsyncKernelClient = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=60)
    return client


async def evaluate(client: AsyncKernelClient, code: str) -> Any:
    """Run code that ends by printing JSON, and return what it printed."""
    printed: list[str] = []

    def hook(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])

    reply = await client.execute_interactive(code, output_hook=hook, timeout=60)
    assert reply["content"]["status"] == "ok", reply["content"]
    return json.loads("".join(printed) or "null")


def containers_of(engines: Engines, manager: AsyncKernelManager) -> list[dict[str, Any]]:
    """Return the containers of a manager's kernel, running or not."""
    return engines.api.containers(f"io.sandbox-kernel.kernel={manager.kernel_id}")
