"""Credentials for private registries, as the docker command keeps them (feature E5).

They are read when an image is pulled, handed to the engine in one header, and kept nowhere.
Both files and credential helpers are understood; a helper that fails means no credentials,
and the registry's refusal then tells the person.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

DOCKER_HUB = "https://index.docker.io/v1/"
_HELPER_BOUND = 20.0
_HELPER_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")


def registry_of(ref: str) -> str:
    """Name the registry of an image as the docker configuration does."""
    first, slash, _ = ref.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return DOCKER_HUB if first in {"docker.io", "index.docker.io"} else first
    return DOCKER_HUB


async def registry_auth(
    ref: str, environ: Mapping[str, str] | None = None, home: Path | None = None
) -> str | None:
    """Return the ``X-Registry-Auth`` header for an image, or `None` to pull as anybody.

    Parameters
    ----------
    ref
        Name of the image.
    environ, home
        Where to look for the docker configuration; the process's own by default.
    """
    environ = os.environ if environ is None else environ
    directory = environ.get("DOCKER_CONFIG")
    folder = Path(directory) if directory else (home or Path.home()) / ".docker"
    config = await asyncio.to_thread(_read, folder / "config.json")
    registry = registry_of(ref)
    helpers = config.get("credHelpers")
    helper = helpers.get(registry) if isinstance(helpers, dict) else None
    helper = helper or config.get("credsStore")
    found = None
    if isinstance(helper, str) and _HELPER_NAME.match(helper):
        found = await _ask(helper, registry)
    if found is None:
        found = _from_file(config, registry)
    if found is None:
        return None
    found["serveraddress"] = registry
    return base64.urlsafe_b64encode(json.dumps(found).encode()).decode()


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _from_file(config: dict[str, Any], registry: str) -> dict[str, str] | None:
    auths = config.get("auths")
    if not isinstance(auths, dict):
        return None
    for name, entry in auths.items():
        if not isinstance(entry, dict) or _host(name) != _host(registry):
            continue
        if entry.get("identitytoken"):
            return {"identitytoken": str(entry["identitytoken"])}
        with contextlib.suppress(ValueError):
            user, colon, password = (
                base64.b64decode(str(entry.get("auth") or "")).decode().partition(":")
            )
            if colon:
                return {"username": user, "password": password.rstrip("\0")}
        if entry.get("username"):
            return {"username": str(entry["username"]), "password": str(entry.get("password"))}
    return None


def _host(registry: str) -> str:
    return registry.removeprefix("https://").removeprefix("http://").partition("/")[0]


async def _ask(helper: str, registry: str) -> dict[str, str] | None:
    program = f"docker-credential-{helper}"
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            "get",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        log.warning("%s, named in the docker configuration, cannot be started", program)
        return None
    try:
        async with asyncio.timeout(_HELPER_BOUND):
            answer, _ = await process.communicate(registry.encode())
    except TimeoutError:
        log.warning("%s did not answer within %g s", program, _HELPER_BOUND)
        return None
    finally:
        if process.returncode is None:
            # Its children too: one of them would keep the pipe open.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode != 0:
        return None  # the usual way to say that it knows none
    try:
        value = json.loads(answer)
        user, secret = str(value["Username"]), str(value["Secret"])
    except (ValueError, KeyError, TypeError):
        return None
    if user == "<token>":
        return {"identitytoken": secret}
    return {"username": user, "password": secret}
