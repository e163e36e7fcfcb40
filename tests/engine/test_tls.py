"""Certificate files: what is refused before anything is dialled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from sandbox_kernel.engine.endpoint import Endpoint, TlsFiles
from sandbox_kernel.engine.probe import probe
from sandbox_kernel.engine.tls import client_context
from sandbox_kernel.errors import SandboxUnavailableError
from tests.engines import Engines


@pytest.fixture
def files(engines: Engines, tmp_path: Path) -> TlsFiles:
    """A copy of the test engine's client files that a test may spoil."""
    made = TlsFiles.in_directory(tmp_path)
    for path in (made.cert, made.key, made.ca):
        shutil.copy2(engines.certs / path.name, path)
    return made


def refusal(files: TlsFiles) -> str:
    with pytest.raises(SandboxUnavailableError) as caught:
        client_context(files)
    assert caught.value.kind == "tls"
    text = str(caught.value)
    for path in (files.cert, files.key, files.ca):
        if path.is_file():
            body = path.read_bytes().split(b"\n")
            assert not any(len(line) > 20 and line.decode() in text for line in body)
    return text


def test_the_engine_is_verified_and_old_tls_is_not_spoken(files: TlsFiles) -> None:
    """E2: host name and chain are checked, TLS 1.2 is the floor."""
    context = client_context(files)
    assert context.check_hostname is True
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("name", ["cert", "key", "ca"])
def test_a_missing_file_is_named(files: TlsFiles, name: str) -> None:
    """E2: a load failure names the path."""
    path: Path = getattr(files, name)
    path.unlink()
    assert str(path) in refusal(files)
    assert "does not exist" in refusal(files)


@pytest.mark.parametrize("name", ["cert", "key", "ca"])
@pytest.mark.parametrize("content", ["", "rubbish that is long enough to be recognised\n"])
def test_a_broken_file_is_named_and_not_quoted(files: TlsFiles, name: str, content: str) -> None:
    """E2, SEC-04: a load failure never shows contents."""
    path: Path = getattr(files, name)
    path.write_text(content)
    assert str(path) in refusal(files)


def test_a_key_of_another_certificate_is_told(files: TlsFiles, engines: Engines) -> None:
    """E2: the usual mix-up has a text of its own."""
    shutil.copy2(engines.certs / "rogue-key.pem", files.key)
    assert "does not belong to the certificate" in refusal(files)


def test_a_key_with_a_password_is_refused_without_asking_for_it(files: TlsFiles) -> None:
    """E2: a question on the terminal would hang a server."""
    locked = files.key.with_name("locked.pem")
    subprocess.run(
        ["openssl", "ec", "-in", files.key, "-aes128", "-passout", "pass:x", "-out", locked],
        check=True,
        capture_output=True,
    )
    locked.replace(files.key)
    files.key.chmod(0o600)
    assert "password" in refusal(files)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o777])
def test_a_key_that_others_can_use_is_refused_with_the_remedy(files: TlsFiles, mode: int) -> None:
    """SEC-08: who reads the key owns the engine's machine."""
    files.key.chmod(mode)
    assert f"chmod 600 {files.key}" in refusal(files)


def test_a_link_is_judged_by_the_file_behind_it(files: TlsFiles, tmp_path: Path) -> None:
    """SEC-08: secret mounts are made of links; the file is what counts."""
    real = tmp_path / "real.pem"
    files.key.rename(real)
    files.key.symlink_to(real)
    client_context(files)
    real.chmod(0o644)
    assert f"chmod 600 {real}" in refusal(files)


def test_a_folder_that_everyone_can_write_is_refused(files: TlsFiles) -> None:
    """SEC-08: in it the key could be exchanged."""
    files.key.parent.chmod(0o777)
    assert "chmod o-w" in refusal(files)
    files.key.parent.chmod(0o1777)
    client_context(files)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_of_another_user_is_refused(files: TlsFiles) -> None:
    """SEC-08: its owner could change it at any time."""
    os.chown(files.key, 65534, 65534)
    assert "belongs to another user" in refusal(files)


def test_certificate_and_authority_may_be_read_by_everyone(files: TlsFiles) -> None:
    """SEC-08: they are no secrets."""
    files.cert.chmod(0o644)
    files.ca.chmod(0o644)
    client_context(files)


async def test_an_engine_that_does_not_speak_tls_gets_nothing_in_plain(files: TlsFiles) -> None:
    """E2, SEC-07: a connection that cannot be secured is given up, and not made another way.

    A real engine with TLS never answers in plain.
    """
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(4096))
        writer.write(b"HTTP/1.1 200 OK\r\nApi-Version: 1.41\r\nContent-Length: 2\r\n\r\nOK")
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(SandboxUnavailableError) as caught:
            await probe(Endpoint(f"https://127.0.0.1:{port}", files))
    assert caught.value.kind == "tls"
    assert heard
    # The first byte of a TLS record that opens a handshake.
    assert all(data[:1] == b"\x16" and b"HTTP" not in data for data in heard)
