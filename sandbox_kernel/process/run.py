"""A command from start to result in one call (W19-W21)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import SandboxError
from sandbox_kernel.process.command import OUTPUT_LIMIT, Process, start
from sandbox_kernel.process.output import Capture
from sandbox_kernel.process.result import Chunk, RunResult

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
        When it was still running at its timeout.
    """
    begun = time.monotonic()
    process = await start(
        engine,
        container_id,
        argv,
        user=user,
        env=env,
        cwd=cwd,
        timeout=timeout,
        output_limit=output_limit,
    )
    captured = {1: Capture(capture_limit), 2: Capture(capture_limit)}
    async with process:
        feeder = asyncio.create_task(_feed(process, stdin))
        try:
            async for item in process:
                if isinstance(item, Chunk):
                    captured[item.stream].add(item.data)
        finally:
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)
        ended = process.exit
    return RunResult(
        ended.code,
        ended.reason,
        captured[1].value(),
        captured[2].value(),
        captured[1].total,
        captured[2].total,
        bool(captured[1].cut or captured[2].cut),
        time.monotonic() - begun,
    )


async def _feed(process: Process, stdin: bytes) -> None:
    # A command need not read its input; how it ends is told by its output.
    with contextlib.suppress(SandboxError):
        if stdin:
            await process.write(stdin)
        await process.end_input()
