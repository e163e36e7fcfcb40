"""The programs that people run notebooks with, each as they run it (K1)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import nbformat
import pexpect
import pytest

from sandbox_kernel.sandbox.labels import OWNER
from tests.engines import Engines, wait_until

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

# Several programs, each with a start of its own, in some of the tests.
pytestmark = pytest.mark.timeout(300)


def run(*words: object, cwd: Path) -> str:
    """Run a program of this environment and return what it said."""
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def check_outputs(path: Path) -> None:
    """Check that the notebook's results are those of a sandbox, of every kind."""
    book: Any = nbformat.read(path, as_version=4)
    outputs = [cell.outputs for cell in book.cells if cell.cell_type == "code" and cell.outputs]
    assert outputs[0][0]["text"] == "uid 10001\n"
    assert outputs[1][0]["data"]["text/html"] == "<b>bold</b>"
    assert outputs[2][-1]["data"]["image/png"]
    assert "3" in outputs[3][0]["data"]["text/plain"]


def test_nbconvert_executes_a_notebook(notebook: Path) -> None:
    """K1: `jupyter nbconvert --execute`."""
    run(BIN / "jupyter", "nbconvert", "--to", "notebook", "--execute", "--output", "out.ipynb",
        notebook, cwd=notebook.parent)  # fmt: skip
    check_outputs(notebook.parent / "out.ipynb")
    assert not (notebook.parent / "x").exists()


def test_papermill_executes_a_notebook(notebook: Path, kernel_name: str) -> None:
    """K1: with its own way of naming the kernel."""
    out = notebook.parent / "out.ipynb"
    run(BIN / "papermill", "-k", kernel_name, "--no-progress-bar", notebook, out,
        cwd=notebook.parent)  # fmt: skip
    check_outputs(out)


def test_jupyter_execute_executes_a_notebook(notebook: Path) -> None:
    """K1: nbclient, from the command line."""
    run(BIN / "jupyter", "execute", "--inplace", notebook, cwd=notebook.parent)
    check_outputs(notebook)


def test_nbval_finds_the_stored_results_again(notebook: Path, kernel_name: str) -> None:
    """K1: with the blocking manager; also for the notebook that the project ships."""
    run(BIN / "jupyter", "execute", "--inplace", notebook, cwd=notebook.parent)
    tour = notebook.parent / "quickstart.ipynb"
    tour.write_bytes((ROOT / "notebooks" / "quickstart.ipynb").read_bytes())
    said = run(
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--nbval",
        "--nbval-kernel-name", kernel_name, "--nbval-cell-timeout", "60", notebook, tour,
        "-k", "not plot", "-c", os.devnull, "--rootdir", notebook.parent, cwd=notebook.parent,
    )  # fmt: skip
    assert re.search(r"[1-9]\d* passed", said)


def test_a_console_talks_to_the_kernel_and_leaves_nothing(
    kernel_name: str, tmp_path: Path, engines: Engines
) -> None:
    """K1, B13: it ends without any call to the provisioner."""
    owner = f"console-{uuid.uuid4().hex}"
    console = pexpect.spawn(
        str(BIN / "jupyter"),
        ["console", "--kernel", kernel_name, "--simple-prompt"],
        cwd=str(tmp_path),
        encoding="utf-8",
        timeout=60,
        env={**os.environ, "TERM": "dumb", "JUPYTERHUB_USER": owner},
    )
    try:
        console.expect(r"In \[1\]")
        console.sendline("import os; print('uid', os.getuid())")
        console.expect("uid 10001")
        console.sendline("name = input('who? ')")
        console.expect(r"who\? ")
        console.sendline("world")
        console.expect(r"In \[\d+\]")
        console.sendline("print('hello', name.upper())")
        console.expect("hello WORLD")
        console.sendline("import socket; print('host', socket.gethostname())")
        console.expect("host sandbox")
        assert engines.api.containers(f"{OWNER}={owner}")
        console.sendline("exit")
        console.expect(pexpect.EOF)
    finally:
        console.close(force=True)
    wait_until(
        lambda: not engines.api.containers(f"{OWNER}={owner}"),
        20,
        "the end of the console's sandbox",
    )


def test_a_server_says_why_a_kernel_cannot_start_and_still_ends(
    kernel_name: str, tmp_path: Path, engines: Engines
) -> None:
    """K8: the reason is in the answer, and one failed launch does not keep the server alive."""
    spec = next((tmp_path / "prefix").rglob("kernel.json"))
    document = json.loads(spec.read_text())
    document["metadata"]["kernel_provisioner"]["config"]["image"] = "sandbox-test/none"
    spec.write_text(json.dumps(document))
    log = (tmp_path / "server.log").open("w+")
    server = subprocess.Popen(
        [BIN / "jupyter", "server", "--allow-root", "--no-browser", "--port=0",
         "--IdentityProvider.token=t", f"--ServerApp.root_dir={tmp_path}"],
        stderr=log, cwd=tmp_path,
    )  # fmt: skip
    try:

        def address() -> str | None:
            found = re.search(r"http://127\.0\.0\.1:\d+/", (tmp_path / "server.log").read_text())
            if found is None:
                return None
            # It is logged a moment before the server listens.
            with contextlib.suppress(urllib.error.URLError):
                urllib.request.urlopen(f"{found[0]}api", timeout=10).close()
                return found[0]
            return None

        url = wait_until(address, 60, "the server")
        request = urllib.request.Request(
            f"{url}api/kernels",
            json.dumps({"name": kernel_name}).encode(),
            {"Authorization": "token t", "Content-Type": "application/json"},
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=60)
        said = json.load(caught.value)["message"]
        assert "sandbox-test/none" in said
        # JupyterLab's dialog cuts longer lines off.
        assert max(map(len, said.splitlines())) <= 100
        server.send_signal(signal.SIGTERM)
        assert server.wait(10) is not None
    finally:
        server.kill()
        server.wait()
        log.close()
