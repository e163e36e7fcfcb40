"""The command line as a whole: help, wrong calls, speed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sandbox_kernel import __version__
from sandbox_kernel.app.ls import LsApp
from sandbox_kernel.app.main import _COMMANDS
from sandbox_kernel.errors import SandboxError
from tests.app.conftest import CommandLine

pytestmark = pytest.mark.timeout(60)


def test_without_a_command_it_names_the_commands(cli: CommandLine) -> None:
    done = cli()
    assert done.code == 0
    assert all(name in done.out for name in _COMMANDS)


@pytest.mark.parametrize("command", _COMMANDS)
def test_each_command_explains_itself_with_examples(cli: CommandLine, command: str) -> None:
    done = cli(command, "--help")
    assert done.code == 0
    assert "Examples" in done.out
    assert f"jupyter sandbox {command}" in done.out


def test_it_tells_its_version(cli: CommandLine) -> None:
    assert cli("--version").out.strip() == __version__


def test_an_unknown_command_is_refused_and_the_known_ones_are_named(cli: CommandLine) -> None:
    done = cli("statsu")
    assert done.code == 2
    assert "statsu" in done.err
    assert "status" in done.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("install", "--mem-limt", "2G"),
        ("install", "surplus"),
        ("build", "--target", "fuller"),
        ("install", "--cpu-limit", "many"),
    ],
)
def test_a_mistyped_option_is_refused_and_never_ignored(
    cli: CommandLine, arguments: tuple[str, ...]
) -> None:
    done = cli(*arguments)
    assert done.code in {1, 2}
    assert not (cli.home / "prefix").exists()
    assert not (cli.home / "data").exists()
    assert any(word in done.err for word in arguments[1:])


def test_a_misspelt_variable_of_the_environment_is_refused(cli: CommandLine) -> None:
    done = cli("status", "--json", SANDBOX_DOCKER_HOTS="unix:///x.sock")
    assert done.code == 1
    problem = next(c for c in done.json()["checks"] if c["level"] == "problem")
    assert "SANDBOX_DOCKER_HOTS" in problem["text"]


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    heavy = ["aiodocker", "aiohttp", "rich", "zmq", "jupyter_client", "nbformat", "IPython"]
    code = f"import sys, sandbox_kernel.app.main; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_error_cannot_change_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """E6: its text may hold what a build or an engine has written."""
    command = LsApp()
    assert command.fail(SandboxError("a\x1b]0;title\x07b\x9b31mc")) == 1
    said = capsys.readouterr().err
    assert "Error:" in said
    assert not set(said) & set("\x1b\x07\x9b")


@pytest.mark.parametrize(
    "arguments",
    [
        ("config", "show", "--SandboxDefaults.mem_limit=64M"),
        ("run", "--SandboxProvisioner.network=none", "true"),
        ("ls", "--Nonsense.thing=1"),
        ("ls", "--LsApp.nosuch=1"),
    ],
)
def test_an_option_of_a_class_that_reads_none_is_refused(
    cli: CommandLine, arguments: tuple[str, ...]
) -> None:
    """K7: a limit that is written down and does not hold would be worse than none."""
    done = cli(*arguments)
    assert done.code == (125 if arguments[0] == "run" else 2)
    assert "there is no option --" in done.err
    assert done.out == ""


@pytest.mark.parametrize(
    "arguments", [("pause", "--longest", "abc", "x"), ("build", "--target", "foo")]
)
def test_a_value_of_the_wrong_kind_is_a_wrong_command_line(
    cli: CommandLine, arguments: tuple[str, ...]
) -> None:
    """E6, B8: 1 would be an answer, as to `build --check`."""
    done = cli(*arguments)
    assert done.code == 2
    assert arguments[1].strip("-") in done.err
