"""Which Docker engine to talk to, and how (features E1, E2 and E3).

`resolve_endpoint` turns settings and the environment into one `Endpoint` and says which rule
chose it. Nothing is dialled here; the only I/O is to look at files. A connection that would
be weaker than what was asked for is refused, never fallen back to.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from sandbox_kernel.config import EngineSettings
from sandbox_kernel.errors import SandboxSpecRejectedError, SandboxUnavailableError
from sandbox_kernel.policy import check_engine

__all__ = ["Endpoint", "EngineSettings", "TlsFiles", "resolve_endpoint"]

DEFAULT_TLS_DIRECTORY = Path("/certs/client")
TLS_PORT = 2376
PLAIN_PORT = 2375
_LONGEST_SOCKET_PATH = 103
"""What every system allows; Linux itself allows four bytes more."""

_FORMS = "unix:///path, an absolute socket path, tcp://host[:port], http://host or https://host"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the client's certificate and key, and of the authority to trust."""

    cert: Path
    key: Path
    ca: Path

    @classmethod
    def in_directory(cls, directory: Path) -> TlsFiles:
        """Name the three files as ``DOCKER_CERT_PATH`` lays them out."""
        return cls(directory / "cert.pem", directory / "key.pem", directory / "ca.pem")

    def missing(self) -> tuple[Path, ...]:
        """Return the files that are not there."""
        return tuple(path for path in (self.cert, self.key, self.ca) if not path.is_file())


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One Docker engine.

    Parameters
    ----------
    url
        ``unix:///path``, ``http://host:port`` or ``https://host:port``.
    tls
        The files of a mutually authenticated connection; `None` exactly when it is not TLS.
    source
        Which rule chose it, for people.
    candidates
        What was looked at on the way, for the text of an error.
    """

    url: str
    tls: TlsFiles | None = None
    source: str = "given"
    candidates: tuple[str, ...] = ()

    @property
    def socket_path(self) -> str | None:
        """The path of a Unix socket, or `None` for a network engine."""
        return self.url.removeprefix("unix://") if self.url.startswith("unix://") else None

    @property
    def is_local(self) -> bool:
        """Whether its address is one of this machine, which may be forwarded to another."""
        return self.socket_path is not None or _is_loopback(urlsplit(self.url).hostname or "")


def resolve_endpoint(
    settings: EngineSettings,
    environ: Mapping[str, str] | None = None,
    home: Path | None = None,
    roots: Path = Path("/"),
) -> Endpoint:
    """Choose the engine.

    Parameters
    ----------
    settings
        What was configured; its `host` wins over everything else.
    environ, home
        The environment and home directory to look in; the process's own by default.
    roots
        Where the system-wide sockets are looked for (tests only).

    Raises
    ------
    SandboxSpecRejectedError
        The configured host has an unknown form, would be a plain connection elsewhere, or is
        not one that the policy allows.
    SandboxUnavailableError
        Nothing is configured and nothing was found, or certificate files are missing.
    """
    endpoint = _choose(settings, os.environ if environ is None else environ, home, roots)
    check_engine(settings.allowed, endpoint.url, endpoint.source)
    return endpoint


def _choose(
    settings: EngineSettings, environ: Mapping[str, str], home: Path | None, roots: Path
) -> Endpoint:
    if settings.host is not None:
        return _from_host(settings.host, settings, "host", "SANDBOX_DOCKER_HOST", None)
    if settings.require_explicit_host:
        raise SandboxUnavailableError(
            "not-configured",
            "No Docker engine is configured, and this site does not allow looking one up",
            "Set SANDBOX_DOCKER_HOST, for example to unix:///var/run/docker.sock.",
        )
    home = Path.home() if home is None else home
    tried: list[str] = []
    return (
        _from_docker_host(settings, environ, home, tried)
        or _from_context(settings, environ, home, tried)
        or _from_usual_sockets(environ, home, roots, tried)
    )


def _from_docker_host(
    settings: EngineSettings, environ: Mapping[str, str], home: Path, tried: list[str]
) -> Endpoint | None:
    host = environ.get("DOCKER_HOST", "").strip()
    if not host:
        tried.append("DOCKER_HOST (not set)")
        return None
    tls = None
    # The command line tool verifies whenever DOCKER_TLS_VERIFY is set to anything; a bare
    # DOCKER_CERT_PATH means TLS too, and here TLS always means verified.
    if environ.get("DOCKER_TLS_VERIFY") or environ.get("DOCKER_CERT_PATH"):
        directory = environ.get("DOCKER_CERT_PATH") or _docker_config_directory(environ, home)
        tls = TlsFiles.in_directory(Path(directory))
    return _from_host(host, settings, "DOCKER_HOST", "DOCKER_HOST", tls)


def _docker_config_directory(environ: Mapping[str, str], home: Path) -> Path:
    return Path(environ.get("DOCKER_CONFIG") or home / ".docker")


def _from_context(
    settings: EngineSettings, environ: Mapping[str, str], home: Path, tried: list[str]
) -> Endpoint | None:
    directory = _docker_config_directory(environ, home)
    name = environ.get("DOCKER_CONTEXT", "").strip()
    chosen_by = "DOCKER_CONTEXT"
    if not name:
        chosen_by = f"currentContext in {directory / 'config.json'}"
        name = str(_read_json(directory / "config.json").get("currentContext") or "")
    if not name or name == "default":
        tried.append("docker context (default)")
        return None
    digest = hashlib.sha256(name.encode()).hexdigest()
    meta = _read_json(directory / "contexts" / "meta" / digest / "meta.json")
    endpoints = meta.get("Endpoints")
    docker = endpoints.get("docker") if isinstance(endpoints, dict) else None
    host = docker.get("Host") if isinstance(docker, dict) else None
    if not isinstance(docker, dict) or not isinstance(host, str) or not host:
        raise SandboxUnavailableError(
            "not-configured",
            f"The docker context {name!r} ({chosen_by}) has no usable description",
            "See `docker context ls`, choose one with `docker context use`, or set "
            "SANDBOX_DOCKER_HOST.",
        )
    tls_directory = directory / "contexts" / "tls" / digest / "docker"
    tls = TlsFiles.in_directory(tls_directory) if tls_directory.is_dir() else None
    if docker.get("SkipTLSVerify") and not host.startswith("unix://"):
        raise SandboxSpecRejectedError(
            f"docker context {name!r}",
            host,
            "it switches the verification of the engine's certificate off",
            "Create the context again without skip-tls-verify.",
        )
    return _from_host(host, settings, f"docker context {name!r}", f"docker context {name!r}", tls)


def _read_json(path: Path) -> dict[str, object]:
    """Read a file of the docker command; one that is absent or broken says nothing."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _usual_sockets(
    environ: Mapping[str, str], home: Path, roots: Path
) -> Iterator[tuple[Path, str]]:
    runtime = Path(environ.get("XDG_RUNTIME_DIR") or roots / "run/user" / str(_uid()))
    yield roots / "var/run/docker.sock", "Docker"
    yield roots / "run/docker.sock", "Docker"
    yield runtime / "docker.sock", "rootless Docker"
    yield home / ".docker/run/docker.sock", "Docker Desktop"
    yield home / ".docker/desktop/docker.sock", "Docker Desktop"
    yield home / ".colima/default/docker.sock", "Colima"
    yield home / ".config/colima/default/docker.sock", "Colima"
    yield home / ".rd/docker.sock", "Rancher Desktop"
    yield home / ".orbstack/run/docker.sock", "OrbStack"
    yield runtime / "podman/podman.sock", "rootless Podman"
    yield roots / "run/podman/podman.sock", "Podman"


