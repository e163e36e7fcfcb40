"""`Request`: what is to be run, and how; data only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sandbox_magics.capture import STDERR, STDOUT

if TYPE_CHECKING:
    from sandbox_magics.consent import Consent
    from sandbox_magics.transfer import Pulling

    from sandbox_kernel.sandbox.facade import Sandbox

__all__ = ["Request", "Step"]


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be run, and how.

    Parameters
    ----------
    argv
        The program and its arguments.
    shown
        What people are told that runs.
    stdin
        Its whole input.
    env
        Variables; their values are secrets.
    secrets
        Values that must not show in its output.
    cwd
        The working directory; empty for ``/workspace``.
    timeout
        Seconds that it may take; `None` as configured, 0 as long as is allowed.
    idle_timeout
        Seconds that it may go without output; `None` for any.
    tty
        Whether it gets a terminal.
    capture_limit
        Bytes that are kept of each stream.
    display_limit
        Characters that are shown of both together.
    show
        The streams that are shown.
    name
        What it is called.
    consent
        The consent to its network, where it has one.
    before, after
        Done in the sandbox before the start and after the end.
    copied
        Patterns of artifacts that are copied to this machine.
    """

    argv: tuple[str, ...] = field(repr=False)
    shown: tuple[str, ...] = field(repr=False)
    timeout: float | None = None
    stdin: bytes = field(default=b"", repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)
    cwd: str = ""
    idle_timeout: float | None = None
    tty: bool = False
    capture_limit: int = 10 * 1024 * 1024
    display_limit: int = 1024 * 1024
    show: frozenset[int] = frozenset({STDOUT, STDERR})
    name: str = ""
    consent: Consent | None = None
    before: Step | None = field(default=None, repr=False)
    after: Pulling | None = field(default=None, repr=False)
    copied: tuple[str, ...] = ()

    def pulled(self) -> dict[str, Any]:
        """Return the variables that were made of its files."""
        return {} if self.after is None else self.after.variables()


Step = Callable[["Sandbox"], Awaitable[None]]
"""A coroutine function of the sandbox."""
