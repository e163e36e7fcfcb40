"""A command as a caller asks for it, checked before anything is done (C1, C4, F2).

What a value means in the sandbox is settled here: a relative working directory lies in the
workspace, text is UTF-8. Errors never show an argument or a value of a variable.
"""

from __future__ import annotations

import math
import os
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final, NoReturn

from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.sandbox.container import WORKSPACE
from sandbox_kernel.sandbox.order import Timeouts

__all__ = [
    "CONFIGURED",
    "CommandRequest",
    "Configured",
    "check_bytes",
    "check_command",
    "check_limit",
    "check_terminal",
    "to_bytes",
]


class Configured(Enum):
    """The type of `CONFIGURED`."""

    VALUE = "as configured"

    def __repr__(self) -> str:
        return "CONFIGURED"


CONFIGURED: Final = Configured.VALUE
"""Stands for the timeout that the configuration gives to a command."""

_MOST_BYTES: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class CommandRequest:
    """A command that can be started as it is.

    Parameters
    ----------
    argv
        The program and its arguments.
    env
        Variables besides the container's own.
    cwd
        The working directory, absolute.
    timeout, idle_timeout
        In seconds; `None` for none.
    """

    argv: tuple[str, ...] = field(repr=False)
    env: Mapping[str, str] = field(repr=False)
    cwd: str
    timeout: float | None
    idle_timeout: float | None


def check_command(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None,
    defaults: Mapping[str, str],
    cwd: str | os.PathLike[str],
    timeout: float | Configured | None,
    idle_timeout: float | None,
    timeouts: Timeouts,
) -> CommandRequest:
    """Check what a caller asks for.

    Parameters
    ----------
    argv, env, cwd, timeout, idle_timeout
        As given to `Sandbox.run`.
    defaults
        Variables that `env` adds to.
    timeouts
        What holds for the commands of the sandbox.

    Raises
    ------
    SandboxSpecRejectedError
        Something of it cannot be done.
    """
    return CommandRequest(
        _words(argv),
        MappingProxyType({**defaults, **_variables(env)}),
        _directory(cwd),
        _timeout(timeout, timeouts),
        check_limit("idle_timeout", idle_timeout, timeouts.most),
    )


def _timeout(value: float | Configured | None, timeouts: Timeouts) -> float | None:
    if value is CONFIGURED:
        return timeouts.default
    if value is None and timeouts.bounded_by:
        _refuse(
            "timeout",
            None,
            f"the policy in {timeouts.bounded_by} allows at most {timeouts.most:g}",
            f"Ask for at most {timeouts.most:g}.",
        )
    return check_limit("timeout", value, timeouts.most)


def check_limit(setting: str, value: float | None, most: float) -> float | None:
    """Check a number that must be above zero and at most something, or `None`."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        _refuse(setting, value, "this is not a number", f"Use more than 0 and at most {most:g}.")
    if not 0 < value <= most:
        remedy = f"Use more than 0 and at most {most:g}"
        if setting == "timeout":
            remedy += ", None for no timeout, or make the sandbox with another max_timeout"
        _refuse(setting, value, "this is out of range", f"{remedy}.")
    return value


def check_bytes(setting: str, value: int) -> int:
    """Check an amount of bytes that must be above zero."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MOST_BYTES:
        _refuse(setting, value, "this is not an amount of bytes", "Use a whole number above 0.")
    return value


def check_terminal(size: tuple[int, int] | None) -> tuple[int, int] | None:
    """Check the form of a terminal's size; how large one may be is known where it is made."""
    if size is None:
        return None
    parts = tuple(size) if isinstance(size, Sequence) else ()
    if len(parts) != 2 or not all(type(part) is int for part in parts):
        _refuse("tty", size, "that is no size of a terminal", "Give rows and columns, as (24, 80).")
    return parts[0], parts[1]


def to_bytes(setting: str, data: bytes | str) -> bytes:
    """Return input for a command; text is encoded as UTF-8."""
    if isinstance(data, str):
        return data.encode("utf-8", "surrogateescape")
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    _refuse(setting, None, f"this is {type(data).__name__}", "Give bytes, or text.")


def _words(argv: Sequence[str]) -> tuple[str, ...]:
    if isinstance(argv, str | bytes):
        _refuse(
            "argv",
            None,
            "this is one text and not a list of words",
            "Use shell(text) for a shell's command line, or a list: ['ls', '-l'].",
        )
    words = tuple(argv) if isinstance(argv, Sequence) else ()
    if not words or not words[0]:
        _refuse("argv", None, "this names no program", "Give a list: ['ls', '-l'].")
    for number, word in enumerate(words):
        if not isinstance(word, str):
            kind = type(word).__name__
            _refuse(f"argv[{number}]", None, f"this is {kind}", "Make every word a string.")
        _no_nul(f"argv[{number}]", word)
    return words


def _variables(env: Mapping[str, str] | None) -> Mapping[str, str]:
    if env is None:
        return {}
    items = list(env.items()) if isinstance(env, Mapping) else None
    if items is None or not all(isinstance(k, str) and isinstance(v, str) for k, v in items):
        _refuse("env", None, "this must map names to texts", "Make every value a string.")
    for name, value in items:
        _no_nul(f"env[{name!r}]", value)
    return dict(items)


def _directory(cwd: str | os.PathLike[str]) -> str:
    place = os.fspath(cwd) if isinstance(cwd, str | os.PathLike) else None
    if not isinstance(place, str):
        _refuse("cwd", None, f"this is {type(cwd).__name__}", "Give a path.")
    _no_nul("cwd", place)
    if place.startswith("/"):
        return place
    within = posixpath.normpath(place or ".")
    if within == ".." or within.startswith("../"):
        reason = f"this leads out of {WORKSPACE}, under which a relative path lies"
        _refuse("cwd", place, reason, "Give a path below it, or an absolute one.")
    return posixpath.normpath(posixpath.join(WORKSPACE, within))


def _no_nul(setting: str, text: str) -> None:
    if "\0" in text:
        _refuse(setting, None, "it holds a NUL character", "Remove it; input may hold any byte.")


def _refuse(setting: str, value: object, reason: str, remedy: str) -> NoReturn:
    raise SandboxSpecRejectedError(setting, value, reason, remedy)
