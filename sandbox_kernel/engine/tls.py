"""TLS towards an engine: one context from three files, checked before use (E2, SEC-08).

A failure names the file and the cause and never repeats what is in a file. The engine's
certificate and host name are always verified and nothing older than TLS 1.2 is spoken.
"""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path

from sandbox_kernel.engine.endpoint import TlsFiles
from sandbox_kernel.errors import SandboxUnavailableError


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Make the TLS context of a client.

    Raises
    ------
    SandboxUnavailableError
        Of kind ``tls``: a file is missing, unreadable, broken, or the key is open to others.
    """
    for path in (files.ca, files.cert, files.key):
        _require_readable(path)
    _require_private(files.key)
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(files.ca))
    except (ssl.SSLError, OSError) as error:
        raise _broken(files.ca, "is not a certificate authority in PEM form") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Python 3.13 switches this on. The certificates that Docker's own instructions make often
    # lack the extensions it asks for; chain, dates and host name are verified without it too,
    # and one engine should work, or not, under every Python alike.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    try:
        # Without a password OpenSSL would ask for one on the terminal and hang a server.
        context.load_cert_chain(str(files.cert), str(files.key), password=lambda: "")
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or ""
        if reason == "KEY_VALUES_MISMATCH":
            raise _broken(files.key, f"does not belong to the certificate {files.cert}") from error
        raise _broken(
            files.key,
            f"cannot be used with {files.cert}: one of them is not PEM, or the key has a password",
        ) from error
    return context


def _broken(path: Path, what: str) -> SandboxUnavailableError:
    return SandboxUnavailableError(
        "tls", f"The TLS file {path} {what}", "Replace the file; see the engine's administrator."
    )


def _require_readable(path: Path) -> None:
    try:
        with path.open("rb"):
            return
    except FileNotFoundError as error:
        raise _broken(path, "does not exist") from error
    except OSError as error:
        raise _broken(path, "cannot be read by this user") from error


def _require_private(key: Path) -> None:
    """Refuse a key that others can read or replace; with it they own the engine's machine."""
    if os.name != "posix":
        return
    real = key.resolve()
    status = real.stat()
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SandboxUnavailableError(
            "tls",
            f"The private key {key} can be used by others "
            f"(mode {stat.S_IMODE(status.st_mode):04o}), and who has it owns the engine's machine",
            f"Run: chmod 600 {real}",
        )
    if status.st_uid not in {0, os.geteuid()}:
        raise SandboxUnavailableError(
            "tls",
            f"The private key {key} belongs to another user (uid {status.st_uid})",
            f"Run: chown {os.geteuid()} {real}",
        )
    parent = real.parent.stat()
    if parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
        raise SandboxUnavailableError(
            "tls",
            f"The folder of the private key {key} can be written by everyone",
            f"Run: chmod o-w {real.parent}",
        )
