"""JupyterLab and Notebook in a real Chromium, with one server for a module.

The pictures that tests take are kept in the folder that ``SANDBOX_TEST_SCREENSHOTS`` names.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from sandbox_kernel.kernel.kernelspec import KernelRequest, install_kernelspec
from tests.engines import Engines, remove_leftovers
from tests.kernel.conftest import engine_config
from tests.process.private import free_port

OWNER_LABEL = "io.sandbox-kernel.owner"
TOKEN = "t"
PATIENCE = 60_000
"""Milliseconds; starting a kernel on a busy machine is what takes long."""

SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # Every cell is in the page, whether it can be seen or not.
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
}

expect.set_options(timeout=PATIENCE)


class Desk:
    """A server, its folder, and a page of a browser."""

    def __init__(self, url: str, root: Path, page: Page, process: subprocess.Popen[bytes]) -> None:
        self.url, self.root, self.page, self.process = url, root, page, process

    def open(self, place: str) -> None:
        self.page.goto(f"{self.url}{place}{'&' if '?' in place else '?'}token={TOKEN}")

    def picture(self, name: str) -> None:
        folder = os.environ.get("SANDBOX_TEST_SCREENSHOTS")
        if folder:
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"))


@pytest.fixture(scope="module")
def chromium() -> str:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.fail("The tests in a browser need one (Debian: apt-get install chromium)")
    return program


@pytest.fixture(scope="module")
def desk(
    engines: Engines, chromium: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Desk]:
    """A server with the sandboxed kernel and the local one, and a page."""
    home = tmp_path_factory.mktemp("lab")
    root = home / "root"
    root.mkdir()
    for name, config in (
        ("sandbox-python", engine_config(engines.unix_endpoint)),
        ("sandbox-missing", {**engine_config(engines.unix_endpoint), "image": "no/such:image"}),
    ):
        title = "Python 3 (sandbox)" if name == "sandbox-python" else "Missing (sandbox)"
        install_kernelspec(
            KernelRequest(name=name, display_name=title, config=config), prefix=str(home / "prefix")
        )
    for plugin, settings in SETTINGS.items():
        path = home / "settings" / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
    owner = f"browser-{uuid.uuid4().hex}"
    env = {
        **os.environ,
        "HOME": str(home),
        "JUPYTER_PATH": str(home / "prefix" / "share" / "jupyter"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "IPYTHONDIR": str(home / "ipython"),
        "JUPYTERHUB_USER": owner,
        "SANDBOX_DOCKER_HOST": engines.unix,
    }
    port = free_port()
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += [f"--ServerApp.root_dir={root}", f"--ServerApp.port={port}", "--ip=127.0.0.1"]
    command += [
        f"--IdentityProvider.token={TOKEN}",
        "--LabApp.news_url=",
        "--ServerApp.port_retries=0",
    ]
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, cwd=root, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}/"
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}api/status?token={TOKEN}", timeout=5).close()
                break
            assert process.poll() is None, (home / "server.log").read_text()[-2000:]
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.2)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            try:
                page = browser.new_page(viewport={"width": 1200, "height": 900})
                page.set_default_timeout(PATIENCE)
                yield Desk(url, root, page, process)
            finally:
                browser.close()
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        remove_leftovers(engines, f"{OWNER_LABEL}={owner}")
