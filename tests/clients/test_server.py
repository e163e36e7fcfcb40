"""Programs that serve kernels to others: jupyter_server, the kernel gateway, `jupyter run` (K1)."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import websocket

from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.kernel.record import records
from sandbox_kernel.sandbox.labels import OWNER
from tests.engines import Engines, remove_leftovers, wait_until
from tests.process.private import free_port

pytestmark = pytest.mark.timeout(300)
BIN = Path(sys.executable).parent
AUTHORIZED = {"Authorization": "token t", "Content-Type": "application/json"}
CHILDREN = """
import json, pathlib
lines = [p.read_bytes() for p in pathlib.Path('/proc').glob('[0-9]*/cmdline')]
asleep = sum(b'sleep' in line and b'7321' in line for line in lines)
print(json.dumps([asleep, 'kept' in globals()]))
"""


@pytest.fixture
def endpoint(engines: Engines) -> Endpoint:
    """One way to the engine: here it makes no difference."""
    return engines.unix_endpoint


@pytest.fixture
def person(engines: Engines, kernel_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Whose kernels they are, of whom nothing else is on the engine."""
    name = f"server-{uuid.uuid4().hex}"
    monkeypatch.setenv("JUPYTERHUB_USER", name)
    yield name
    remove_leftovers(engines, f"{OWNER}={name}")


