"""``jupyter sandbox status`` on the real engine and without one (E7)."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.app.conftest import CommandLine
from tests.engines import Engines


def problem(cli: CommandLine, *arguments: str, **environ: str) -> dict[str, str]:
    done = cli("status", "--json", *arguments, **environ)
    assert done.code == 1
    answer = done.json()
    assert answer["ok"] is False
    [first, *_] = [c for c in answer["checks"] if c["level"] == "problem"]
    assert first["remedy"]
    return dict(first)


def test_an_engine_that_works_is_described_with_the_reason_it_was_taken(
    cli: CommandLine, engines: Engines
) -> None:
    """E3, E7"""
    answer = cli("status", "--json", SANDBOX_DOCKER_HOST=engines.unix).json()
    assert answer["endpoint"] == {"url": engines.unix, "source": "SANDBOX_DOCKER_HOST"}
    assert answer["engine"]["api_version"]
    assert answer["engine"]["seccomp"] is True
    names = {check["name"] for check in answer["checks"]}
    assert {"endpoint", "engine", "seccomp", "limits", "runtimes", "image", "kernel"} <= names


def test_an_engine_over_tls_is_described_the_same(cli: CommandLine, engines: Engines) -> None:
    """E2, E7"""
    files = [f"--tls{name}={engines.certs / name}.pem" for name in ("cert", "key")]
    answer = cli(
        "status", "--json", f"--engine={engines.tls}", *files,
        f"--tlscacert={engines.certs / 'ca.pem'}",
    ).json()  # fmt: skip
    assert answer["engine"]["version"]
    assert answer["endpoint"]["url"].startswith("https://")


def test_without_a_kernelspec_the_command_to_install_one_is_named(
    cli: CommandLine, engines: Engines
) -> None:
    """E7"""
    answer = cli("status", "--json", SANDBOX_DOCKER_HOST=engines.unix).json()
    [kernel] = [c for c in answer["checks"] if c["name"] == "kernel"]
    # Another kernelspec of ours may be in the environment that runs the tests.
    assert kernel["level"] == "ok" or "jupyter sandbox install" in kernel["remedy"]


def test_a_missing_image_is_a_problem_with_its_remedy(cli: CommandLine, engines: Engines) -> None:
    """E5, E7"""
    name = "sandbox-kernel-test/not-there:1"
    first = problem(cli, f"--image={name}", SANDBOX_DOCKER_HOST=engines.unix)
    assert first["name"] == "image"
    assert name in first["text"]


def test_people_get_marks_and_arrows(cli: CommandLine, engines: Engines) -> None:
    """E7"""
    done = cli("status", "--image=sandbox-kernel-test/not-there:1", f"--engine={engines.unix}")
    assert done.code == 1
    assert "✓ engine" in done.out
    assert "✗ image" in done.out
    assert "→ Run: docker pull sandbox-kernel-test/not-there:1" in done.out
    assert "see → above" in done.out


def test_no_socket_is_told_apart(cli: CommandLine, tmp_path: Path) -> None:
    """E4, E7"""
    first = problem(cli, f"--engine={tmp_path / 'no.sock'}")
    assert "no such socket" in first["text"].lower() or "no socket" in first["text"].lower()


def test_a_socket_that_nobody_serves_is_told_apart(cli: CommandLine, tmp_path: Path) -> None:
    """E4, E7"""
    path = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert "refuse" in problem(cli, f"--engine={path}")["text"]


def test_missing_certificates_are_named_by_their_paths(cli: CommandLine) -> None:
    """E2, E7"""
    first = problem(cli, "--engine=tcp://engine.example.org:2376")
    assert "/certs/client/cert.pem" in first["text"]


def test_key_material_in_place_of_a_path_is_refused_and_not_repeated(cli: CommandLine) -> None:
    """E2, B12"""
    key = "-----BEGIN PRIVATE KEY-----\nMIISECRET"
    done = cli("status", "--json", "--engine=tcp://127.0.0.1:2376", f"--tlskey={key}")
    assert done.code == 1
    assert "MIISECRET" not in done.out + done.err


@pytest.mark.parametrize("host", ["ftp://x", "engine.example.org", "unix://relative"])
def test_an_odd_host_is_refused(cli: CommandLine, host: str) -> None:
    """E1, E7"""
    assert host in problem(cli, f"--engine={host}")["text"]
