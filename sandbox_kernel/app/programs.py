"""What ``run`` and ``exec`` share: a program's options, and exit codes as docker's.

The exit code is the program's own, 128 plus the signal when one ended it. 125 says that the
sandbox or the engine failed, or that the command line cannot be read; 126 and 127 that the program
cannot be run or is not there; 124, as of ``timeout``, that it ran out of time.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from traitlets import Bool, Float

from sandbox_kernel.app.command import ENGINE_FLAGS
from sandbox_kernel.app.display import plain
from sandbox_kernel.app.sandboxes import OWNER_ALIASES, SandboxesCommand
from sandbox_kernel.app.streaming import Signals, converse, terminal_size, to_descriptor
from sandbox_kernel.app.verbatim import Verbatim, Verbatims
from sandbox_kernel.errors import (
    SandboxError,
    SandboxExecTimeoutError,
    SandboxSpecRejectedError,
    SandboxStartError,
)
from sandbox_kernel.process.output import Captures
from sandbox_kernel.process.result import CommandError, CommandNotFoundError, Exit
from sandbox_kernel.process.run import CAPTURE_LIMIT
from sandbox_kernel.sandbox.opening import Opening
from sandbox_kernel.sandbox.order import Timeouts
from sandbox_kernel.sandbox.program import SandboxProcess
from sandbox_kernel.sandbox.request import CONFIGURED, Configured

__all__ = ["PROGRAM_ALIASES", "PROGRAM_FLAGS", "ProgramCommand"]

OWN_FAILURE: Final = 125
_NOT_EXECUTABLE: Final = 126
_NOT_FOUND: Final = 127
_TIMED_OUT: Final = 124
_KILLED: Final = 137

PROGRAM_ALIASES: dict[Any, Any] = {
    **OWNER_ALIASES,
    ("e", "env"): (
        "ProgramCommand.environment",
        "NAME=VALUE, or NAME for its value here; may be repeated.",
    ),
    ("w", "cwd"): ("ProgramCommand.cwd", "Working directory, below /workspace or absolute."),
    "timeout": ("ProgramCommand.timeout", "Seconds until it is stopped; 0 for no end."),
    "shell": ("ProgramCommand.shell", "A command line for sh, instead of a program."),
}

PROGRAM_FLAGS: dict[Any, Any] = {
    **ENGINE_FLAGS,
    ("i", "interactive"): (
        {"ProgramCommand": {"interactive": True}},
        "Pass on what is typed; input that is no terminal always is.",
    ),
    ("t", "tty"): ({"ProgramCommand": {"tty": True}}, "Run it on a terminal: yours."),
}


class ProgramCommand(SandboxesCommand):
    """Base of the two."""

    aliases = PROGRAM_ALIASES
    flags = PROGRAM_FLAGS

    usage_code = OWN_FAILURE
    first_word_ends = True

    environment = Verbatims(help="NAME=VALUE, or NAME. Since 0.2.").tag(config=True)
    cwd = Verbatim("", help="Working directory. Since 0.2.").tag(config=True)
    timeout = Float(
        None, allow_none=True, min=0, help="Seconds; 0 for no end, else as configured. Since 0.2."
    ).tag(config=True)
    shell = Verbatim("", help="A command line for sh. Since 0.2.").tag(config=True)
    interactive = Bool(False, help="Pass on what is typed. Since 0.2.").tag(config=True)
    tty = Bool(False, help="Run it on a terminal. Since 0.2.").tag(config=True)

    def take_program(self, words: list[str]) -> None:
        """Take the program and its arguments."""
        argv = words[1:] if words[:1] == ["--"] else words
        if bool(argv) == bool(self.shell):
            self._usage("needs either a program with its arguments, or --shell TEXT (see --help)")
        if self.tty and self.json_output:
            self._usage("--tty and --json exclude each other")
        if self.tty and not os.isatty(0):
            self._usage("--tty needs a terminal, and the standard input is none")
        self._argv = argv or ["sh", "-c", self.shell]

    def variables(self) -> dict[str, str]:
        """Return the variables for the program.

        Raises
        ------
        SandboxSpecRejectedError
            One is named that is not set here.
        """
        found: dict[str, str] = {}
        if self.tty and "TERM" in os.environ:
            found["TERM"] = os.environ["TERM"]
        for text in self.environment:
            name, equals, value = text.partition("=")
            if not equals and name not in os.environ:
                raise SandboxSpecRejectedError(
                    "env", name, "it is not set here", f"Set it, or write {name}=VALUE."
                )
            found[name] = value if equals else os.environ[name]
        return found

    def start_options(self, timeouts: Timeouts) -> dict[str, Any]:
        """Return what the program is started with."""
        return {
            "timeout": self._seconds(timeouts),
            "env": self.variables(),
            "cwd": self.cwd,
            "tty": terminal_size() if self.tty else None,
        }

    def _seconds(self, timeouts: Timeouts) -> float | Configured | None:
        if self.timeout is not None:
            return self.timeout or None
        if self.tty:
            # A person is there who ends it; only a policy knows better.
            return timeouts.most if timeouts.bounded_by else None
        return CONFIGURED

    async def talk(self, opening: Opening[SandboxProcess], signals: Signals) -> int:
        """Start the program, connect it to the standard streams, and return its exit code."""
        captures, began = Captures(CAPTURE_LIMIT), time.monotonic()
        write: Callable[..., None] = captures.put if self.json_output else to_descriptor
        feed = self.interactive or self.tty or not _stdin_is_terminal()
        async with opening as process:
            ended = await converse(process, write, signals, feed=feed, terminal=self.tty)
        if self.json_output:
            self.print_json(
                {
                    "ok": ended.code == 0,
                    "returncode": ended.code,
                    "reason": ended.reason,
                    "stdout": captures.out.value().decode("utf-8", "replace"),
                    "stderr": captures.err.value().decode("utf-8", "replace"),
                    "truncated": bool(captures.out.cut or captures.err.cut),
                    "duration": round(time.monotonic() - began, 3),
                }
            )
        else:
            self._explain(ended)
        return OWN_FAILURE if ended.code is None else ended.code

    def _explain(self, ended: Exit) -> None:
        """Say why a program ended, where its code alone does not tell."""
        if ended.reason in {"finished", "killed", "interrupted"}:
            return
        told = f"{ended.reason}: {ended.evidence}" if ended.evidence else ended.reason
        self.err.print(f"{self._called}: {plain(told)}", markup=False)

    def fail(self, error: SandboxError) -> int:
        """Show an error, and return the code for it."""
        super().fail(error)
        if isinstance(error, CommandNotFoundError):
            return _NOT_FOUND
        if isinstance(error, CommandError) and isinstance(error, SandboxStartError):
            return _NOT_EXECUTABLE
        if isinstance(error, SandboxExecTimeoutError):
            if not self.json_output:
                self.err.print("--timeout SECONDS gives it longer, and 0 has no end.")
            return _TIMED_OUT
        if isinstance(error, CommandError) and error.reason == "out-of-memory":
            return _KILLED
        return OWN_FAILURE


def _stdin_is_terminal() -> bool:
    with contextlib.suppress(OSError, ValueError):
        return sys.stdin is not None and sys.stdin.isatty()
    return False
