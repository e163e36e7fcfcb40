"""The script that starts the tests' engine: safe to run twice, and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_kernel.engine.endpoint import Endpoint, TlsFiles
from sandbox_kernel.engine.probe import probe
from tests.engines import wait_until

SCRIPT = Path(__file__).parents[2] / "scripts/test-engine"


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, timeout=90, check=False
    )


@pytest.fixture
def state() -> Iterator[Path]:
    """A folder with a short path, since a socket goes into it."""
    folder = Path(tempfile.mkdtemp(prefix="sbxt"))
    yield folder / "state"
    script("stop", "--state-dir", str(folder / "state"), "--purge")
    shutil.rmtree(folder, ignore_errors=True)


def has_link(name: str) -> bool:
    return Path("/sys/class/net", name).exists()


def bridge_of(pid: str) -> str:
    """Return the name of the bridge that an engine was started with."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return words[words.index("--bridge") + 1]


@pytest.mark.skipif(os.geteuid() != 0, reason="starting an engine needs root")
def test_an_engine_comes_and_goes(state: Path) -> None:
    """E2: a second engine beside the first, on both listeners; start twice, purge."""
    default_bridge = has_link("docker0")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--state-dir", str(state), "--port", str(port))
    first = script("start", *options)
    assert first.returncode == 0, first.stderr
    pid = (state / "docker.pid").read_text().strip()
    bridge = bridge_of(pid)
    assert has_link(bridge)
    again = script("start", *options)
    told = script("env", "--state-dir", str(state))
    assert again.stdout == told.stdout == first.stdout
    assert (state / "docker.pid").read_text().strip() == pid
    assert f"SANDBOX_TEST_ENGINE_TLS=tcp://127.0.0.1:{port}" in first.stdout
    for endpoint in (
        Endpoint(f"unix://{state}/docker.sock"),
        Endpoint(f"https://127.0.0.1:{port}", TlsFiles.in_directory(state / "certs")),
    ):
        assert asyncio.run(probe(endpoint)).product == "Docker"
    assert script("stop", "--state-dir", str(state)).returncode == 0
    assert (state / "data").is_dir()
    assert script("env", "--state-dir", str(state)).returncode == 1
    assert script("stop", "--state-dir", str(state), "--purge").returncode == 0
    assert not state.exists()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 30, "the end of the engine")
    assert not has_link(bridge)
    assert has_link("docker0") or not default_bridge


@pytest.mark.parametrize("arguments", [(), ("begin",), ("start", "--fast")])
def test_wrong_use_is_refused(arguments: tuple[str, ...]) -> None:
    """E2: with a text, and nothing started."""
    result = script(*arguments)
    assert result.returncode != 0
    assert result.stderr
