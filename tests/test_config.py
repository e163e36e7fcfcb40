"""The environment group of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox_kernel.config import EngineSettings, engine_settings
from sandbox_kernel.errors import SandboxSpecRejectedError


def test_the_group_is_read() -> None:
    """E1, E2: host, paths and switches; other variables do not matter."""
    settings = engine_settings(
        {
            "SANDBOX_DOCKER_HOST": " tcp://h ",
            "SANDBOX_DOCKER_TLS_CERT_PATH": "/c.pem",
            "SANDBOX_DOCKER_TLS_KEY_PATH": "/k.pem",
            "SANDBOX_DOCKER_TLS_CA_PATH": "/ca.pem",
            "SANDBOX_DOCKER_ALLOW_INSECURE_ENGINE": "yes",
            "SANDBOX_DOCKER_REQUIRE_EXPLICIT_HOST": "0",
            "DOCKER_HOST": "unix:///other",
            "SANDBOX_OTHER": "x",
        }
    )
    assert settings == EngineSettings(
        "tcp://h", Path("/c.pem"), Path("/k.pem"), Path("/ca.pem"), True, False
    )
    assert engine_settings({"SANDBOX_DOCKER_HOST": ""}) == EngineSettings()


def test_an_unknown_name_in_the_group_is_refused_without_its_value() -> None:
    """E2: a misspelt security setting must not be ignored, a misplaced secret not shown."""
    with pytest.raises(SandboxSpecRejectedError) as caught:
        engine_settings({"SANDBOX_DOCKER_TLS_KEY": "hunter2"})
    assert caught.value.setting == "SANDBOX_DOCKER_TLS_KEY"
    assert "hunter2" not in str(caught.value)
    assert "SANDBOX_DOCKER_TLS_KEY_PATH" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SANDBOX_DOCKER_ALLOW_INSECURE_ENGINE", "perhaps"),
        ("SANDBOX_DOCKER_TLS_CERT_PATH", "relative/cert.pem"),
    ],
)
def test_a_value_of_the_wrong_form_is_refused(name: str, value: str) -> None:
    """E2: naming setting and value."""
    with pytest.raises(SandboxSpecRejectedError, match=value):
        engine_settings({name: value})


def test_key_material_in_place_of_a_path_is_refused_unseen() -> None:
    """SEC-04: only paths are configuration."""
    with pytest.raises(SandboxSpecRejectedError) as caught:
        engine_settings({"SANDBOX_DOCKER_TLS_KEY_PATH": "-----BEGIN PRIVATE KEY-----\nMIGH"})
    assert "MIGH" not in str(caught.value)