@dataclass
class Server:
    """A server of kernels, as its clients see it."""

    url: str
    process: subprocess.Popen[bytes]

    def ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, AUTHORIZED, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            text = response.read()
        return json.loads(text) if text else None

    def kernels(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("GET", "api/kernels")
        return found

    @contextlib.contextmanager
    def channels(self, kernel_id: str) -> Iterator[Channels]:
        url = f"{self.url.replace('http', 'ws', 1)}api/kernels/{kernel_id}/channels"
        connection = websocket.create_connection(url, timeout=60, header=["Authorization: token t"])
        try:
            yield Channels(connection)
        finally:
            connection.close()


class Channels:
    """A kernel's channels over one websocket, in the protocol that every server speaks."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def send(self, kind: str, **content: Any) -> str:
        message_id = uuid.uuid4().hex
        header = {"msg_id": message_id, "msg_type": kind, "session": "s", "username": "u",
                  "version": "5.3", "date": "2020-01-01T00:00:00Z"}  # fmt: skip
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content,
                   "buffers": [], "channel": "shell"}  # fmt: skip
        self._connection.send(json.dumps(message))
        return message_id

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            message: dict[str, Any] = json.loads(self._connection.recv())
            if wanted(message):
                return message

    def ready(self) -> None:
        """Ask until a kernel answers that is being started again; what came too early is lost."""
        self._connection.settimeout(2)
        for _ in range(30):
            request = self.send("kernel_info_request")
            with contextlib.suppress(websocket.WebSocketTimeoutException):
                self.reply(request)
                break
        self._connection.settimeout(60)

    def execute(self, code: str) -> str:
        return self.send("execute_request", code=code, silent=False, store_history=True)

    def reply(self, request: str) -> dict[str, Any]:
        found = self.until(lambda m: m["channel"] == "shell" and _answers(m, request))
        return found["content"]  # type: ignore[no-any-return]

    def printed(self, request: str) -> str:
        found = self.until(lambda m: m["msg_type"] == "stream" and _answers(m, request))
        return found["content"]["text"]  # type: ignore[no-any-return]


def _answers(message: dict[str, Any], request: str) -> bool:
    return bool(message["parent_header"].get("msg_id") == request)


@contextlib.contextmanager
def serving(folder: Path, *words: str) -> Iterator[Server]:
    """Run a program that serves kernels, and end it as an administrator does."""
    path = folder / f"{words[0]}.log"
    with path.open("w") as log:
        process = subprocess.Popen([BIN / "jupyter", *words], stderr=log, stdout=log, cwd=folder)
    try:

        def address() -> str | None:
            found = re.search(r"http://127\.0\.0\.1:\d+", path.read_text())
            # It is logged a moment before the server listens.
            with contextlib.suppress(urllib.error.URLError):
                if found is not None:
                    asked = urllib.request.Request(f"{found[0]}/api", headers=AUTHORIZED)
                    urllib.request.urlopen(asked, timeout=10).close()
                    return f"{found[0]}/"
            return None

        yield Server(wait_until(address, 60, "the server"), process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) is not None
    finally:
        process.kill()
        process.wait()


def test_a_server_runs_interrupts_restarts_revives_and_culls_kernels(
    kernel_name: str, person: str, tmp_path: Path, engines: Engines
) -> None:
    """K1, K3, K4: over its REST and websocket API; a culled kernel leaves nothing."""
    with serving(
        tmp_path, "server", "--allow-root", "--no-browser", "--port=0",
        "--IdentityProvider.token=t", f"--ServerApp.root_dir={tmp_path}",
        "--MappingKernelManager.cull_idle_timeout=2", "--MappingKernelManager.cull_interval=1",
    ) as server:  # fmt: skip
        session = server.ask("POST", "api/sessions", {"kernel": {"name": kernel_name},
            "path": "book.ipynb", "name": "book.ipynb", "type": "notebook"})  # fmt: skip
        kernel_id = session["kernel"]["id"]
        with server.channels(kernel_id) as channels:
            started = channels.execute(
                "import subprocess, time\nkept = subprocess.Popen(['setsid', 'sleep', '7321'])\n"
                "print('up', flush=True)\ntime.sleep(600)"
            )
            assert channels.printed(started) == "up\n"
            server.ask("POST", f"api/kernels/{kernel_id}/interrupt")
            assert channels.reply(started)["ename"] == "KeyboardInterrupt"
            assert json.loads(channels.printed(channels.execute(CHILDREN))) == [1, True]
            server.ask("POST", f"api/kernels/{kernel_id}/restart")
            assert json.loads(channels.printed(channels.execute(CHILDREN))) == [0, False]
            # Revived by the server, which looks every 3 s; the cell tells why it died.
            died = channels.execute("import os; os._exit(3)")
            assert "The kernel ended with exit code 3." in channels.printed(died)
            channels.until(lambda m: m["content"].get("execution_state") == "restarting")
            channels.ready()
            assert json.loads(channels.printed(channels.execute(CHILDREN))) == [0, False]
        assert len(engines.api.containers(f"{OWNER}={person}")) == 1
        wait_until(lambda: not server.kernels(), 60, "the culling")
        wait_until(lambda: not engines.api.containers(f"{OWNER}={person}"), 20, "the sandbox's end")
        assert records() == []
        assert [p for p in (tmp_path / "runtime").rglob("*") if "kernel-" in p.name] == []
        left = server.ask("POST", "api/kernels", {"name": kernel_name})
        assert server.kernels()[0]["id"] == left["id"]
    # The end of the server is that of its kernels.
    wait_until(lambda: not engines.api.containers(f"{OWNER}={person}"), 20, "the sandbox's end")


@pytest.mark.slow
def test_a_kernel_gateway_serves_kernels(
    kernel_name: str, person: str, tmp_path: Path, engines: Engines
) -> None:
    """K1: with kernels that it starts on request and deletes."""
    pytest.importorskip("kernel_gateway")
    with serving(
        tmp_path, "kernelgateway", f"--KernelGatewayApp.port={free_port()}",
        "--KernelGatewayApp.ip=127.0.0.1",
        "--KernelGatewayApp.auth_token=t", f"--KernelGatewayApp.default_kernel_name={kernel_name}",
        "--JupyterApp.answer_yes=True",
    ) as server:  # fmt: skip
        kernel = server.ask("POST", "api/kernels", {"name": kernel_name})
        with server.channels(kernel["id"]) as channels:
            assert channels.printed(channels.execute("import os; print(os.getuid())")) == "10001\n"
        assert engines.api.containers(f"{OWNER}={person}")
        server.ask("DELETE", f"api/kernels/{kernel['id']}")
        assert engines.api.containers(f"{OWNER}={person}") == []


@pytest.mark.slow
def test_jupyter_run_runs_a_file(
    kernel_name: str, person: str, tmp_path: Path, engines: Engines
) -> None:
    """K1: with the blocking manager; nothing is left."""
    script = tmp_path / "script.py"
    script.write_text("import os\nprint('uid', os.getuid())\n")
    done = subprocess.run(
        [BIN / "jupyter", "run", f"--kernel={kernel_name}", script],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "uid 10001" in done.stdout, done.stderr
    wait_until(lambda: not engines.api.containers(f"{OWNER}={person}"), 20, "the sandbox's end")
