"""The second exec, which ends or signals what a wrapper runs, and what helps when it cannot.

Contract W11-W18. `stop` ends one command. Where that cannot start or does not succeed, because
the command holds every process or every processor that the sandbox may have, `sweep` ends
everything of the user, and where that cannot start either, `end_anyhow` has the engine kill the
container: nobody inside can hinder that.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Final, Literal

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.faults import without_host_paths
from sandbox_kernel.errors import (
    SandboxEngineTimeoutError,
    SandboxError,
    SandboxGoneError,
    SandboxPausedError,
    SandboxUnavailableError,
)

log = logging.getLogger(__name__)

STOP_TIMEOUT: Final = 5.0
"""Seconds that a stop has (W15)."""

_SWEEP_TIMEOUT: Final = 5.0
_SWEEP_POLL: Final = 0.1
_ENGINE_TIMEOUT: Final = 3.0
_OUTPUT_LIMIT: Final = 64 * 1024

Found = Literal["killed", "sent", "ended", "running", "nothing", "gone", "swept", "container"]
_WORDS: tuple[Found, ...] = ("killed", "sent", "ended", "running", "nothing", "gone")
_CODE = re.compile(r"\d{1,3}")
_LEFT = re.compile(r"(survivor|holder|unreadable) \d+")

Kind = Literal["pipes", "terminal"]


@dataclass(frozen=True, slots=True)
class Identity:
    """What a wrapper reported of itself before its command started (W2).

    Parameters
    ----------
    kind
        Whether the command's output goes through pipes or to a terminal.
    root, root_started, session
        The wrapper's topmost process, its start time in ticks, and the wrapper's session.
    waiter
        The wrapper's shell.
    pid, pid_started
        The command's own process.
    stdout, stderr
        What its output is connected to.
    marker
        The value of the variable by which its processes can be known.
    """

    kind: Kind
    root: int
    root_started: int
    session: int
    waiter: int
    pid: int
    pid_started: int
    stdout: str
    stderr: str
    marker: str

    def words(self) -> list[str]:
        """Return it as arguments of ``stop.sh``."""
        wrapper = (self.root, self.root_started, self.session, self.waiter)
        numbers = map(str, (*wrapper, self.pid, self.pid_started))
        return [self.kind, *numbers, self.marker, self.stdout, self.stderr]


@dataclass(frozen=True, slots=True)
class StopReport:
    """What a stop did.

    Parameters
    ----------
    found
        ``killed``, ``nothing`` (it was not running any more), ``gone`` (nor its wrapper, or the
        sandbox is gone); ``swept`` when every process of the user was killed, and ``container``
        when the whole sandbox was.
    left
        A line for each process that it could not end: ``survivor PID``, ``holder PID`` for one
        that has the output open and belongs to another command, ``unreadable PID`` for one of
        which that cannot be told.
    code
        The command's exit code, where that was asked for and it has ``ended``.
    """

    found: Found
    left: tuple[str, ...] = ()
    code: int | None = None

    @property
    def held(self) -> bool:
        """Whether some process certainly still has the output open."""
        return any(line.startswith("holder ") for line in self.left)


@functools.cache
def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


async def stop(
    engine: Engine,
    container_id: str,
    identity: Identity,
    *,
    user: str,
    mode: str = "command",
    timeout: float = STOP_TIMEOUT,
) -> StopReport:
    """Do one of the things that ``stop.sh`` does to a command.

    Returns when the container is gone or stopped as well, since the command ended with it.

    Parameters
    ----------
    engine, container_id, identity, user
        Of the command.
    mode
        ``command`` to end it, ``all`` to end its wrapper too, ``signal:N``, or ``wait:N``.
    timeout
        Seconds that it has.

    Raises
    ------
    SandboxPausedError
        Nothing can be done in a paused sandbox.
    SandboxError
        It failed or ran out of time; a note says what it had reported.
    """
    argv = ["sh", "-c", _text("stop.sh"), "stop", mode, *identity.words()]
    try:
        said = await _say(engine, container_id, argv, user, timeout, _WORDS)
    except SandboxGoneError:
        return StopReport("gone")
    lines = said.splitlines()
    found, code = _last(lines[-1])
    report = StopReport(found, tuple(filter(_LEFT.fullmatch, lines[:-1])), code)
    if any(line.startswith("survivor ") for line in report.left):
        raise _noting(SandboxError("The stop could not end every process of the command"), said)
    return report


async def sweep(
    engine: Engine, container_id: str, *, user: str, timeout: float = _SWEEP_TIMEOUT
) -> StopReport:
    """End every process of the user in the sandbox, wrappers of other commands included.

    It is tried again while it cannot start, as is the case at the limit of processes.

    Raises
    ------
    SandboxError
        It did not succeed in time.
    """
    argv = ["sh", "-c", _text("sweep.sh"), "sweep"]
    deadline = asyncio.get_running_loop().time() + timeout
    while True:
        left = deadline - asyncio.get_running_loop().time()
        try:
            said = await _say(engine, container_id, argv, user, max(left, 0.1), ("swept", "left"))
        except SandboxGoneError:
            return StopReport("gone")
        except (SandboxPausedError, SandboxUnavailableError, SandboxEngineTimeoutError):
            raise
        except SandboxError:
            if asyncio.get_running_loop().time() + _SWEEP_POLL > deadline:
                raise
            await asyncio.sleep(_SWEEP_POLL)
            continue
        if said.splitlines()[-1] == "swept":
            return StopReport("swept")
        raise _noting(SandboxError("Some processes of the sandbox could not be ended"), said)


async def end_anyhow(
    engine: Engine, container_id: str, *, user: str, because: SandboxError
) -> StopReport:
    """End everything of the user, if need be with the whole container.

    Parameters
    ----------
    engine, container_id, user
        Where and whose.
    because
        Why a stop of the command alone is not possible. It is raised, with a note, when this
        fails too, and at once where the engine or a pause is to blame and not the sandbox.
    """
    try:
        async with asyncio.timeout(_ENGINE_TIMEOUT):
            state = (await engine.inspect_container(container_id))["State"]
    except SandboxGoneError:
        return StopReport("gone")
    except (SandboxError, TimeoutError):
        raise because from None
    if not state.get("Running"):
        return StopReport("gone")
    if state.get("Paused"):
        raise because
    log.warning("sandbox %s: its user's processes are ended: %s", container_id[:12], because)
    try:
        return await sweep(engine, container_id, user=user)
    except SandboxGoneError:
        return StopReport("gone")
    except (SandboxUnavailableError, SandboxPausedError) as error:
        because.add_note(f"Ending everything of the user failed too: {error}")
        raise because from error
    except SandboxError as error:
        log.warning("sandbox %s is killed as a whole: %s", container_id[:12], error)
    try:
        async with asyncio.timeout(_ENGINE_TIMEOUT):
            await engine.kill_container(container_id)
    except (SandboxError, TimeoutError) as error:
        because.add_note(f"Killing the sandbox failed too: {error}")
        raise because from error
    return StopReport("container")


async def _say(
    engine: Engine,
    container_id: str,
    argv: Sequence[str],
    user: str,
    timeout: float,
    words: Sequence[str],
) -> str:
    """Run one of the scripts and return what it said, as soon as its last line is there.

    Without waiting for the engine to record its end, which can be late (W12).
    """
    said = bytearray()
    try:
        async with asyncio.timeout(timeout):
            stream = await engine.exec(container_id, argv, user=user, stdin=False)
            async with stream:
                while (chunk := await stream.read()) is not None:
                    said += chunk.data[: _OUTPUT_LIMIT - len(said)]
                    text = said.decode("utf-8", "replace")
                    last = text.splitlines()[-1].split() if text.endswith("\n") else []
                    if last and last[0] in words:
                        return text
    except TimeoutError as error:
        if isinstance(error, SandboxError):
            raise
        late = SandboxEngineTimeoutError(f"The stop did not finish within {timeout:g} s")
        raise _noting(late, said.decode("utf-8", "replace")) from error
    text = said.decode("utf-8", "replace")
    # A container that ends takes its execs along, which then say nothing.
    try:
        async with asyncio.timeout(_ENGINE_TIMEOUT):
            state = (await engine.inspect_container(container_id))["State"]
    except TimeoutError as error:
        if isinstance(error, SandboxError):
            raise
        late = SandboxEngineTimeoutError(
            f"The engine did not say within {_ENGINE_TIMEOUT:g} s what became of the sandbox"
        )
        raise _noting(late, text) from error
    if not state.get("Running"):
        raise SandboxGoneError("The sandbox ended while the command was being stopped")
    failed = SandboxError("The stop failed, so that the command may still be running")
    raise _noting(failed, text)


def _last(line: str) -> tuple[Found, int | None]:
    word, _, number = line.partition(" ")
    code = int(number) if _CODE.fullmatch(number) else None
    for known in _WORDS:
        if word == known and (known == "ended") == (code is not None):
            return known, code
    raise SandboxError(f"The stop said something else than it can: {line[:100]!r}")


def _noting(error: SandboxError, said: str) -> SandboxError:
    # It may be the engine's own words, about a start that failed.
    error.add_note(f"the stop had said: {without_host_paths(said[-500:])!r}")
    return error
