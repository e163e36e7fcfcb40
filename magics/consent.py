"""Consent to the network, for one run: typed by a person, or given beforehand by an administrator.

There is no "always" and no grant for the session. It is asked only where somebody can answer; where
nobody can (batch runs), an administrator's policy file may name the exact cell by its digest, and
otherwise the answer is no. Whatever is not a clear yes is a no, and nothing has been started then.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from sandbox_magics import view
from sandbox_magics.screen import can_be_asked

if TYPE_CHECKING:
    from sandbox_kernel.sandbox.order import Order

__all__ = ["Consent", "Question", "obtain", "settled"]

PATIENCE: Final = 120.0
"""Seconds after which silence is a no."""

_EXCERPT: Final = 200
_YES: Final = "yes"


@dataclass(frozen=True, slots=True)
class Consent:
    """Consent that was given.

    Parameters
    ----------
    by
        Who gave it: ``a person`` in this run's front end, or ``policy`` beforehand.
    at
        When it was found.
    question
        What it was given to.
    cell_sha256
        The digest of what it was given to.
    """

    by: str
    at: datetime
    question: str = field(repr=False)
    cell_sha256: str


@dataclass(frozen=True, slots=True)
class Question:
    """What wants the network.

    Parameters
    ----------
    source
        The magic as it was written, with the text of its cell.
    command
        What is going to run.
    image
        In which image.
    timeout
        For how many seconds at most.
    fixed
        Whether the source tells all of the command. With values of variables in it, it does not,
        and nobody can have consented to it beforehand.
    network
        What it would reach, in words.
    """

    source: str = field(repr=False)
    command: str = field(repr=False)
    image: str
    timeout: float
    fixed: bool = True
    network: str = "egress: what the firewall of the engine's machine lets out"

    @property
    def digest(self) -> str:
        """The SHA-256 of the source, without line ends at its end, in hexadecimal."""
        return hashlib.sha256(self.source.rstrip("\n").encode("utf-8", "replace")).hexdigest()

    @property
    def text(self) -> str:
        """What a person is asked."""
        left_out = len(self.command) - _EXCERPT
        more = f" (and {left_out + 1} characters more)" if left_out > 0 else ""
        return (
            "This run asks for the network.\n"
            f"  runs     {view.one_line(self.command, _EXCERPT)}{more}\n"
            f"  image    {view.one_line(self.image)}\n"
            f"  network  {self.network}\n"
            f"  for      at most {view.seconds(self.timeout)}, this once\n"
            f"Type {_YES} to allow it, anything else to refuse: "
        )


def settled(asked: dict[str, Any]) -> Order:
    """Have configuration and policy judge a run with the network, before anybody is asked.

    Raises
    ------
    SandboxNetworkDenied
        The policy allows no such network.
    SandboxSpecRejectedError
        Something else is not allowed.
    """
    from sandbox_magics.errors import SandboxNetworkDenied

    from sandbox_kernel.errors import SandboxSpecRejectedError
    from sandbox_kernel.sandbox.order import settle

    try:
        return settle(asked, door="magics")
    except SandboxSpecRejectedError as error:
        if error.setting != "network":
            raise
        raise SandboxNetworkDenied(f"{error} Nothing was started") from error


def obtain(shell: Any, question: Question) -> Consent:
    """Return the consent to a run, or raise.

    Raises
    ------
    SandboxNetworkDenied
        It was not given; the text says why.
    """
    from sandbox_magics.errors import SandboxNetworkDenied

    now = datetime.now(UTC)
    if question.fixed and _allowed_beforehand(question.digest, now):
        return Consent("policy", now, question.text, question.digest)
    if threading.current_thread() is not threading.main_thread() or not can_be_asked(shell):
        raise SandboxNetworkDenied(_nobody(question))
    answer = _asked(shell, question.text)
    if answer is None:
        why = f"there was no answer within {PATIENCE:g} s"
    elif answer.strip() == _YES:
        return Consent("a person", datetime.now(UTC), question.text, question.digest)
    else:
        why = "the answer was not yes"
    raise SandboxNetworkDenied(f"The run does not get the network: {why}. Nothing was started")


def _nobody(question: Question) -> str:
    beforehand = (
        "An administrator can allow exactly this cell: network_consents in the policy file, with "
        f"cell_sha256 {question.digest}"
        if question.fixed
        else "Nor can an administrator have allowed it: values of variables are in the command"
    )
    return (
        f"The run does not get the network: nobody can be asked here. Nothing was started. "
        f"{beforehand}"
    )


def _allowed_beforehand(digest: str, now: datetime) -> bool:
    from sandbox_kernel.config import load_policy_in_force

    notebook = os.environ.get("JPY_SESSION_NAME", "")
    return load_policy_in_force().consent(digest, notebook, now) is not None


def _asked(shell: Any, text: str) -> str | None:
    """Ask, and return the answer; `None` when there was none in time, or no more."""
    kernel = getattr(shell, "kernel", None)
    # Not `input`, which any cell can replace by something that says yes.
    read = _in_terminal if kernel is None else _in_notebook(kernel)
    with contextlib.suppress(KeyboardInterrupt, EOFError), _bounded():
        return read(text)
    return None


def _in_notebook(kernel: Any) -> Callable[[str], str]:
    def read(text: str) -> str:
        return str(type(kernel).raw_input(kernel, text))

    return read


def _in_terminal(text: str) -> str:
    terminal, screen = sys.__stdin__, sys.__stderr__
    if terminal is None or screen is None:
        raise EOFError
    with contextlib.suppress(ImportError, OSError, ValueError):
        import termios

        # What was typed before the question is no answer to it.
        termios.tcflush(terminal.fileno(), termios.TCIFLUSH)
    screen.write(text)
    screen.flush()
    line = terminal.readline()
    if not line:
        raise EOFError
    return line


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Interrupt what is done in the main thread after a time."""
    guard = threading.Lock()
    over = False

    def late() -> None:
        with guard:
            if over:
                return
            if hasattr(signal, "pthread_kill"):
                # A real signal, since reading from a terminal wakes up for nothing less.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            else:
                signal.raise_signal(signal.SIGINT)

    timer = threading.Timer(PATIENCE, late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with guard:
            over = True
        timer.cancel()
