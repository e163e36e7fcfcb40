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


def bridges() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


@pytest.mark.skipif(os.geteuid() != 0, reason="starting an engine needs root")
def test_an_engine_comes_and_goes(state: Path) -> None:
    """E2: a second engine beside the first, on both listeners; start twice, purge."""
    before = bridges()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--state-dir", str(state), "--port", str(port))
    first = script("start", *options)
    assert first.returncode == 0, first.stderr
    pid = (state / "docker.pid").read_text()
    again = script("start", *options)
    told = script("env", "--state-dir", str(state))
    assert again.stdout == told.stdout == first.stdout
    assert (state / "docker.pid").read_text() == pid
    assert f"SANDBOX_TEST_ENGINE_TLS=tcp://127.0.0.1:{port}" in first.stdout
    assert "docker0" not in before or "docker0" in bridges()
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
    assert not Path(f"/proc/{pid.strip()}").exists()
    assert bridges() == before


@pytest.mark.parametrize("arguments", [(), ("begin",), ("start", "--fast")])
def test_wrong_use_is_refused(arguments: tuple[str, ...]) -> None:
    """E2: with a text, and nothing started."""
    result = script(*arguments)
    assert result.returncode != 0
    assert result.stderr
