"""The probe: a usable engine is described, and each cause of trouble told apart."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from sandbox_kernel.engine.endpoint import Endpoint, TlsFiles
from sandbox_kernel.engine.probe import probe, report
from sandbox_kernel.errors import SandboxUnavailableError
from tests.engines import Engines, FaultProxy

BOUND = 0.7


async def refusal(endpoint: Endpoint, timeout: float = 5.0) -> SandboxUnavailableError:
    began = time.monotonic()
    with pytest.raises(SandboxUnavailableError) as caught:
        await probe(endpoint, timeout)
    assert time.monotonic() - began < timeout + 1
    assert caught.value.remedy
    assert endpoint.url in str(caught.value)
    return caught.value


async def test_a_usable_engine_is_described(endpoint: Endpoint, engines: Engines) -> None:
    """E7: versions, limits, runtimes, security options, over either road alike."""
    found = await probe(endpoint)
    info = engines.api.get("/info")
    assert found.endpoint == endpoint
    assert found.product == "Docker"
    assert found.version == info["ServerVersion"]
    assert (found.cpus, found.memory) == (info["NCPU"], info["MemTotal"])
    assert "runc" in found.runtimes
    assert found.seccomp
    assert not found.rootless
    assert found.unenforced_limits == ()


def test_limits_without_effect_are_named(engine_unix: Endpoint) -> None:
    """E7, B5: a rootless engine on cgroup v1 claims limits that it does not enforce."""
    info = {
        "CgroupDriver": "none",
        "MemoryLimit": True,
        "SecurityOptions": ["name=seccomp,profile=default", "name=rootless"],
    }
    found = report(engine_unix, "1.41", {"Components": [{"Name": "Podman Engine"}]}, info)
    assert found.unenforced_limits == ("memory", "swap", "cpu", "pids")
    assert (found.rootless, found.userns, found.product) == (True, False, "Podman")
    info = {"CgroupDriver": "cgroupfs", "MemoryLimit": True, "SwapLimit": False}
    assert report(engine_unix, "1.41", {}, info).unenforced_limits == ("swap",)


async def test_no_socket(tmp_path: Path) -> None:
    """E4: nothing there, or something that is no socket."""
    plain = tmp_path / "plain"
    plain.write_text("")
    for path in (tmp_path / "nothing", plain, tmp_path, plain / "below"):
        error = await refusal(Endpoint(f"unix://{path}"))
        assert error.kind == "no-socket"
        assert "SANDBOX_DOCKER_HOST" in error.remedy


async def test_refused(tmp_path: Path) -> None:
    """E4: a socket or port without anybody behind it, or a name without an address."""
    with socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind(str(tmp_path / "s"))
    for url in (f"unix://{tmp_path / 's'}", "http://127.0.0.1:1", "http://no-such-host.invalid:1"):
        assert (await refusal(Endpoint(url))).kind == "refused"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a socket of another user")
async def test_permission_denied(engine_unix: Endpoint, engines: Engines) -> None:
    """E4: the remedy is the socket's group."""
    await probe(engine_unix)  # everything is imported before the rights go
    os.seteuid(65534)
    try:
        error = await refusal(engine_unix)
    finally:
        os.seteuid(0)
    assert error.kind == "permission-denied"
    assert "usermod -aG docker" in error.remedy


def spoilt(engines: Engines, name: str) -> TlsFiles:
    good = TlsFiles.in_directory(engines.certs)
    return TlsFiles(engines.certs / f"{name}-cert.pem", engines.certs / f"{name}-key.pem", good.ca)


async def test_an_engine_of_another_authority(engines: Engines) -> None:
    """E4: the certificate is not signed by whom we trust."""
    good = TlsFiles.in_directory(engines.certs)
    other = TlsFiles(good.cert, good.key, engines.certs / "other-ca.pem")
    error = await refusal(Endpoint(engines.tls_endpoint.url, other))
    assert error.kind == "tls"
    assert "authority did not sign" in str(error)


async def test_an_engine_under_another_name(engines: Engines) -> None:
    """E2, E4: the host name is checked."""
    url = engines.tls_endpoint.url.replace("127.0.0.1", "127.0.0.2")
    error = await refusal(Endpoint(url, TlsFiles.in_directory(engines.certs)))
    assert error.kind == "tls"
    assert "another host name" in str(error)


