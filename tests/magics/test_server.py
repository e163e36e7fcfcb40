"""Through a real Jupyter server, which drops what is too fast: nothing of a cell's output is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from tornado.httpclient import HTTPRequest
from tornado.websocket import websocket_connect

from tests.engines import wait_until


class Server:
    """A Jupyter server with one session of one notebook."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self._headers = {"Authorization": f"token {token}", "Content-Type": "application/json"}

    def call(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, self._headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def is_up(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.call("/api/status"))
        return False

    def open(self, notebook: str) -> str:
        """Open a notebook as a front end does, and return its kernel's id."""
        body = {
            "path": notebook, "type": "notebook", "name": notebook, "kernel": {"name": "python3"}
        }  # fmt: skip
        return str(self.call("/api/sessions", body)["kernel"]["id"])

    async def run(self, kernel: str, *cells: str) -> list[dict[str, Any]]:
        """Run cells and return the messages of the last one."""
        session = uuid.uuid4().hex
        address = f"{self.url.replace('http', 'ws')}/api/kernels/{kernel}/channels"
        request = HTTPRequest(f"{address}?session_id={session}", headers=self._headers)
        socket_ = await websocket_connect(request, max_message_size=1 << 30)
        messages: list[dict[str, Any]] = []
        try:
            for cell in cells:
                messages.clear()
                header = {
                    "msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "session": session,
                    "username": "", "version": "5.3", "date": "",
                }  # fmt: skip
                content = {
                    "code": cell, "silent": False, "store_history": True, "user_expressions": {},
                    "allow_stdin": False, "stop_on_error": True,
                }  # fmt: skip
                message = {
                    "header": header, "parent_header": {}, "metadata": {}, "content": content,
                    "channel": "shell", "buffers": [],
                }  # fmt: skip
                await socket_.write_message(json.dumps(message))
                await self._until_idle(socket_, header["msg_id"], messages)
        finally:
            socket_.close()
        return messages

    async def _until_idle(self, socket_: Any, asked: str, messages: list[dict[str, Any]]) -> None:
        async with asyncio.timeout(90):
            while True:
                text = await socket_.read_message()
                assert text is not None, "the server closed the connection"
                message = json.loads(text)
                if message["parent_header"].get("msg_id") != asked:
                    continue
                messages.append(message)
                status = message["content"].get("execution_state")
                if message["msg_type"] == "status" and status == "idle":
                    return


@pytest.fixture
def server(kernel_env: dict[str, str], tmp_path: Path) -> Iterator[Server]:
    """A server as it is by default, limits included."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = uuid.uuid4().hex
    nbformat.write(nbformat.v4.new_notebook(), tmp_path / "book.ipynb")
    home = tmp_path / "home"
    home.mkdir()
    env = {**os.environ, **kernel_env, "JUPYTER_TOKEN": token, "HOME": str(home)}
    env["JUPYTER_RUNTIME_DIR"] = str(tmp_path / "runtime")
    command = [
        sys.executable, "-m", "jupyter_server", "--no-browser", f"--port={port}", "--allow-root",
        "--ServerApp.port_retries=0", f"--ServerApp.root_dir={tmp_path}",
    ]  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        made = Server(f"http://127.0.0.1:{port}", token)
        wait_until(made.is_up, 60, "the start of the server")
        yield made
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def shown(messages: list[dict[str, Any]], name: str) -> str:
    streams = [m["content"] for m in messages if m["msg_type"] == "stream"]
    return "".join(content["text"] for content in streams if content["name"] == name)


async def test_nothing_is_dropped_behind_a_server(server: Server) -> None:
    """Issue 6: 20,000 lines, and 3 MB of output beyond the server's own rate, arrive whole."""
    kernel = server.open("book.ipynb")
    many = await server.run(
        kernel, "%load_ext sandbox_magics", "%%sandbox\nfor i in $(seq 20000); do echo $i; done"
    )
    assert shown(many, "stdout") == "".join(f"{i}\n" for i in range(1, 20001))
    size = 3_000_000
    script = f"set +o pipefail; yes {'x' * 99} | head -n {size // 100}"
    much = await server.run(kernel, f"%%sandbox --display-limit 10M\n{script}")
    assert len(shown(much, "stdout")) == size
    assert "IOPub" not in shown(much, "stderr")
    again = await server.run(kernel, "%%sandbox\nseq 100000", "%%sandbox\nseq 100000")
    assert shown(again, "stdout") == "".join(f"{i}\n" for i in range(1, 100001))
