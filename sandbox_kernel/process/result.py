"""What a command gave and how it ended: the values that cross from here to callers.

Nothing here does I/O. A return code is `None` when it is not known; it is never invented.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sandbox_kernel.errors import SandboxExecTimeoutError

Reason = Literal["finished", "timeout", "killed", "out-of-memory", "output-limit", "unknown"]
"""Why a command ended; a program that ends by itself with 137 has "finished"."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of output: stream 1 is stdout, 2 is stderr."""

    stream: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a command's output.

    Parameters
    ----------
    code
        The command's own exit code; 128 plus the signal when one ended it.
    reason
        Why it ended.
    held
        Whether, after a stop, some process may still hold the output.
    """

    code: int | None
    reason: Reason
    held: bool = False


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a one-shot command gave.

    `stdout` and `stderr` hold at most the capture limit; the byte counts are those of the whole
    output, and a cut is marked in the bytes.
    """

    returncode: int | None
    reason: Reason
    stdout: bytes = field(repr=False)
    stderr: bytes = field(repr=False)
    stdout_bytes: int
    stderr_bytes: int
    truncated: bool
    duration: float

    @property
    def stdout_text(self) -> str:
        """The captured stdout as text."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        """The captured stderr as text."""
        return self.stderr.decode("utf-8", "replace")


class CommandTimeoutError(SandboxExecTimeoutError):
    """A command ran into its timeout; the counts include what was on its way (W19)."""

    def __init__(self, timeout: float, stdout_bytes: int, stderr_bytes: int) -> None:
        self.timeout = timeout
        self.stdout_bytes = stdout_bytes
        self.stderr_bytes = stderr_bytes
        super().__init__(
            f"The command was still running after {timeout:g} s and was stopped; it had written "
            f"{stdout_bytes} bytes to stdout and {stderr_bytes} to stderr"
        )
