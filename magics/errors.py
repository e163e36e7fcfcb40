"""What the magics raise: the errors of `sandbox_kernel`, with the result where there is one.

Code written for `subprocess` (`CalledProcessError`, `TimeoutError`) and for files
(`PermissionError`) catches them too. An error is shown as its own words: where in our code it
came up helps nobody, and ``%tb`` still tells it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from sandbox_magics import view
from sandbox_magics.text import clean

from sandbox_kernel import errors

if TYPE_CHECKING:
    from sandbox_magics.result import SandboxResult

__all__ = [
    "SandboxImageMissing",
    "SandboxNetworkDenied",
    "SandboxRunError",
    "SandboxTimeoutError",
    "SandboxUnavailable",
    "SandboxUnknownOutcome",
    "presented",
]

_LAST_LINES: Final = 5
_LAST_CHARACTERS: Final = 2000

SandboxUnavailable = errors.SandboxUnavailableError
SandboxImageMissing = errors.SandboxImageMissingError


class SandboxRunError(errors.SandboxRunError, subprocess.CalledProcessError):
    """A run did not succeed; also a `subprocess.CalledProcessError`.

    Parameters
    ----------
    result
        What it gave.
    """

    def __init__(self, result: SandboxResult) -> None:
        self.result = result
        # Not known is `None` here too, which is not what the base class declares.
        code: int = result.returncode  # type: ignore[assignment]
        subprocess.CalledProcessError.__init__(
            self, code, list(result.argv), result.stdout, result.stderr
        )

    def __str__(self) -> str:
        return _with_last_lines(_sentence(self.result), self.result)


class SandboxTimeoutError(errors.SandboxExecTimeoutError):
    """A run was still going at its timeout and was stopped; also a `TimeoutError`.

    Parameters
    ----------
    result
        What it had given until then.
    """

    def __init__(self, result: SandboxResult) -> None:
        self.result = result
        super().__init__(str(result))

    def __str__(self) -> str:
        totals = self.result.totals
        wrote = f"it had written {totals['stdout']} bytes to stdout, {totals['stderr']} to stderr"
        left = (
            "something of it may still run"
            if self.result.survivors
            else "nothing of it runs any more"
        )
        return _with_last_lines(f"{_sentence(self.result)}; {wrote}; {left}", self.result)


class SandboxNetworkDenied(errors.SandboxError, PermissionError):
    """A run wanted the network and did not get it; nothing was started."""


class SandboxUnknownOutcome(errors.SandboxUnknownOutcomeError):
    """The connection to the engine broke during a run, which may still be going.

    Parameters
    ----------
    result
        What it had given until then.
    cause
        What happened.
    reattach
        Looks again.
    """

    def __init__(
        self, result: SandboxResult, cause: str, reattach: Callable[[float], SandboxResult]
    ) -> None:
        self.result = result
        self._reattach = reattach
        super().__init__(cause)

    def reattach(self, timeout: float = 10.0) -> SandboxResult:
        """Look again how the run ended, over a new connection.

        Parameters
        ----------
        timeout
            Seconds to wait for its end.

        Returns
        -------
        SandboxResult
            With the code that it ended with. Output of the time between is lost.

        Raises
        ------
        SandboxError
            The engine cannot be reached still, or the run goes on.
        """
        return self._reattach(timeout)


def presented(error: BaseException) -> BaseException:
    """Have IPython show an error as its own words the first time, and in full for ``%tb``."""
    shown = False

    def render() -> list[str]:
        nonlocal shown
        if not shown:
            shown = True
            return short(error)
        shell = _shell()
        if shell is None:
            return short(error)
        kind, trace = type(error), error.__traceback__
        lines: list[str] = shell.InteractiveTB.structured_traceback(kind, error, trace)
        return lines

    error._render_traceback_ = render  # type: ignore[attr-defined]
    return error


def short(error: BaseException) -> list[str]:
    """Return the words of an error and its notes, as IPython wants them."""
    lines = [f"{type(error).__name__}: {error}"]
    lines += [f"  {note}" for note in getattr(error, "__notes__", ())]
    return lines


def _shell() -> Any:
    module = sys.modules.get("IPython")
    return None if module is None else module.get_ipython()


def _sentence(result: SandboxResult) -> str:
    _, words = view.ending(result)
    command = view.command_text(result.argv, 80)
    return f"{command}: {words}"


def _with_last_lines(text: str, result: SandboxResult) -> str:
    lines = clean(result.stderr[-_LAST_CHARACTERS:]).rstrip().splitlines()[-_LAST_LINES:]
    if not lines:
        return text
    return f"{text}. The end of its error output:\n" + "\n".join(lines)