def _uid() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _from_usual_sockets(
    environ: Mapping[str, str], home: Path, roots: Path, tried: list[str]
) -> Endpoint:
    closed: tuple[Path, str] | None = None
    for path, product in _usual_sockets(environ, home, roots):
        try:
            found = stat.S_ISSOCK(path.stat().st_mode)
            # Connecting goes by the effective user where the system tells the two apart.
            effective = os.access in os.supports_effective_ids
            usable = found and os.access(path, os.R_OK | os.W_OK, effective_ids=effective)
        except PermissionError:
            found, usable = True, False
        except OSError:
            found, usable = False, False
        if usable:
            source = f"usual socket of {product} ({path})"
            return Endpoint(f"unix://{path}", None, source, tuple(tried))
        tried.append(f"{path} ({'permission denied' if found else 'no such socket'})")
        if found and closed is None:
            closed = (path, product)
    if closed is not None:
        # Nobody else's engine may be used, but naming this one lets the probe say
        # "permission denied" with its remedy rather than "nothing found".
        path, product = closed
        return Endpoint(f"unix://{path}", None, f"usual socket of {product} ({path})", tuple(tried))
    raise SandboxUnavailableError(
        "not-configured",
        f"No Docker engine was found. Looked at: {'; '.join(tried)}",
        "Install and start Docker (on Debian or Ubuntu: apt-get install docker.io), or set "
        "SANDBOX_DOCKER_HOST to where the engine listens.",
    )


