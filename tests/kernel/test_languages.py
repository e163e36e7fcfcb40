"""Kernels whose language is not Python (K2): any command, TCP only, interrupted by signals."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager

from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.kernel.kernelspec import R_COMMAND
from tests.engines import Engines
from tests.kernel.conftest import MakeManager, connect, containers_of

SHELL_KERNEL = """
import signal, subprocess, sys
from ipykernel.kernelapp import IPKernelApp
from ipykernel.kernelbase import Kernel

class Shell(Kernel):
    implementation, implementation_version, banner = "shell", "1", ""
    language_info = {"name": "sh", "mimetype": "text/x-sh", "file_extension": ".sh"}

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.bash = subprocess.Popen(
            ["bash"], stdin=-1, stdout=-1, stderr=-2, text=True, bufsize=1,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def do_execute(self, code, silent, *rest, **more):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.bash.stdin.write("trap 'echo interrupted' INT\\n" + code + "\\necho end-of-cell\\n")
        for line in self.bash.stdout:
            if line == "end-of-cell\\n":
                break
            self.send_response(self.iopub_socket, "stream", {"name": "stdout", "text": line})
        return {"status": "ok", "execution_count": self.execution_count,
                "payload": [], "user_expressions": {}}

IPKernelApp.launch_instance(kernel_class=Shell, argv=["-f", sys.argv[1]])
"""
"""A kernel for bash: cells run in one shell, and an interrupt reaches it as a signal."""


@pytest.fixture
def endpoint(engines: Engines) -> Endpoint:
    """One way to the engine: here it makes no difference."""
    return engines.unix_endpoint


async def text_of(
    client: AsyncKernelClient, code: str, manager: AsyncKernelManager | None = None
) -> str:
    """Run a cell and return what it shows; with a manager, interrupt it when it shows anything."""
    shown: list[str] = []
    interrupts: list[asyncio.Task[Any]] = []

    def hook(message: dict[str, Any]) -> None:
        content = message["content"]
        if message["msg_type"] == "stream":
            shown.append(content["text"])
            if manager is not None and not interrupts:
                interrupts.append(asyncio.ensure_future(manager.interrupt_kernel()))
        elif message["msg_type"] in ("execute_result", "display_data"):
            shown.append(content["data"]["text/plain"])

    await client.execute_interactive(code, output_hook=hook, timeout=60)
    await asyncio.gather(*interrupts)
    return "".join(shown)


async def live(
    manager: AsyncKernelManager, assign: str, show: str, endless: str, engines: Engines
) -> None:
    """Start, run, interrupt by a signal, restart and shut down."""
    await manager.start_kernel()
    client = await connect(manager)
    assert "41" not in await text_of(client, assign)
    assert "41" in await text_of(client, show)
    assert "begun" in await text_of(client, endless, manager)
    assert "41" in await text_of(client, show)
    await manager.restart_kernel()
    await client.wait_for_ready(timeout=60)
    assert "41" not in await text_of(client, show)
    client.stop_channels()
    await manager.shutdown_kernel()
    assert not containers_of(engines, manager)


async def test_a_shell_kernel_lives_by_its_own_command_and_by_signals(
    make_manager: MakeManager, engines: Engines
) -> None:
    """K2, K3: another language, no interrupt messages, no encryption, a command of its own."""
    manager = make_manager(["python3", "-c", SHELL_KERNEL, "{connection_file}"])
    in_signal_mode(manager, "sh")
    await live(
        manager, "x=41", 'echo "x is $x"', "echo begun; while :; do sleep 60; done & wait", engines
    )


def in_signal_mode(manager: AsyncKernelManager, language: str) -> None:
    """Make the kernelspec what ``jupyter sandbox install --argv`` writes."""
    spec = manager.kernel_spec
    assert spec is not None
    spec.language, spec.interrupt_mode = language, "signal"
    del spec.metadata["supported_encryption"]


@pytest.fixture
async def r_image(engines: Engines) -> str:
    """The image for R, built by the command that people use."""
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("jupyter-sandbox"), "build", "--language", "r",
        "--if-changed", "--engine", engines.unix, "--network-host",
        "--base-image", os.environ.get("BASE_IMAGE", "sandbox-kernel/base:bookworm"),
    )  # fmt: skip
    assert await process.wait() == 0
    return "sandbox-kernel/r:latest"


@pytest.mark.slow
async def test_an_r_kernel_starts_computes_stops_and_restarts(
    make_manager: MakeManager, engines: Engines, r_image: str
) -> None:
    """K2, K3: IRkernel of the distribution, which takes signals only."""
    manager = make_manager(list(R_COMMAND), image=r_image)
    in_signal_mode(manager, "R")
    await live(
        manager,
        "x <- 41",
        "if (exists('x')) x else 'gone'",
        "cat('begun\\n'); flush.console(); repeat Sys.sleep(0.1)",
        engines,
    )
