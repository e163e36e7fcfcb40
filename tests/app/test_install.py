"""``jupyter sandbox install`` (K1, K7)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.app.conftest import CommandLine
from tests.engines import Engines

NO_ENGINE = "--engine=/nonexistent/engine.sock"


def config_of(cli: CommandLine, *arguments: str) -> dict[str, Any]:
    done = cli("install", "--json", f"--prefix={cli.prefix}", *arguments)
    assert done.code == 0, done.err
    spec = json.loads((Path(done.json()["folder"]) / "kernel.json").read_text())
    return dict(spec["metadata"]["kernel_provisioner"]["config"])


def test_only_the_given_options_are_written(cli: CommandLine, engines: Engines) -> None:
    """K7"""
    assert config_of(cli) == {}
    assert config_of(
        cli, "--image=x:1", "--mem-limit=2G", "--cpu-limit=1.5", "--pids-limit=100",
        "--env=A=1=2", "--env=B=", "--env-keep=LANG", f"--engine={engines.unix}",
    ) == {
        "image": "x:1", "mem_limit": "2G", "cpu_limit": 1.5, "pids_limit": 100,
        "environment": {"A": "1=2", "B": ""}, "env_keep": ["LANG"], "host": engines.unix,
    }  # fmt: skip


def test_every_option_is_a_trait_of_the_provisioner(cli: CommandLine) -> None:
    """K7: Jupyter ignores a value that the provisioner has no trait for."""
    from sandbox_kernel.kernel.provisioner import SandboxProvisioner

    written = config_of(
        cli, "--mem-limit=1G", "--cpu-limit=1", "--pids-limit=99", "--env=A=1", "--env-keep=B",
        "--workspace=notebook", "--network=internal", "--template=.", "--project=.",
        "--files=none",
        NO_ENGINE, "--tlscert=c.pem", "--tlskey=k.pem", "--tlscacert=a.pem",
    )  # fmt: skip
    assert set(written) <= set(SandboxProvisioner.class_trait_names())
    for path in ("tls_cert_path", "template", "project"):
        assert Path(written[path]).is_absolute()
    assert (written["workspace"], written["network"]) == ("notebook", "internal")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--mem-limit=2 parsecs", "mem_limit"),
        ("--cpu-limit=0", "cpu_limit"),
        ("--pids-limit=-1", "pids_limit"),
        ("--env=NOVALUE", "NAME=VALUE"),
        ("--env=1A=x", "NAME=VALUE"),
        ("--env-keep=A=B", "env_keep"),
        ("--name=a b", "name"),
        ("--image=a b", "image"),
        ("--network=host", "network"),
        ("--template=/no/folder", "template"),
        ("--project=/no/folder", "project"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_and_nothing_is_written(
    cli: CommandLine, option: str, said: str
) -> None:
    """K7"""
    done = cli("install", f"--prefix={cli.prefix}", option)
    assert done.code == 1
    assert said in done.err
    assert not (cli.prefix / "share/jupyter/kernels").exists()


def test_a_secret_in_a_malformed_variable_is_not_repeated(cli: CommandLine) -> None:
    """B12"""
    done = cli("install", f"--prefix={cli.prefix}", "--env=TOKEN:hunter2")
    assert done.code == 1
    assert "hunter2" not in done.out + done.err


def test_no_engine_is_needed_to_install(cli: CommandLine) -> None:
    """K1"""
    done = cli("install", f"--prefix={cli.prefix}", NO_ENGINE)
    assert done.code == 0
    assert "Installed" in done.out
    assert "Note:" in done.err


def test_a_missing_image_is_told(cli: CommandLine, engines: Engines) -> None:
    """E5"""
    done = cli(
        "install", f"--prefix={cli.prefix}", "--image=sandbox-kernel-test/none:1",
        f"--engine={engines.unix}",
    )  # fmt: skip
    assert done.code == 0
    assert "does not have sandbox-kernel-test/none:1" in done.err


def test_it_goes_to_the_persons_own_folder_when_asked(cli: CommandLine) -> None:
    """K1"""
    done = cli("install", "--user", "--json", NO_ENGINE)
    assert done.json()["folder"].startswith(str(cli.home / "data"))


def test_two_places_at_once_are_refused(cli: CommandLine) -> None:
    """K1"""
    done = cli("install", "--user", f"--prefix={cli.prefix}")
    assert done.code == 2
    assert "exclude each other" in done.err


def test_status_finds_what_was_installed(cli: CommandLine, engines: Engines) -> None:
    """E7"""
    config_of(cli, "--name=sandbox-other", "--display-name=Another", NO_ENGINE)
    checks = cli("status", "--json", f"--engine={engines.unix}").json()["checks"]
    [kernel] = [check for check in checks if check["name"] == "kernel"]
    assert kernel["level"] == "ok"
    assert "sandbox-other" in kernel["text"]


def spec_of(cli: CommandLine, *arguments: str) -> dict[str, Any]:
    done = cli("install", "--json", f"--prefix={cli.prefix}", NO_ENGINE, *arguments)
    assert done.code == 0, done.err
    return dict(json.loads((Path(done.json()["folder"]) / "kernel.json").read_text()))


def test_a_kernel_of_any_language_can_be_installed(cli: CommandLine) -> None:
    """K2: with its command, its way of being interrupted, and no promise that is Python's."""
    spec = spec_of(
        cli, "--language=bash", "--name=sandbox-bash", "--display-name=Bash (sandbox)",
        "--image=x:1", "--argv=bash-kernel 'a b' -f {connection_file}",
    )  # fmt: skip
    assert spec["argv"] == ["bash-kernel", "a b", "-f", "{connection_file}"]
    assert (spec["language"], spec["display_name"]) == ("bash", "Bash (sandbox)")
    assert (spec["interrupt_mode"], spec["metadata"]["debugger"]) == ("signal", False)
    assert "supported_encryption" not in spec["metadata"]
    spec = spec_of(cli, "--language=r", "--interrupt-mode=message")
    assert (spec["language"], spec["display_name"]) == ("R", "R (sandbox)")
    assert spec["interrupt_mode"] == "message"
    assert spec["metadata"]["kernel_provisioner"]["config"]["image"] == "sandbox-kernel/r:latest"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--language=bash",), "--argv"),
        (("--language=bash", "--argv=x {connection_file}"), "--image"),
        (("--argv=x 'y",), "words"),
        (("--argv=x",), "{connection_file}"),
        (("--language=r", "--interrupt-mode=shout"), "interrupt_mode"),
    ],
)
def test_a_kernel_that_could_not_start_is_not_installed(
    cli: CommandLine, arguments: tuple[str, ...], said: str
) -> None:
    """K2"""
    done = cli("install", f"--prefix={cli.prefix}", NO_ENGINE, *arguments)
    assert done.code != 0
    assert said in done.err
    assert not list(cli.prefix.rglob("kernel.json"))
