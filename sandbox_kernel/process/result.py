"""What a command gave and how it ended: the values that cross from here to callers.

Nothing here does I/O. A return code is `None` when it is not known; it is never invented.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sandbox_kernel.errors import (
    SandboxError,
    SandboxExecTimeoutError,
    SandboxGoneError,
    SandboxStartError,
    SandboxUnknownOutcomeError,
)

Reason = Literal[
    "finished",
    "timeout",
    "idle-timeout",
    "killed",
    "interrupted",
    "out-of-memory",
    "pids-limit",
    "disk-full",
    "output-limit",
    "engine-lost",
    "start-failed",
    "unknown",
]
"""Why a command ended; a program that ends by itself with 137 has "finished".

``killed`` and ``interrupted`` are ours; ``out-of-memory``, ``pids-limit`` and ``disk-full`` say
that the command failed and that the kernel counted such a refusal in the sandbox meanwhile:
where several commands run at once, it may have been another one that was refused.
"""


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
    evidence
        For people: what was counted that gave the reason, or "".
    peak_memory
        Most bytes of memory that the whole sandbox, not this command, has used at once since it
        was made; `None` where the kernel does not tell.
    artifacts
        Whether something lay in ``/output`` then, from this command or an earlier one.
    cpu_seconds
        Processor time of the whole sandbox while it ran; `None` where the kernel does not tell.
    """

    code: int | None
    reason: Reason
    held: bool = False
    evidence: str = field(default="", compare=False)
    peak_memory: int | None = field(default=None, compare=False)
    artifacts: bool = field(default=False, compare=False)
    cpu_seconds: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a one-shot command gave.

    `stdout` and `stderr` hold at most the capture limit, with a cut marked in the bytes;
    `stdout_bytes` and `stderr_bytes` count the whole output, `stdout_cut` and `stderr_cut` what
    of it is not here. `duration` is in seconds. The other fields are those of `Exit`.
    """

    returncode: int | None
    reason: Reason
    stdout: bytes = field(repr=False)
    stderr: bytes = field(repr=False)
    stdout_bytes: int
    stderr_bytes: int
    truncated: bool
    duration: float
    stdout_cut: int = 0
    stderr_cut: int = 0
    peak_memory: int | None = None
    evidence: str = ""

    @property
    def stdout_text(self) -> str:
        """The captured stdout as text."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        """The captured stderr as text."""
        return self.stderr.decode("utf-8", "replace")


class CommandError(SandboxError):
    """A command did not come to an end of its own.

    Attributes
    ----------
    reason
        Why, as a result would say it.
    result
        What it had given until then, where a one-shot call collected it.
    """

    reason: Reason = "unknown"
    result: RunResult | None = None


class CommandStartError(CommandError, SandboxStartError):
    """Nothing of the command ran."""

    reason: Reason = "start-failed"


class CommandNotFoundError(CommandStartError):
    """The sandbox has no such program: another one, or another image, can help."""


class CommandTimeoutError(CommandError, SandboxExecTimeoutError):
    """A command ran into a timeout; the counts include what was on its way (W19).

    Parameters
    ----------
    timeout
        Seconds that it had: in all, or without output when `reason` is ``idle-timeout``.
    stdout_bytes, stderr_bytes
        What it had written.
    reason
        Which of the two it was.
    stopped
        Whether it was stopped; where not, a note says why.
    """

    def __init__(
        self,
        timeout: float,
        stdout_bytes: int,
        stderr_bytes: int,
        reason: Literal["timeout", "idle-timeout"] = "timeout",
        *,
        stopped: bool = True,
    ) -> None:
        self.timeout = timeout
        self.stdout_bytes = stdout_bytes
        self.stderr_bytes = stderr_bytes
        self.reason = reason
        what = (
            f"was still running after {timeout:g} s"
            if reason == "timeout"
            else f"had written nothing for {timeout:g} s"
        )
        then = "was stopped" if stopped else "could not be stopped"
        super().__init__(
            f"The command {what} and {then}; it had written "
            f"{stdout_bytes} bytes to stdout and {stderr_bytes} to stderr"
        )


class CommandOutputError(CommandError):
    """A command was stopped because its output could not be taken any more."""

    reason: Reason = "output-limit"


class CommandUnknownError(CommandError, SandboxUnknownOutcomeError):
    """How a command ended is not known; with the reason ``engine-lost`` it may still be running.

    `Process.reattach` and `Process.kill` may then still reach it.
    """

    def __init__(self, message: str, reason: Reason = "unknown") -> None:
        super().__init__(message)
        self.reason = reason


class CommandGoneError(CommandError, SandboxGoneError):
    """The sandbox ended while the command ran in it."""

    def __init__(self, message: str, reason: Reason = "unknown") -> None:
        super().__init__(message)
        self.reason = reason
