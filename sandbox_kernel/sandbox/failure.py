"""`CommandFailedError`: the result of a command whose caller had asked for success."""

from __future__ import annotations

import subprocess
from typing import Final

from sandbox_kernel.errors import SandboxRunError
from sandbox_kernel.process.result import RunResult

__all__ = ["CommandFailedError"]

_LAST_LINES: Final = 5
_LAST_CHARACTERS: Final = 1000


class CommandFailedError(SandboxRunError, subprocess.CalledProcessError):
    """A command did not end with code 0; code written for `subprocess` catches it too.

    Parameters
    ----------
    program
        The program; its arguments, which can be secrets, are not told.
    result
        What it gave.
    """

    def __init__(self, program: str, result: RunResult) -> None:
        self.result = result
        # Not known is `None` here too, which is not what the base class declares.
        code: int = result.returncode  # type: ignore[assignment]
        subprocess.CalledProcessError.__init__(self, code, program, result.stdout, result.stderr)

    def __str__(self) -> str:
        code = self.result.returncode
        text = f"{self.cmd} ended with " + ("an unknown code" if code is None else f"code {code}")
        if self.result.reason != "finished":
            evidence = f": {self.result.evidence}" if self.result.evidence else ""
            text += f" ({self.result.reason}{evidence})"
        lines = self.result.stderr_text.rstrip().splitlines()[-_LAST_LINES:]
        if not lines:
            return text
        return f"{text}; the end of its error output:\n" + "\n".join(lines)[-_LAST_CHARACTERS:]
