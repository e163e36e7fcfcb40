"""`EngineSettings`: what was configured about the Docker engine (E1 to E3)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sandbox_kernel.policy import EngineRule


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What a person or an administrator configured about the Docker engine.

    Parameters
    ----------
    host
        ``unix:///path``, an absolute socket path, ``tcp://host[:port]``, ``http://`` or
        ``https://``; ``None`` looks the engine up as the ``docker`` command does.
    tls_cert_path, tls_key_path, tls_ca_path
        The client's certificate and key and the authority that signed the engine's
        certificate; each that is ``None`` stands for its file in ``/certs/client``.
    allow_insecure_engine
        Permit a plain connection to an engine on another machine.
    require_explicit_host
        Refuse to look the engine up: only `host` counts.
    allowed
        What the administrator's policy says of engines; no rule allows every engine.
    """

    host: str | None = None
    tls_cert_path: Path | None = None
    tls_key_path: Path | None = None
    tls_ca_path: Path | None = None
    allow_insecure_engine: bool = False
    require_explicit_host: bool = False
    allowed: tuple[EngineRule, ...] = ()
