"""The one place where failures of engine calls become errors of sandbox-kernel (E4, SEC-05).

Everything that aiodocker, aiohttp, ssl or the operating system can raise out of an engine
call is translated here. The engine's own text is shown only after paths of the engine's
machine were taken out of it; the raw text goes to the log at DEBUG.
"""

from __future__ import annotations

import errno
import logging
import re
import socket
import ssl
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import aiohttp
from aiodocker import DockerError

from sandbox_kernel.config import DEFAULT_IMAGE as DEFAULT_IMAGE
from sandbox_kernel.config import R_IMAGE as R_IMAGE
from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxDiskFullError,
    SandboxEngineError,
    SandboxEngineTimeoutError,
    SandboxError,
    SandboxGoneError,
    SandboxImageMissingError,
    SandboxPausedError,
    SandboxUnavailableError,
)

log = logging.getLogger(__name__)

CONNECTION_TROUBLE = 900
"""The status that aiodocker invents for a failure to connect."""

RAISED_BY_CALLS = (
    DockerError,
    aiohttp.ClientError,
    # aiodocker asserts on the state of a stream whose connection was lost, and aiohttp
    # raises RuntimeError on a session that was closed meanwhile.
    AssertionError,
    RuntimeError,
    OSError,  # TimeoutError and ssl.SSLError are among these
    # An answer that is not the JSON that was expected.
    ValueError,
    TypeError,
    KeyError,
)
"""What can come out of a call to aiodocker; nothing else is caught around one."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What an engine call was about, for the text of its failure."""

    kind: Literal["engine", "container", "exec", "image", "network", "volume"] = "engine"
    name: str = ""
    #: Paths that the caller itself named and that may therefore be shown.
    own_paths: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {short(self.name)}" if self.name else f"the {self.kind}"


ENGINE = Subject()

_NO_SUCH_IMAGE = re.compile(r"no such image:? *(\S*)", re.IGNORECASE)
_LONG_ID = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")
# An absolute path, but neither the rest of a relative one nor a part of a URL or image name.
_ABSOLUTE_PATH = re.compile(r"(?<![\w./-])/(?!/)[^\s\"'`,;:()\[\]{}<>|]+")
# Paths that give themselves away. Also what is left of one with spaces in it.
_ENGINE_PATH = re.compile(
    r"[^\s\"'`]*(?:/var/lib/(?:docker|containers?)|/run/(?:docker|containerd|containers)/"
    r"|docker-builder\d|(?:overlay2?|containers|volumes|containerd|buildkit)/[0-9a-z])[^\s\"'`,;:]*"
)


def short(name: str) -> str:
    """Shorten a full object id as the docker command does; leave a name alone."""
    return _LONG_ID.sub(r"\1", name)


def without_engine_paths(text: str) -> str:
    """Take the paths of the engine's own folders out of a text that may name other ones."""
    return _ENGINE_PATH.sub("<path>", short(text))


def without_host_paths(text: str, own_paths: tuple[str, ...] = ()) -> str:
    """Take every absolute path out of a text of the engine, except those the caller named."""

    def hide(match: re.Match[str]) -> str:
        return match[0] if match[0].rstrip(".") in own_paths else "<path>"

    return without_engine_paths(_ABSOLUTE_PATH.sub(hide, short(text)))


def translate(
    error: BaseException,
    endpoint: Endpoint,
    doing: str,
    subject: Subject = ENGINE,
    timeout: float | None = None,
) -> SandboxError:
    """Turn a failure of an engine call into the error to raise ``from`` it.

    Parameters
    ----------
    error
        What aiodocker, aiohttp or the operating system raised.
    endpoint
        The engine that was called.
    doing
        The call in words, as in "start the container".
    subject
        What the call was about.
    timeout
        The bound of the call, in seconds, when it had one.
    """
    log.debug("engine call failed: %s (%s): %r", doing, subject, error)
    if isinstance(error, DockerError) and error.status != CONNECTION_TROUBLE:
        # It becomes the cause, and a notebook shows causes too.
        error.message = without_host_paths(error.message, subject.own_paths).strip()
        error.args = (error.message,)
        return _answered(error.status, error.message, endpoint, doing, subject)
    if isinstance(error, TimeoutError):
        if isinstance(error, (aiohttp.ConnectionTimeoutError, OSError)) and (
            isinstance(error, aiohttp.ConnectionTimeoutError) or error.errno == errno.ETIMEDOUT
        ):
            return _unavailable("silent", endpoint, "does not answer a connection attempt")
        within = f" within {timeout:g} s" if timeout else " in time"
        return SandboxEngineTimeoutError(f"The engine did not {doing}{within}{_about(subject)}")
    return unavailable(error, endpoint)


