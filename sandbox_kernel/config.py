"""Configuration: how the environment group ``SANDBOX_DOCKER_*`` becomes settings.

Only the engine's part lives here so far (features E1 to E3). The group is closed: a name in
it that is not known is refused, since a misspelt security setting must not be silently
ignored. Values are paths and switches, never key material.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sandbox_kernel.errors import SandboxSpecRejectedError

ENVIRONMENT_PREFIX = "SANDBOX_DOCKER_"

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})


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
    """

    host: str | None = None
    tls_cert_path: Path | None = None
    tls_key_path: Path | None = None
    tls_ca_path: Path | None = None
    allow_insecure_engine: bool = False
    require_explicit_host: bool = False


_FIELD_OF = {
    "SANDBOX_DOCKER_HOST": "host",
    "SANDBOX_DOCKER_TLS_CERT_PATH": "tls_cert_path",
    "SANDBOX_DOCKER_TLS_KEY_PATH": "tls_key_path",
    "SANDBOX_DOCKER_TLS_CA_PATH": "tls_ca_path",
    "SANDBOX_DOCKER_ALLOW_INSECURE_ENGINE": "allow_insecure_engine",
    "SANDBOX_DOCKER_REQUIRE_EXPLICIT_HOST": "require_explicit_host",
}


def engine_settings(environ: Mapping[str, str] | None = None) -> EngineSettings:
    """Read the engine's settings from the ``SANDBOX_DOCKER_*`` environment group.

    Parameters
    ----------
    environ
        The environment; the process's own by default.

    Raises
    ------
    SandboxSpecRejectedError
        A name in the group is unknown, or a value has the wrong form.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, str | Path | bool] = {}
    for name in sorted(environ):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        field = _FIELD_OF.get(name)
        if field is None:
            # The value is not shown: a misplaced secret would end up in a notebook.
            raise SandboxSpecRejectedError(
                name,
                None,
                "is not a setting of sandbox-kernel",
                f"Unset it, or use one of {', '.join(sorted(_FIELD_OF))}.",
            )
        text = environ[name].strip()
        if field.endswith("_path"):
            if text:
                values[field] = _path(name, text)
        elif field == "host":
            if text:
                values[field] = text
        else:
            values[field] = _switch(name, text)
    return EngineSettings(**values)  # type: ignore[arg-type]


def _path(name: str, text: str) -> Path:
    # Somebody who pastes the certificate itself gets told without seeing it repeated.
    if "-----BEGIN" in text:
        raise SandboxSpecRejectedError(
            name, None, "holds key material, not a path", "Write it to a file and name the file."
        )
    path = Path(text)
    if not path.is_absolute():
        raise SandboxSpecRejectedError(
            name, text, "is not an absolute path", "Give the file's absolute path."
        )
    return path


def _switch(name: str, text: str) -> bool:
    lowered = text.lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise SandboxSpecRejectedError(name, text, "is neither true nor false", "Use 1 or 0.")