def _from_host(
    host: str, settings: EngineSettings, setting: str, source: str, tls: TlsFiles | None
) -> Endpoint:
    host = host.strip()
    if host.startswith("/"):
        host = f"unix://{host}"
    if host.startswith("unix://"):
        path = host.removeprefix("unix://")
        if not path.startswith("/") or "\0" in path or path == "/":
            raise _bad_form(setting, host)
        if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
            raise SandboxSpecRejectedError(
                setting,
                host,
                f"is longer than the {_LONGEST_SOCKET_PATH} bytes that a socket's path may have",
                "Make a symbolic link with a shorter path to it.",
            )
        return Endpoint(f"unix://{path}", None, source)
    scheme = host.partition("://")[0].lower() if "://" in host else ""
    if scheme == "ssh":
        raise SandboxSpecRejectedError(
            setting,
            host,
            "an engine over ssh is not supported",
            "Forward its socket (ssh -N -L /run/user/1000/engine.sock:/var/run/docker.sock HOST) "
            "and use unix:///run/user/1000/engine.sock, or give the engine a TLS port.",
        )
    if scheme == "npipe":
        raise SandboxSpecRejectedError(
            setting,
            host,
            "Windows named pipes are not supported",
            "Use an engine on tcp:// with TLS, or run Jupyter inside WSL 2.",
        )
    if scheme not in {"tcp", "http", "https"}:
        raise _bad_form(setting, host)
    return _from_network(host, scheme, settings, setting, source, tls)


def _bad_form(setting: str, host: str) -> SandboxSpecRejectedError:
    return SandboxSpecRejectedError(
        setting, host, "is not a form of engine address", f"Use {_FORMS}."
    )


def _from_network(
    host: str,
    scheme: str,
    settings: EngineSettings,
    setting: str,
    source: str,
    tls: TlsFiles | None,
) -> Endpoint:
    try:
        parts = urlsplit(host)
        name, port = parts.hostname, parts.port
    except ValueError:
        raise _bad_form(setting, host) from None
    if "@" in parts.netloc:
        # Shown without the value, which holds a password.
        raise SandboxSpecRejectedError(
            setting, None, "an engine address has no user name", f"Use {_FORMS}."
        )
    odd = parts.path not in {"", "/"} or parts.query or parts.fragment
    if not name or odd or port == 0 or any(c.isspace() or c in "\\%" for c in name):
        raise _bad_form(setting, host)

    named = settings.tls_cert_path or settings.tls_key_path or settings.tls_ca_path
    default = TlsFiles.in_directory(DEFAULT_TLS_DIRECTORY)
    if named or tls is None:
        files = TlsFiles(
            settings.tls_cert_path or default.cert,
            settings.tls_key_path or default.key,
            settings.tls_ca_path or default.ca,
        )
    else:
        files = tls
    asked = bool(named or tls is not None)
    loopback = _is_loopback(name)
    if scheme == "https":
        secure = True
    elif scheme == "http":
        if asked:
            raise SandboxSpecRejectedError(
                setting,
                host,
                "asks for a plain connection while TLS files are configured",
                "Use https:// or tcp://, or remove the TLS settings.",
            )
        secure = False
    elif asked:
        secure = True
    elif loopback:
        secure = port == TLS_PORT or (port != PLAIN_PORT and len(default.missing()) < 3)
    else:
        # On the wire to another machine TLS is the rule. What decides is configuration alone,
        # never the absence of a file, so that a failed mount cannot turn TLS off.
        secure = not settings.allow_insecure_engine

    shown = f"[{name}]" if ":" in name else name
    if secure:
        missing = files.missing()
        if missing:
            raise SandboxUnavailableError(
                "tls",
                f"The engine at {shown} needs TLS and these files are missing: "
                f"{', '.join(map(str, missing))}",
                "Put the client's certificate, key and authority there, or name them with "
                "SANDBOX_DOCKER_TLS_CERT_PATH, SANDBOX_DOCKER_TLS_KEY_PATH and "
                "SANDBOX_DOCKER_TLS_CA_PATH. A plain connection to another machine needs "
                "allow_insecure_engine.",
            )
        return Endpoint(f"https://{shown}:{port or TLS_PORT}", files, source)
    if not loopback and not settings.allow_insecure_engine:
        raise SandboxSpecRejectedError(
            setting,
            host,
            "is a plain connection to another machine: whoever is on the way owns that machine",
            "Use TLS (tcp:// or https:// with certificates), or set allow_insecure_engine.",
        )
    return Endpoint(f"http://{shown}:{port or PLAIN_PORT}", None, source)


def _is_loopback(name: str) -> bool:
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
