"""The second exec, which ends what a wrapper runs (contract W11-W18)."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass
from importlib import resources
from typing import Literal

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import (
    SandboxEngineTimeoutError,
    SandboxError,
    SandboxGoneError,
)

STOP_TIMEOUT = 5.0
_OUTPUT_LIMIT = 64 * 1024

Found = Literal["killed", "nothing", "gone"]
_FOUND: tuple[Found, ...] = ("killed", "nothing", "gone")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a wrapper reported of itself before its command started (W2)."""

    root: int
    started: int
    pid: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class StopReport:
    """What a stop found: the outcome, and a line for each process that it could not end."""

    found: Found
    left: tuple[str, ...] = ()


@functools.cache
def _text() -> str:
    return resources.files(__package__).joinpath("stop.sh").read_text(encoding="utf-8")


async def stop(
    engine: Engine,
    container_id: str,
    identity: Identity,
    *,
    user: str,
    everything: bool = False,
    timeout: float = STOP_TIMEOUT,
) -> StopReport:
    """End a command's whole tree, and with `everything` the wrapper too.

    Returns when the container is gone or stopped as well, since the command ended with it.

    Raises
    ------
    SandboxError
        When the stop failed or ran out of time; a note says what it had reported.
    """
    argv = ["sh", "-c", _text(), "stop", "all" if everything else "command"]
    argv += [str(identity.root), str(identity.started), str(identity.pid)]
    argv += [identity.stdout, identity.stderr]
    said = bytearray()
    try:
        async with asyncio.timeout(timeout):
            stream = await engine.exec(container_id, argv, user=user, stdin=False)
            async with stream:
                while (chunk := await stream.read()) is not None:
                    said += chunk.data[: _OUTPUT_LIMIT - len(said)]
                    # The last line is the report: the engine's record of the end can be late.
                    if (report := _parse(bytes(said))) is not None:
                        return report
    except SandboxGoneError:
        return StopReport("gone")
    except TimeoutError as error:
        if isinstance(error, SandboxError):
            raise
        failure = SandboxEngineTimeoutError(f"The stop did not finish within {timeout:g} s")
        failure.add_note(f"the stop had said: {said.decode('utf-8', 'replace')!r}")
        raise failure from error
    failure_ = SandboxError("The stop failed, so that the command may still be running")
    failure_.add_note(f"the stop had said: {said.decode('utf-8', 'replace')!r}")
    raise failure_


def _parse(said: bytes) -> StopReport | None:
    lines = said.decode("utf-8", "replace").splitlines() if said.endswith(b"\n") else []
    for found in _FOUND:
        if lines and lines[-1] == found:
            return StopReport(found, tuple(lines[:-1]))
    return None
