"""An engine whose disk is full: a second test engine with its data in a small tmpfs."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_client.manager import AsyncKernelManager

from sandbox_kernel.kernel.launch_error import KernelLaunchError
from tests.engines import Engines, provide_busybox
from tests.kernel.conftest import containers_of, sandbox_spec

ROOT = Path(__file__).parents[2]
SIZE = "48m"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def small_engine() -> Iterator[Engines]:
    """An engine of its own whose disk is a tmpfs of 48 MiB."""
    # Short: the engine's sockets lie in it.
    state = Path(tempfile.mkdtemp(prefix="sbxfull-"))
    script = [str(ROOT / "scripts" / "test-engine")]
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", state], check=True)
    try:
        started = subprocess.run(
            [*script, "start", "--state-dir", str(state), "--port", str(free_port())],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        values = dict(re.findall(r"export SANDBOX_TEST_ENGINE_(\w+)=(\S+)", started.stdout))
        yield Engines(values["UNIX"], values["TLS"], Path(values["CERTS"]))
    finally:
        subprocess.run([*script, "stop", "--state-dir", str(state)], check=False, timeout=60)
        subprocess.run(["umount", "--lazy", state], check=True)
        shutil.rmtree(state)


def fill(file: Path) -> None:
    subprocess.run(["dd", "if=/dev/zero", f"of={file}", "bs=64k"], check=False)


async def test_a_full_disk_is_said_once_and_leaves_nothing(small_engine: Engines) -> None:
    """K8: the person reads that the engine's disk is full, not a path of the engine's."""
    image = provide_busybox(small_engine)
    manager = AsyncKernelManager(kernel_id="full-disk")
    manager._kernel_spec = sandbox_spec(small_engine.unix_endpoint, image=image)
    filler = small_engine.certs.parent / "filler"
    fill(filler)
    with pytest.raises(KernelLaunchError, match=r"disk.*full") as caught:
        await manager.start_kernel()
    assert str(small_engine.certs.parent) not in str(caught.value)
    assert containers_of(small_engine, manager) == []
    filler.unlink()
    # With room again it goes on, to the next thing that is wrong: the image has no Python.
    with pytest.raises(KernelLaunchError, match="no python3"):
        await manager.start_kernel()
    assert containers_of(small_engine, manager) == []
