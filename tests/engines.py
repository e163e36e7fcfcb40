"""The real Docker engine that the tests run on, and a small blocking client of its API.

The engine is started by ``scripts/test-engine``; all tests of a run share it. The client is
kept apart from the product on purpose, so that a test can look at the engine with other eyes.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import http.client
import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from sandbox_kernel.engine.endpoint import Endpoint, TlsFiles

VERSION_LABEL = "io.sandbox-kernel.version"
RUN_LABEL = "io.sandbox-kernel.test-run"
MISSING = (
    "The tests need a Docker engine of their own, and none was found. "
    "Start it with: scripts/test-engine start"
)


class MissingEngineError(Exception):
    """There is no test engine."""


@dataclass(frozen=True)
class Engines:
    """One engine, two ways to reach it."""

    unix: str
    tls: str
    certs: Path

    @property
    def socket(self) -> str:
        return self.unix.removeprefix("unix://")

    @property
    def unix_endpoint(self) -> Endpoint:
        return Endpoint(self.unix, None, "the test engine")

    @property
    def tls_endpoint(self) -> Endpoint:
        url = self.tls.replace("tcp://", "https://")
        return Endpoint(url, TlsFiles.in_directory(self.certs), "the test engine")

    @property
    def api(self) -> Api:
        return Api(self.socket)


def find_engines() -> Engines:
    """Find the engine by the variables that ``scripts/test-engine`` prints, or where it puts it."""
    unix = os.environ.get("SANDBOX_TEST_ENGINE_UNIX")
    tls = os.environ.get("SANDBOX_TEST_ENGINE_TLS")
    certs = os.environ.get("SANDBOX_TEST_ENGINE_CERTS")
    if unix and tls and certs:
        found = Engines(unix, tls, Path(certs))
    else:
        base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"
        state = Path(base) / "sandbox-kernel-test-engine"
        try:
            port = (state / "port").read_text().strip()
        except OSError:
            raise MissingEngineError(MISSING) from None
        found = Engines(
            f"unix://{state / 'docker.sock'}", f"tcp://127.0.0.1:{port}", state / "certs"
        )
    try:
        found.api.get("/_ping")
    except OSError:
        raise MissingEngineError(MISSING) from None
    return found


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Api:
    """Blocking calls over the engine's Unix socket; an answer of 400 or more raises."""

    def __init__(self, path: str) -> None:
        self._path = path

    def request(
        self,
        method: str,
        path: str,
        params: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> bytes:
        if params:
            pairs = params.items() if isinstance(params, Mapping) else params
            text = [(k, v if isinstance(v, str) else json.dumps(v)) for k, v in pairs]
            path = f"{path}?{urlencode(text)}"
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = _UnixConnection(self._path)
        try:
            headers = {"Content-Type": content_type} if data is not None else {}
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        if response.status >= 400:
            raise LookupError(f"{method} {path}: {response.status} {answer[:500]!r}")
        return answer

    def get(self, path: str, **params: Any) -> Any:
        answer = self.request("GET", path, params)
        return json.loads(answer) if answer[:1] in {b"{", b"["} else answer.decode()

    def containers(self, *labels: str) -> list[dict[str, Any]]:
        return list(self.get("/containers/json", all=1, filters={"label": list(labels)}))

    def volumes(self, *labels: str) -> list[dict[str, Any]]:
        return list(self.get("/volumes", filters={"label": list(labels)})["Volumes"] or [])

    def inspect(self, container: str) -> dict[str, Any] | None:
        try:
            return dict(self.get(f"/containers/{container}/json"))
        except LookupError:
            return None

    def remove(self, container: str) -> None:
        """Remove a container, which may be ending or being removed at the moment."""
        deadline = time.monotonic() + 20
        while True:
            try:
                self.request("DELETE", f"/containers/{container}", {"force": 1, "v": 1})
                return
            except LookupError as error:
                if " 404 " in str(error):
                    return
                going_on = "in progress" in str(error) or "is not running" in str(error)
                if not going_on or time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def remove_volume(self, name: str) -> None:
        self.request("DELETE", f"/volumes/{quote(name)}")

    def image(self, ref: str) -> dict[str, Any] | None:
        try:
            return dict(self.get(f"/images/{ref}/json"))
        except LookupError:
            return None

    def remove_image(self, ref: str) -> None:
        try:
            self.request("DELETE", f"/images/{ref}", {"force": 1})
        except LookupError as error:
            if " 404 " not in str(error):
                raise

    def import_image(self, archive: bytes, ref: str, changes: Iterable[str] = ()) -> None:
        repo, _, tag = ref.rpartition(":")
        params = [("fromSrc", "-"), ("repo", repo), ("tag", tag)]
        params += [("changes", change) for change in changes]
        answer = self.request("POST", "/images/create", params, archive, "application/x-tar")
        if b'"error' in answer:
            raise LookupError(f"importing {ref}: {answer[-500:]!r}")


def wait_until(true: Any, within: float = 10.0, what: str = "the condition") -> Any:
    """Poll, bounded, until a function gives something true, and return that."""
    deadline = time.monotonic() + within
    while True:
        value = true()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {within:g} s")
        time.sleep(0.02)


def busybox_archive(extra: Mapping[str, bytes] | None = None) -> bytes:
    """Make a root filesystem of a static busybox, with the two users of a sandbox."""
    program = shutil.which("busybox")
    data = Path(program).read_bytes() if program else b""
    if program is None or b"ld-linux" in data[:4096]:
        raise MissingEngineError(
            "The tests need a static busybox (Debian: apt-get install busybox-static)"
        )
    passwd = (
        "root:x:0:0::/:/bin/sh\n"
        "sandbox:x:10001:10001::/workspace:/bin/sh\n"
        "control:x:10002:10002::/:/bin/sh\n"
    )
    files = {
        "bin/busybox": data,
        "etc/passwd": passwd.encode(),
        "etc/group": b"root:x:0:\nsandbox:x:10001:\ncontrol:x:10002:\n",
        **(extra or {}),
    }
    listed = subprocess.run([program, "--list"], capture_output=True, text=True, check=True)
    applets = [name for name in listed.stdout.split() if name != "busybox"]
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, mode, owner in (
            ("bin", 0o755, 0), ("dev", 0o755, 0), ("etc", 0o755, 0), ("proc", 0o755, 0),
            ("sys", 0o755, 0), ("tmp", 0o1777, 0), ("workspace", 0o755, 10001),
        ):  # fmt: skip
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, mode, owner, owner
            tar.addfile(entry)
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))
        for applet in applets:
            entry = tarfile.TarInfo(f"bin/{applet}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
    return archive.getvalue()


def provide_busybox(engines: Engines) -> str:
    """Put the busybox image on the engine, once for all workers of all runs."""
    archive = busybox_archive()
    ref = f"sandbox-kernel-test/busybox:{hashlib.sha256(archive).hexdigest()[:12]}"
    lock = Path(tempfile.gettempdir()) / f"sandbox-kernel-test-{os.getuid()}.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if engines.api.image(ref) is None:
            changes = ["ENV PATH=/bin", 'CMD ["/bin/sh"]']
            engines.api.import_image(archive, ref, changes)
    return ref


def leftovers(engines: Engines, *labels: str) -> list[str]:
    """Name the containers and volumes with these labels."""
    api = engines.api
    found = [
        f"container {c['Id'][:12]} {c['Names'][0]} ({c['State']})" for c in api.containers(*labels)
    ]
    return found + [f"volume {v['Name']}" for v in api.volumes(*labels)]


def remove_leftovers(engines: Engines, *labels: str) -> None:
    """Remove the containers and volumes with these labels."""
    for container in engines.api.containers(*labels):
        engines.api.remove(container["Id"])
    for volume in engines.api.volumes(*labels):
        engines.api.remove_volume(volume["Name"])


class FaultProxy:
    """A Unix socket in front of the engine whose connections a test can cut or freeze.

    The engine behind it is the real one; only the line breaks, which an engine that other
    tests use at the same time cannot be made to do.
    """

    def __init__(self, engines: Engines, path: Path) -> None:
        self._target = engines.socket
        self._path = path
        self._server: asyncio.Server | None = None
        self._lines: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(f"unix://{self._path}", None, "a fault proxy")

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, self._path)

    async def stop(self) -> None:
        """Refuse new connections and cut those that are open."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._path.unlink(missing_ok=True)
        lines = tuple(self._lines)
        self.cut()
        await asyncio.gather(*lines, return_exceptions=True)

    def freeze(self) -> None:
        """Pass nothing on any more, as a line does that went silent."""
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        for line in self._lines:
            line.cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = asyncio.create_task(self._pass_on(reader, writer))
        self._lines.add(line)
        line.add_done_callback(self._lines.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(self._target)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, far_writer))
                group.create_task(self._pump(far_reader, writer))
        finally:
            writer.transport.abort()
            far_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
            writer.write_eof()