@pytest.mark.parametrize("name", ["rogue", "expired-client"])
async def test_a_client_that_the_engine_refuses(engines: Engines, name: str) -> None:
    """E4: each time, although the reset of the connection can overtake the alert."""
    for _ in range(5):
        error = await refusal(Endpoint(engines.tls_endpoint.url, spoilt(engines, name)))
        assert error.kind == "tls"
        assert "refuses the client's certificate" in str(error)


async def test_plain_text_to_a_tls_port(engines: Engines) -> None:
    """E4: told by the engine's own answer."""
    error = await refusal(Endpoint(engines.tls_endpoint.url.replace("https", "http")))
    assert error.kind == "tls"
    assert "speaks only TLS" in str(error)


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]


@contextlib.asynccontextmanager
async def fake(
    answer: bytes | None, *, end: bool = True, context: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """A server that gives one fixed answer.

    A real engine cannot be made to answer like this: a web page, half an answer, silence, an
    old version, an expired certificate.
    """
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            await reader.readuntil(b"\r\n\r\n")
            if answer is not None:
                writer.write(answer)
                await writer.drain()
            if answer is None or not end:
                await over.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        over.set()
        server.close()


def http(body: bytes, kind: str = "application/json", status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize(
    "answer",
    [
        http(b"<html>hello</html>", "text/html"),
        http(b"<html>who?</html>", "text/html", "404 Not Found"),
        http(b"{}"),
        http(b"[]"),
        http(b'{"ApiVersion": "x"}'),
        http(b"\xff\xfe"),
        http(b'{"message": "no"}', status="403 Forbidden"),
        http(b'{"ApiVersion": "1.41"}')[:-9],
        b"HTTP/1.1 200 OK\r\nConte",
        b"SSH-2.0-OpenSSH\r\n",
        b"\0\1\2\3",
        b"",
    ],
)
async def test_something_that_is_not_an_engine(answer: bytes) -> None:
    """E4: a web server, half an answer, another protocol, a hang-up."""
    async with fake(answer) as address:
        assert (await refusal(Endpoint(f"http://{address}"))).kind == "not-docker"


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 200 OK\r\nConte"])
async def test_something_that_stays_silent(answer: bytes | None, engines: Engines) -> None:
    """E4: accepted, and then nothing, or nothing more; in plain and within a TLS handshake."""
    async with fake(answer, end=False) as address:
        assert (await refusal(Endpoint(f"http://{address}"), BOUND)).kind == "silent"
    async with fake(None) as address:
        secure = Endpoint(f"https://{address}", TlsFiles.in_directory(engines.certs))
        # The fake never reads a TLS greeting as the end of a request.
        assert (await refusal(secure, BOUND)).kind == "silent"


async def test_an_engine_that_falls_silent_after_its_version(proxy: FaultProxy) -> None:
    """E4: the bound is one for the whole probe."""
    asyncio.get_running_loop().call_later(0.001, proxy.freeze)
    assert (await refusal(proxy.endpoint, BOUND)).kind == "silent"


async def test_an_engine_that_is_too_old() -> None:
    """E4: the version found and the one needed are named."""
    async with fake(http(b'{"ApiVersion": "1.40", "MinAPIVersion": "1.12"}')) as address:
        error = await refusal(Endpoint(f"http://{address}"))
    assert error.kind == "api-too-old"
    assert "1.40" in str(error)
    assert "1.41" in str(error)


async def test_an_engine_whose_certificate_has_expired(engines: Engines) -> None:
    """E4: told apart from an authority that is not trusted."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(
        engines.certs / "expired-server-cert.pem", engines.certs / "expired-server-key.pem"
    )
    async with fake(http(b"{}"), context=context) as address:
        error = await refusal(Endpoint(f"https://{address}", TlsFiles.in_directory(engines.certs)))
    assert error.kind == "tls"
    assert "has expired" in str(error)


async def test_tls_to_a_plain_text_port(engines: Engines) -> None:
    """E4: the other mix-up, told by what answers instead of a handshake."""
    serve = b"HTTP/1.1 400 Bad Request\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(serve)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        files = TlsFiles.in_directory(engines.certs)
        error = await refusal(Endpoint(f"https://127.0.0.1:{port}", files))
    assert error.kind == "tls"
    assert "plain text" in str(error)
