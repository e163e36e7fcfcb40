"""The watch over a workspace's size, for engines that cannot limit it (B5, RES-08).

A limit of the engine's is a wall; this is a guard who comes round from time to time. Between two
rounds a workspace can grow, and a program that sets its mind to it can deceive a count that is
made beside it. So what cannot be counted from inside is asked of the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.sandbox.container import WORKSPACE

__all__ = ["COUNT", "COUNT_TIMEOUT", "exceeded", "volume_size"]

log = logging.getLogger(__name__)

COUNT: Final = ("du", "-skx", WORKSPACE)
"""Counts what a workspace takes, in KiB; busybox has it too."""

_PERIOD: Final = 20.0
_PART: Final = 20
"""Counting takes at most this part of the time."""

COUNT_TIMEOUT: Final = 30.0
"""Seconds after which a count from inside is given up: code can stop it, too."""

_BOUND: Final = 180.0


async def exceeded(measure: Callable[[], Awaitable[int | None]], limit: int) -> int:
    """Wait until a workspace takes more than it should, and return how many bytes it takes.

    Parameters
    ----------
    measure
        Counts its bytes; `None` says that somebody else is counting.
    limit
        What it may take.
    """
    said, took = False, 0.0
    while True:
        # First of all, so that a workspace that is too large already can be made smaller.
        await asyncio.sleep(max(_PERIOD, took * (_PART - 1)))
        began = time.monotonic()
        try:
            async with asyncio.timeout(_BOUND):
                size = await measure()
            if size is not None and size > limit:
                return size
        except (SandboxError, TimeoutError) as error:
            # Paused, at its limit of processes, or the engine is away: the next round tells.
            log.log(
                logging.DEBUG if said else logging.WARNING,
                "a workspace could not be measured: %s",
                str(error) or f"not done within {_BOUND:g} s",
            )
            said = True
        took = time.monotonic() - began


def volume_size(usage: Any, volume: str) -> int | None:
    """Return the bytes of a volume in an engine's account of its disk; `None` where it has none."""
    volumes = usage.get("Volumes") if isinstance(usage, dict) else None
    for entry in volumes or ():
        if entry.get("Name") == volume:
            size = (entry.get("UsageData") or {}).get("Size")
            return size if isinstance(size, int) and size >= 0 else None
    return None