def _answered(
    status: int, message: str, endpoint: Endpoint, doing: str, subject: Subject
) -> SandboxError:
    lowered = message.lower()
    if is_disk_full(message):
        return SandboxDiskFullError(
            f"The engine's disk is full, so it could not {doing}. Free some space there, for "
            "example with `docker system prune`",
            status,
        )
    if "http request to an https server" in lowered:
        return _unavailable("tls", endpoint, "speaks only TLS and was called without it")
    if message.startswith("Cannot upgrade connection"):
        # aiodocker's words for an answer to attach or exec that is not a stream.
        return _unavailable(
            "lost", endpoint, "gave no stream (is there a proxy that knows no upgrades?)"
        )
    if status == 404:
        # A creation is about its image too, but can miss a network or a volume as well.
        named = _NO_SUCH_IMAGE.search(message)
        if named or (subject.kind == "image" and "image" in lowered):
            return image_missing(subject.name if subject.kind == "image" or not named else named[1])
        if subject.kind in {"container", "exec"}:
            return SandboxGoneError(f"The engine could not {doing}: {subject} does not exist")
    if status in {409, 500} and "is not running" in lowered:
        return SandboxGoneError(f"The engine could not {doing}: {subject} is not running")
    if status in {409, 500} and ("is paused" in lowered or "unpause" in lowered):
        return SandboxPausedError(f"The engine could not {doing}: {subject} is paused")
    if status == 409:
        return SandboxConflictError(f"The engine could not {doing}: {message}")
    return SandboxEngineError(f"The engine could not {doing}{_about(subject)}: {message}", status)


def _about(subject: Subject) -> str:
    return f" ({subject})" if subject.name else ""


def is_disk_full(message: str) -> bool:
    """Whether the engine says that its disk, or its share of one, is full."""
    lowered = message.lower()
    return "no space left on device" in lowered or "disk quota exceeded" in lowered


def is_ours(name: str) -> bool:
    """Whether an image's name is of those that ``jupyter sandbox build`` gives.

    None of them is ever pulled: whoever had such a name in a registry would not be us.
    """
    for hub in ("index.docker.io/", "docker.io/"):
        name = name.removeprefix(hub)
    return name.startswith("sandbox-kernel/")


def how_to_get(name: str) -> str:
    """Return the command that brings an image to the engine."""
    if not is_ours(name):
        return f"docker pull {name}"
    image = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
    options = {DEFAULT_IMAGE: "", R_IMAGE: " --language r"}.get(image, f" --tag {name}")
    return f"jupyter sandbox build{options}"


def image_missing(name: str, why: str = "") -> SandboxImageMissingError:
    """Make the error for an image that is not on the engine."""
    remedy = f"Build it with: {how_to_get(name)}"
    if not is_ours(name):
        remedy = (
            f"Pull it with: {how_to_get(name)}, or build the default image with: "
            f"{how_to_get(DEFAULT_IMAGE)}"
        )
    reason = f" and {why}" if why else ""
    return SandboxImageMissingError(f"The image {name!r} is not on the engine{reason}. {remedy}")


def chain(error: BaseException) -> Iterator[BaseException]:
    """Give an error and everything below it, the wrapped operating system error included."""
    seen: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        item = queue.pop(0)
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        queue += [
            getattr(item, "os_error", None),
            getattr(item, "certificate_error", None),
            item.__cause__,
            item.__context__,
        ]


