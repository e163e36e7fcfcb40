"""What the wrapper reads on its stdin before it starts a command (contract W1, W2).

Argv, variables and working directory travel there and nowhere else: the engine shows the argv
and the environment of an exec to everybody who may inspect or watch it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from sandbox_kernel.errors import SandboxSpecRejectedError

LONGEST: Final = 128 * 1024 - 1
"""Bytes of one argument or variable: the kernel takes no longer one."""

MARKER: Final = "SANDBOX_KERNEL_COMMAND"
"""The variable by which a stop knows the processes of one command that left its tree."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# Names that one shell or another keeps to itself, so that the wrapper could not pass them on.
_SHELLS_OWN: Final = frozenset(
    (
        *("_", "PPID", "UID", "EUID", "GROUPS", "OPTIND", "LINENO", "RANDOM", "SRANDOM", "SECONDS"),
        *("EPOCHSECONDS", "EPOCHREALTIME", "FUNCNAME", "DIRSTACK", "HISTCMD", "PIPESTATUS"),
        *("BASHOPTS", "SHELLOPTS", "BASHPID", "BASH_VERSINFO", "BASH_SUBSHELL", "BASH_COMMAND"),
        *("BASH_ARGC", "BASH_ARGV", "BASH_ARGV0", "BASH_LINENO", "BASH_SOURCE", MARKER),
    )
)


def preamble(
    nonce: str,
    marker: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    *,
    stay: bool = False,
) -> bytes:
    """Return the wrapper's input up to the answer to its report "ready".

    Parameters
    ----------
    nonce
        What its reports are to begin with.
    marker
        The value of `MARKER`.
    argv, env, cwd
        The command.
    stay
        Whether the wrapper is to stay, after its command, until its input ends.

    Raises
    ------
    SandboxSpecRejectedError
        It cannot be passed on as it is; a variable's value is never shown.
    """
    check(argv, env, cwd)
    variables = _pairs({**env, MARKER: marker})
    return frame((nonce, cwd, "stay" if stay else "", *_counted(variables), *_counted(argv)))


def check(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
    """Refuse a command that no wrapper could start as it is."""
    if not argv or not argv[0]:
        raise SandboxSpecRejectedError("argv", list(argv), "it names no program", "Name one.")
    for name in env:
        if not _NAME.match(name) or name in _SHELLS_OWN:
            raise SandboxSpecRejectedError(
                "env", name, "a shell cannot export this name", "Use another name."
            )
    for setting, values in (("argv", argv), ("env", _pairs(env)), ("cwd", (cwd,))):
        for value in values:
            if "\0" in value:
                raise SandboxSpecRejectedError(
                    setting, None, "it holds a NUL character", "Remove it."
                )
            try:
                size = len(value.encode("utf-8", "surrogateescape"))
            except UnicodeEncodeError as error:
                raise SandboxSpecRejectedError(
                    setting, None, "it holds a character that has no bytes", "Remove it."
                ) from error
            if size > LONGEST:
                raise SandboxSpecRejectedError(
                    setting,
                    None,
                    f"one of its strings is longer than the {LONGEST} bytes that a kernel takes",
                    "Send it as the command's input, or put it into a file.",
                )


def frame(values: Iterable[str]) -> bytes:
    """Put each value after a line with its number of lines, which is all that a shell can count."""
    framed = bytearray()
    for value in values:
        framed += b"%d\n%s\n" % (value.count("\n") + 1, value.encode("utf-8", "surrogateescape"))
    return bytes(framed)


def _pairs(env: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in env.items()]


def _counted(values: Sequence[str]) -> tuple[str, ...]:
    return (str(len(values)), *values)
