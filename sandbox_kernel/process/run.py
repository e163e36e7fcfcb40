"""A command from start to result in one call (W19-W21)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import SandboxError
from sandbox_kernel.process.command import OUTPUT_LIMIT, Process, launch
from sandbox_kernel.process.output import Captures
from sandbox_kernel.process.result import CommandError, Exit, RunResult

CAPTURE_LIMIT = 16 * 1024 * 1024
TIMEOUT = 120.0


async def run(
    engine: Engine,
    container_id: str,
    argv: Sequence[str],
    *,
    user: str,
    env: Mapping[str, str] | None = None,
    cwd: str = "/",
    stdin: bytes = b"",
    timeout: float | None = TIMEOUT,
    idle_timeout: float | None = None,
    capture_limit: int = CAPTURE_LIMIT,
    output_limit: int = OUTPUT_LIMIT,
) -> RunResult:
    """Run a command to its end; the parameters are those of `start`.

    Parameters
    ----------
    stdin
        The command's whole input.
    capture_limit
        Bytes kept of each stream, half of them its beginning and half its end.

    Raises
    ------
    CommandTimeoutError
        When it was still running at its timeout, or wrote nothing for too long.
    CommandError
        When it did not come to its end otherwise. In both cases `result` is what it had given
        until then.
    """
    begun = time.monotonic()
    captures = Captures(capture_limit)
    process = await launch(
        engine,
        container_id,
        argv,
        captures,
        user=user,
        env=env,
        cwd=cwd,
        timeout=timeout,
        idle_timeout=idle_timeout,
        tty=None,
        output_limit=output_limit,
    )
    async with process:
        feeder = asyncio.create_task(_feed(process, stdin))
        try:
            ended = await process.wait()
        except CommandError as error:
            error.result = _result(process.exit, captures, begun)
            raise
        finally:
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)
    return _result(ended, captures, begun)


def _result(ended: Exit, captures: Captures, begun: float) -> RunResult:
    out, err = captures.out, captures.err
    return RunResult(
        ended.code,
        ended.reason,
        out.value(),
        err.value(),
        out.total,
        err.total,
        bool(out.cut or err.cut),
        time.monotonic() - begun,
        out.cut,
        err.cut,
        ended.peak_memory,
        ended.evidence,
    )


async def _feed(process: Process, stdin: bytes) -> None:
    # A command need not read its input; how it ends is told by its output.
    with contextlib.suppress(SandboxError):
        if stdin:
            await process.write(stdin)
        await process.end_input()