def unavailable(error: BaseException, endpoint: Endpoint) -> SandboxUnavailableError:
    """Say why an engine cannot be reached, or that the connection to it was lost."""
    causes = list(chain(error))
    refusals = [c for c in causes if isinstance(c, ssl.SSLError)]
    if refusals:
        # aiohttp's own class is an SSLError too, one that knows no reason.
        telling = [c for c in refusals if getattr(c, "reason", None)]
        return _tls_trouble((telling or refusals)[0], endpoint)
    for cause in causes:
        if isinstance(cause, FileNotFoundError):
            return _unavailable("no-socket", endpoint, "has no such socket")
        if isinstance(cause, PermissionError):
            return _unavailable("permission-denied", endpoint, "may not be used by this user")
        if isinstance(cause, ConnectionRefusedError):
            if endpoint.socket_path and not _is_socket(endpoint.socket_path):
                return _unavailable("no-socket", endpoint, "is not a socket")
            return _unavailable("refused", endpoint, "refuses connections: nothing listens there")
        if isinstance(cause, socket.gaierror):
            return _unavailable("refused", endpoint, "has a host name that cannot be resolved")
        if isinstance(cause, OSError) and cause.errno in {errno.EPROTOTYPE, errno.ENOTDIR}:
            return _unavailable("no-socket", endpoint, "is not a socket")
        if isinstance(cause, OSError) and cause.errno in {errno.EHOSTUNREACH, errno.ENETUNREACH}:
            return _unavailable("refused", endpoint, "cannot be reached over the network")
        if isinstance(cause, OSError) and cause.errno == errno.ETIMEDOUT:
            return _unavailable("silent", endpoint, "does not answer any more")
    if any(isinstance(c, (aiohttp.ClientResponseError, ValueError, TypeError)) for c in causes):
        return _unavailable("not-docker", endpoint, "answers, but not as a Docker engine does")
    return _unavailable("lost", endpoint, "has closed the connection")


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(Path(path).stat().st_mode)
    except OSError:
        return True  # something that cannot be looked at; what connecting said stands


def _tls_trouble(error: ssl.SSLError, endpoint: Endpoint) -> SandboxUnavailableError:
    reason = (getattr(error, "reason", None) or "").upper()
    text = f"{reason} {error}".lower()
    verify = (getattr(error, "verify_message", None) or "").lower()
    if "hostname mismatch" in text or "ip address mismatch" in text or "doesn't match" in text:
        what = "presents a certificate for another host name"
    elif "expired" in verify:
        what = "presents a certificate that has expired"
    elif "not yet valid" in verify:
        what = "presents a certificate that is not valid yet (is the clock right?)"
    elif verify:
        what = f"presents a certificate that the configured authority did not sign ({verify})"
    elif "certificate_expired" in text or "certificate expired" in text:
        what = "refuses the client's certificate: it has expired"
    elif "alert" in text and ("certificate" in text or "unknown ca" in text or "_ca" in text):
        what = "refuses the client's certificate"
    elif any(s in text for s in ("wrong version number", "record layer", "http_request")):
        what = "answers in plain text where TLS was expected"
    elif "unsupported protocol" in text or "protocol version" in text:
        what = "speaks only versions of TLS older than 1.2"
    else:
        what = f"failed the TLS handshake ({reason.lower().replace('_', ' ') or 'no reason given'})"
    return _unavailable("tls", endpoint, what)


def _unavailable(
    kind: Literal[
        "no-socket", "permission-denied", "refused", "tls", "not-docker", "silent", "lost"
    ],
    endpoint: Endpoint,
    what: str,
) -> SandboxUnavailableError:
    return SandboxUnavailableError(
        kind, f"The Docker engine {describe(endpoint)} {what}", remedy(kind, endpoint)
    )


def describe(endpoint: Endpoint) -> str:
    """Name an engine and the rule that chose it."""
    return f"at {endpoint.url} (from {endpoint.source})"


def remedy(kind: str, endpoint: Endpoint) -> str:
    """Say what to paste into a terminal, or to ask for, for one kind of trouble."""
    path = endpoint.socket_path
    match kind:
        case "no-socket":
            return (
                "Start Docker (on Linux: sudo systemctl start docker), or set "
                "SANDBOX_DOCKER_HOST to where the engine listens."
            )
        case "permission-denied":
            return (
                "Add yourself to the socket's group and log in again "
                f"(ls -l {path}; usually: sudo usermod -aG docker $USER), or use a rootless engine."
            )
        case "refused":
            if path:
                return "Start Docker (on Linux: sudo systemctl start docker)."
            return "Check the host name and port, and that the engine listens there."
        case "tls":
            return (
                "Check the certificate files (SANDBOX_DOCKER_TLS_CERT_PATH, _KEY_PATH, _CA_PATH), "
                "the engine's name and its port (2376 for TLS)."
            )
        case "not-docker":
            return "Check the address: something else listens there."
        case "api-too-old":
            return "Upgrade the engine to Docker 20.10 or Podman 4.3, or later."
        case "silent":
            return "Check whether the engine hangs (docker version), or restart it."
        case _:
            return "Check that the engine still runs (docker version), then start again."
