"""Registry credentials as the docker command keeps them, on made-up configurations."""

from __future__ import annotations

import base64
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.engine import credentials
from sandbox_kernel.engine.credentials import DOCKER_HUB, registry_auth, registry_of


def configure(folder: Path, **config: Any) -> dict[str, str]:
    (folder / "config.json").write_text(json.dumps(config))
    return {"DOCKER_CONFIG": str(folder)}


async def read(ref: str, environ: dict[str, str]) -> dict[str, str] | None:
    header = await registry_auth(ref, environ)
    return None if header is None else json.loads(base64.urlsafe_b64decode(header))


def encoded(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("ref", "registry"),
    [
        ("debian", DOCKER_HUB),
        ("library/debian:12", DOCKER_HUB),
        ("docker.io/library/debian", DOCKER_HUB),
        ("ghcr.io/a/b", "ghcr.io"),
        ("localhost/a", "localhost"),
        ("host:5000/a@sha256:0", "host:5000"),
    ],
)
def test_the_registry_of_a_name(ref: str, registry: str) -> None:
    """E5: as the docker command takes names apart."""
    assert registry_of(ref) == registry


async def test_credentials_in_the_file_are_used_for_their_registry_only(tmp_path: Path) -> None:
    """E5: also where a name was stored with a scheme, and identity tokens."""
    environ = configure(
        tmp_path,
        auths={
            "https://ghcr.io/v1/": {"auth": encoded("me", "pass:word")},
            "token.example": {"identitytoken": "T"},
            "broken.example": {"auth": "%%%"},
            DOCKER_HUB: {"auth": encoded("hub", "x")},
        },
    )
    assert await read("ghcr.io/a", environ) == {
        "username": "me", "password": "pass:word", "serveraddress": "ghcr.io",
    }  # fmt: skip
    token = await read("token.example/a", environ)
    assert token is not None
    assert token["identitytoken"] == "T"
    hub = await read("debian", environ)
    assert hub is not None
    assert hub["username"] == "hub"
    assert await read("other.example/a", environ) is None
    assert await read("broken.example/a", environ) is None


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"auths": 3, "credHelpers": 3}'])
async def test_no_usable_configuration_means_no_credentials(
    tmp_path: Path, text: str | None
) -> None:
    """E5: public images need none."""
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert await read("ghcr.io/a", {"DOCKER_CONFIG": str(tmp_path)}) is None


def helper(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / f"docker-credential-{name}"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


async def test_helpers_are_asked_and_the_one_for_the_registry_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E5: aiodocker does not know them, the docker command does."""
    helper(
        tmp_path, "mine",
        'read -r host; echo "{\\"Username\\": \\"$1\\", \\"Secret\\": \\"$host\\"}"', monkeypatch,
    )  # fmt: skip
    helper(tmp_path, "token", 'echo \'{"Username": "<token>", "Secret": "S"}\'', monkeypatch)
    environ = configure(tmp_path, credsStore="mine", credHelpers={"special.example": "token"})
    assert await read("ghcr.io/a", environ) == {
        "username": "get", "password": "ghcr.io", "serveraddress": "ghcr.io",
    }  # fmt: skip
    assert await read("special.example/a", environ) == {
        "identitytoken": "S", "serveraddress": "special.example",
    }  # fmt: skip


@pytest.mark.parametrize(
    "script", ["echo hunter2; exit 1", "echo hunter2", "sleep 60", "echo '{\"Username\": 1}'"]
)
async def test_a_helper_that_fails_means_no_credentials_and_shows_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    script: str,
) -> None:
    """E5, SEC-04: its output is never logged, and a silent one is ended."""
    monkeypatch.setattr(credentials, "_HELPER_BOUND", 0.5)
    helper(tmp_path, "bad", script, monkeypatch)
    with caplog.at_level(logging.DEBUG):
        assert await read("ghcr.io/a", configure(tmp_path, credsStore="bad")) is None
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("name", ["../../bin/sh", "a b", "", "missing-helper", 3])
async def test_a_helper_that_cannot_be_started_means_no_credentials(
    tmp_path: Path, name: object
) -> None:
    """E5: nor is a name with a path in it followed."""
    assert await read("ghcr.io/a", configure(tmp_path, credsStore=name)) is None
