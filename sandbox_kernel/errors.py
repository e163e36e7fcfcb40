"""The one exception tree of sandbox-kernel.

A class says what the caller can do about the failure: change the request, start or repair
the engine, get an image, wait longer, or accept that the outcome is unknown. The text of an
error is written for the person who reads it in a notebook: it never holds a host path that
the person did not configure, a key, a token or the value of an environment variable.
"""

from __future__ import annotations

from typing import Literal

UnavailableKind = Literal[
    "not-configured",
    "no-socket",
    "permission-denied",
    "refused",
    "tls",
    "not-docker",
    "api-too-old",
    "silent",
    "lost",
]
"""Why an engine cannot be used; each kind has a remedy of its own (feature E4)."""


class SandboxError(Exception):
    """Base of every error that sandbox-kernel raises on purpose."""


class SandboxSpecRejectedError(SandboxError, ValueError):
    """A request was refused before anything was created.

    Parameters
    ----------
    setting
        Name of the setting as the caller wrote it, for example ``mem_limit``.
    value
        The refused value. It is shown with ``repr``; pass ``None`` for a secret.
    reason
        Why the value cannot be honoured.
    remedy
        What to do instead, as one imperative sentence.
    """

    def __init__(self, setting: str, value: object, reason: str, remedy: str) -> None:
        self.setting = setting
        self.value = value
        self.reason = reason
        self.remedy = remedy
        shown = "" if value is None else f" = {value!r}"
        super().__init__(f"{setting}{shown}: {reason}. {remedy}")


class SandboxUnavailableError(SandboxError):
    """No usable Docker engine.

    Parameters
    ----------
    kind
        The cause, told apart (feature E4).
    message
        What was tried and what happened.
    remedy
        What the reader can do about it.
    """

    def __init__(self, kind: UnavailableKind, message: str, remedy: str = "") -> None:
        self.kind: UnavailableKind = kind
        self.remedy = remedy
        super().__init__(f"{message}. {remedy}" if remedy else message)


class SandboxImageMissingError(SandboxError):
    """The image is not on the engine and may not, or cannot, be pulled."""


class SandboxImageUnsuitableError(SandboxError):
    """The image is there but lacks something that a sandbox needs, for example Python 3.8."""


class SandboxBuildError(SandboxError):
    """Building an image failed; the text ends with the last lines of the build."""


class SandboxAttestationError(SandboxError):
    """The engine would run something weaker than, or other than, what was asked for."""


class SandboxStartError(SandboxError):
    """A container or a command in it could not be started."""


class SandboxGoneError(SandboxError):
    """The sandbox has ended or was removed; the text says why when that is known."""


class SandboxPausedError(SandboxError):
    """The sandbox is paused, so that nothing in it can start or be signalled."""


class SandboxConflictError(SandboxError):
    """Another object of the same name exists, or the object is in use."""


class SandboxEngineError(SandboxError):
    """An engine call failed for a reason that has no class of its own.

    Parameters
    ----------
    message
        The translated message.
    status
        HTTP status of the engine's answer, when there was one.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        self.status = status
        super().__init__(message)


class SandboxEngineTimeoutError(SandboxEngineError, TimeoutError):
    """The engine did not answer within the bound of the call."""


class SandboxDiskFullError(SandboxEngineError):
    """A disk is full: the engine's, the sandbox's or, for files that come out, this machine's."""


class SandboxExecTimeoutError(SandboxError, TimeoutError):
    """A command was still running at its timeout and was stopped."""


class SandboxRunError(SandboxError):
    """A command failed whose caller had asked for an error then; it carries the result."""


class SandboxUnknownOutcomeError(SandboxError):
    """The connection broke before the outcome was known; the command may still be running."""


class SandboxFileNotFoundError(SandboxError, FileNotFoundError):
    """A file that was asked for is not in the sandbox."""


class SandboxProtocolError(SandboxError):
    """Bytes from a sandbox broke the protocol; the connection that carried them is closed."""
