"""The error of a launch that failed, in the form that every Jupyter client shows (K8)."""

from __future__ import annotations

import textwrap
from typing import Final

from tornado import web

from sandbox_kernel.errors import SandboxError, SandboxSpecRejectedError
from sandbox_kernel.process.result import CommandNotFoundError

_DIALOG: Final = 100


class KernelLaunchError(web.HTTPError, SandboxError, RuntimeError):
    """A kernel could not be started; the text says why and what to do.

    A Jupyter server passes only the text of tornado's ``HTTPError`` on to the person; scripts
    that start kernels expect a `RuntimeError`. This is both.

    Parameters
    ----------
    message
        The text for the person.
    status
        400 when the request was wrong, 503 when the engine could not serve it.
    """

    def __init__(self, message: str, status: int = 503) -> None:
        super().__init__(status, _in_lines(message))
        self.message = message

    def __str__(self) -> str:
        return self.message


def _in_lines(text: str) -> str:
    """Break lines where JupyterLab's dialog, which wraps none, would cut them off."""
    return "\n".join(
        textwrap.fill(line, _DIALOG, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )


class KernelNotFoundError(KernelLaunchError, FileNotFoundError):
    """The image has no such program; a local kernel's manager raises `FileNotFoundError` then."""


def launch_error(error: Exception) -> KernelLaunchError:
    """Return the launch error that tells of ``error``; raise it ``from`` that."""
    status = 400 if isinstance(error, SandboxSpecRejectedError) else 503
    notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    kind = KernelNotFoundError if isinstance(error, CommandNotFoundError) else KernelLaunchError
    return kind(f"{error}{notes}", status)
