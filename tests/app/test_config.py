"""``jupyter sandbox config`` and what commands make of the configuration files (K7, A1)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.config import SETTINGS
from tests.app.conftest import CommandLine
from tests.engines import Engines

POLICY = "jupyter_sandbox_policy.json"
CONFIG = "jupyter_sandbox_config"


def write(cli: CommandLine, name: str, content: Any) -> Path:
    path = cli.home / "config" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_every_setting_is_shown_with_where_it_comes_from(cli: CommandLine) -> None:
    """K7"""
    python = write(cli, f"{CONFIG}.py", "c.SandboxDefaults.mem_limit = '1G'")
    drop_in = write(cli, f"{CONFIG}.d/a.json", {"SandboxDefaults": {"pids_limit": 99}})
    policy = write(cli, POLICY, {"caps": {"cpu_limit": {"max": 1}}})
    done = cli("config", "show", "--json", SANDBOX_DOCKER_NETWORK="internal")
    assert done.code == 0, done.err
    found = done.json()
    assert set(found["settings"]) == set(SETTINGS)
    expected = {
        "mem_limit": (1 << 30, "file", str(python)),
        "pids_limit": (99, "file", str(drop_in)),
        "cpu_limit": (1, "policy", str(policy)),
        "network": ("internal", "environment", "SANDBOX_DOCKER_NETWORK"),
        "runtime": (None, "built-in", ""),
    }
    for name, values in expected.items():
        shown = found["settings"][name]
        assert (shown["value"], shown["origin"], shown["where"]) == values
    assert found["files"] == [str(drop_in), str(python)]
    [said] = found["policy"]
    assert (said["file"], said["says"]) == (str(policy), {"cpu_limit": "at most 1"})


def test_people_get_a_table_and_the_policy_in_words(cli: CommandLine) -> None:
    """K7"""
    path = write(cli, f"{CONFIG}.json", {"SandboxDefaults": {"mem_limit": "1.5G"}})
    policy = write(cli, POLICY, {"network": "none", "max_sandboxes": 3})
    out = cli("config", "show").out
    [line] = [line for line in out.splitlines() if line.startswith("mem_limit ")]
    assert line.split(maxsplit=1)[1].startswith("1.5 GiB")
    assert line.endswith(str(path))
    assert "built-in default" in out
    assert f"policy {policy}" in out
    assert "  max_sandboxes: 3 for each owner" in out


def test_secrets_are_masked(cli: CommandLine) -> None:
    """B12: values of variables, and a password in an address."""
    write(
        cli,
        f"{CONFIG}.json",
        {"SandboxDefaults": {"environment": {"A": "hunter2"}, "host": "tcp://me:hunter2@engine"}},
    )
    for arguments in (("config", "show"), ("config", "show", "--json")):
        done = cli(*arguments)
        assert "hunter2" not in done.out + done.err
        assert "A" in done.out
        assert "engine" in done.out


def test_what_the_policy_refuses_of_it_is_told(cli: CommandLine) -> None:
    """A1: all of it at once, with the files on both sides; exit code 1."""
    config = write(
        cli, f"{CONFIG}.json", {"SandboxDefaults": {"mem_limit": "8G", "network": "egress"}}
    )
    policy = write(cli, POLICY, {"network": "none", "caps": {"mem_limit": {"max": "1G"}}})
    done = cli("config", "show", "--json")
    assert done.code == 1
    assert done.json()["ok"] is False
    refusals = done.json()["refusals"]
    assert len(refusals) == 2
    assert all(str(policy) in text and str(config) in text for text in refusals)
    done = cli("config", "show")
    assert done.code == 1
    assert done.err.count("Refused:") == 2


def test_the_folders_are_shown_also_when_a_file_is_broken(cli: CommandLine) -> None:
    """K7: that is when they are wanted."""
    path = write(cli, f"{CONFIG}.py", "c.SandboxDefaults.mem_limt = 1")
    write(cli, f"{CONFIG}.d/a.json", {})
    done = cli("config", "path", "--json")
    assert done.code == 0
    found = done.json()
    assert found["config"][str(path.parent)] == [f"{CONFIG}.d/a.json", f"{CONFIG}.py"]
    assert {"/etc/jupyter", "/usr/local/etc/jupyter", str(path.parent)} <= set(found["policy"])
    assert f"    {CONFIG}.py" in cli("config", "path").out
    done = cli("config", "show")
    assert done.code == 1
    assert "Did you mean mem_limit" in done.err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"StatusApp": {"imagee": "x"}}, "StatusApp.imagee"),
        ({"SandboxCommand": {"engin_host": "x"}}, "Did you mean engine_host"),
        ({"StatsApp": {"image": "x"}}, "Did you mean StatusApp"),
    ],
)
def test_a_mistyped_option_of_a_command_in_a_file_is_refused(
    cli: CommandLine, content: dict[str, Any], said: str
) -> None:
    """K7"""
    path = write(cli, f"{CONFIG}.json", content)
    problems = [c for c in cli("status", "--json").json()["checks"] if c["level"] == "problem"]
    assert problems[0]["name"] == "configuration"
    assert str(path) in problems[0]["text"]
    assert said in problems[0]["text"] + problems[0]["remedy"]


def test_options_of_commands_can_be_set_in_a_file_and_the_command_line_wins(
    cli: CommandLine, engines: Engines
) -> None:
    """K7"""
    write(cli, f"{CONFIG}.json", {"StatusApp": {"image": "from-file:1"}})
    found = cli("status", "--json", f"--engine={engines.unix}").json()["checks"]
    assert "from-file:1" in next(c["text"] for c in found if c["name"] == "image")
    found = cli("status", "--json", f"--engine={engines.unix}", "--image=other:1").json()["checks"]
    assert "other:1" in next(c["text"] for c in found if c["name"] == "image")


def test_a_further_file_is_not_taken_in_silence(cli: CommandLine) -> None:
    """K7: it would hold for the command and not for what it makes."""
    done = cli("status", "--JupyterApp.config_file=x.py")
    assert done.code == 2
    assert "JUPYTER_CONFIG_PATH" in done.err


def test_status_says_which_files_are_in_force(cli: CommandLine, engines: Engines) -> None:
    """E7"""
    config = write(cli, f"{CONFIG}.json", {"SandboxDefaults": {"image": "x:1", "cpu_limit": 1}})
    policy = write(cli, POLICY, {"max_sandboxes": 3})
    checks = {
        check["name"]: check
        for check in cli("status", "--json", f"--engine={engines.unix}").json()["checks"]
    }
    assert str(config) in checks["configuration"]["text"]
    assert str(policy) in checks["policy"]["text"]
    assert checks["policy"]["level"] in {"ok", "note"}
    assert "1 processors" in checks["sandbox"]["text"]
    assert "x:1" in checks["image"]["text"]


def test_the_options_of_commands_within_commands_can_be_set_in_a_file(cli: CommandLine) -> None:
    """K7: and those of one do not trouble another."""
    sections = {
        "FirewallPrintApp": {"format": "iptables"},
        "FirewallCheckApp": {"tier": "internal"},
    }
    write(cli, f"{CONFIG}.json", sections)
    words = ("firewall", "print", "--resolver=192.0.2.1", "--engine-control=192.0.2.2:2376")
    assert cli(*words).out.startswith("#!/bin/sh")
    write(cli, f"{CONFIG}.json", {"FirewallChekApp": {"tier": "internal"}})
    assert "Did you mean FirewallCheckApp" in cli(*words).err


def test_status_goes_on_when_the_policy_is_broken(cli: CommandLine, engines: Engines) -> None:
    """E7: a problem with its remedy, beside what can still be said."""
    policy = write(cli, POLICY, {"networkk": "none"})
    done = cli("status", "--json", f"--engine={engines.unix}")
    assert done.code == 1
    problems = [c for c in done.json()["checks"] if c["level"] == "problem"]
    assert problems[0]["name"] == "policy"
    assert f"{policy}: networkk" in problems[0]["text"]
    assert "network" in problems[0]["remedy"]


def test_a_build_needs_no_permission_for_the_default_image(
    cli: CommandLine, engines: Engines
) -> None:
    """A1: but for its engine."""
    write(cli, POLICY, {"images": ["other:1"], "engine_hosts": [engines.unix]})
    done = cli("build", "--check", "--tag=sandbox-kernel-test/none:1", f"--engine={engines.unix}")
    assert "is not on the engine" in done.err
    done = cli("build", "--check", "--engine=unix:///tmp/other.sock")
    assert done.code == 1
    assert "does not allow this engine" in done.err


def test_an_installed_kernel_follows_the_configuration_in_what_it_leaves_out(
    cli: CommandLine, engines: Engines
) -> None:
    """K7: the kernelspec holds only what was asked for."""
    write(cli, f"{CONFIG}.json", {"SandboxDefaults": {"image": "sandbox-kernel-test/none:7"}})
    done = cli("install", "--json", f"--prefix={cli.prefix}", f"--engine={engines.unix}")
    assert done.json()["image"] == "sandbox-kernel-test/none:7"
    spec = json.loads((Path(done.json()["folder"]) / "kernel.json").read_text())
    assert "image" not in spec["metadata"]["kernel_provisioner"]["config"]
