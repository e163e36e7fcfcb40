"""The tests of jupyter_client itself, of the installed version, with every kernel in a sandbox.

They come from its source distribution. Their kernels are started with the tests' own interpreter
and from their own packages, so the image has both at the same places.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.images import build_image
from tests.engines import Engines

LIBRARY = f"jupyter_client=={version('jupyter_client')}"
IMAGE = "sandbox-kernel-test/jupyter-client-suite:latest"

DOCKERFILE = """\
FROM sandbox-kernel/python:latest
USER root
RUN mkdir -p "{bin}" && ln -sf "$(command -v python3)" "{python}" \\
 && echo /opt/suite > "$(python3 -c 'import site; print(site.getsitepackages()[0])')/suite.pth"
COPY suite /opt/suite
USER 10001
"""

A_LOCAL_ONE = "asserts that the provisioner is the local one"
PRIVATE_SOCKETS = "the channels are sockets in a private folder, whatever transport was asked for"
SAID_AT_ONCE = "a kernel that cannot start is an error of the start, not a death after it"
EXPECTED = {
    A_LOCAL_ONE: [
        "provisioning.py::TestDiscovery::test_find_all_specs",
        "provisioning.py::TestRuntime::test_existing[no_provisioner]",
        "provisioning.py::TestRuntime::test_local_provisioner_pre_launch_generates_curve_keys_over_ipc",
        "provisioning.py::TestRuntime::test_local_provisioner_pre_launch_generates_curve_keys_under_"
        "transport_encryption",
    ],
    PRIVATE_SOCKETS: [
        f"multikernelmanager.py::{manager}::test_{transport}_cinfo"
        for manager in ("TestKernelManager", "TestAsyncKernelManager")
        for transport in ("ipc", "tcp")
    ],
    SAID_AT_ONCE: [
        f"restarter.py::{kind}_gives_up[{transport}]"
        for kind in ("test_restarter", "test_async_restarter")
        for transport in ("ipc", "tcp")
    ],
}
"""Tests that no provisioner but the local one can pass, or that ours means not to, and why."""

LEAST = {
    "provisioning": 9,
    "client": 27,
    "kernelmanager": 34,
    "multikernelmanager": 25,
    "restarter": 4,
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory, engines: Engines) -> Path:
    """The unpacked source distribution; the image with its kernels is on the engine."""
    folder = tmp_path_factory.mktemp("suite")
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:",
         "--dest", folder, LIBRARY],
        check=True, timeout=100,
    )  # fmt: skip
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    root = next(path for path in folder.iterdir() if path.is_dir())
    asyncio.run(provide_image(engines, image_files(root)))
    return root


async def provide_image(engines: Engines, files: dict[str, bytes]) -> None:
    async with Engine(engines.unix_endpoint) as engine:
        await build_image(engine, None, tag=IMAGE, extra_files=files)


def image_files(root: Path) -> dict[str, bytes]:
    """Return a Dockerfile and the kernels of the suite."""
    found = importlib.util.find_spec("pytest_jupyter.echo_kernel")
    assert found is not None
    assert found.origin is not None
    files = {
        f"suite/tests/{path.name}": path.read_bytes() for path in (root / "tests").glob("*.py")
    }
    files["suite/pytest_jupyter/__init__.py"] = b""
    files["suite/pytest_jupyter/echo_kernel.py"] = Path(found.origin).read_bytes()
    python = Path(sys.executable)
    dockerfile = DOCKERFILE.format(bin=python.parent, python=python)
    files["Dockerfile"] = dockerfile.encode()
    return files


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        "provisioning",
        pytest.param("client", marks=pytest.mark.slow),
        pytest.param("kernelmanager", marks=pytest.mark.slow),
        pytest.param("multikernelmanager", marks=pytest.mark.slow),
        pytest.param("restarter", marks=pytest.mark.slow),
    ],
)
def test_the_suite_of_jupyter_client_passes(
    name: str, suite: Path, engines: Engines, tmp_path: Path
) -> None:
    """K1: through our provisioner, but for what is listed above."""
    env = {
        **os.environ,
        "JUPYTER_DEFAULT_PROVISIONER_NAME": "sandbox-provisioner",
        "JUPYTER_CONFIG_DIR": str(tmp_path),
        "SANDBOX_DOCKER_HOST": engines.unix,
        "SANDBOX_DOCKER_IMAGE": IMAGE,
    }
    left_out = [f"--deselect=tests/test_{test}" for tests in EXPECTED.values() for test in tests]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:asyncio",
         "-p", "no:xdist", "-p", "no:cacheprovider", "-o", "addopts=", *left_out,
         f"tests/test_{name}.py"],
        cwd=suite, env=env, capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = int(done.stdout.rpartition(" passed")[0].split()[-1])
    assert passed >= LEAST[name]
