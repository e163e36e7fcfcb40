"""Freezing and thawing a container, and the mark that says until when it may be frozen (B8).

A paused sandbox does not tick, so that neither its lease nor its time without use ends it, and
the engine does not tell since when it is paused. What it may last is therefore written down on
the engine as the labels of an empty volume; whoever reaps reads it (see `reap.py`). Its times are
the engine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from sandbox_kernel import __version__
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxEngineError,
    SandboxEngineTimeoutError,
    SandboxError,
)
from sandbox_kernel.sandbox import labels as names
from sandbox_kernel.sandbox.quota import engine_time

LONGEST_PAUSE: Final = 24 * 3600.0
"""Seconds after which a paused sandbox may be removed, unless said otherwise."""

_TRIES: Final = 8
_FIRST_DELAY: Final = 0.05


def mark_name(prefix: str, container_id: str) -> str:
    """Return the name of the mark of a paused container."""
    return f"{prefix}paused-{container_id[:32]}"


async def freeze(
    engine: Engine, container_id: str, prefix: str, owner: str, longest: float
) -> None:
    """Pause a container and write down until when; of one that is paused, only the latter.

    With cgroups of version 1 the kernel freezes processes one after the other, and gives up when
    new ones keep coming; a few tries usually help.

    Parameters
    ----------
    engine, container_id
        Where, and which; the full id.
    prefix, owner
        Of the sandbox.
    longest
        Seconds after which it may be removed.

    Raises
    ------
    SandboxConflictError
        It could not be frozen, and goes on running.
    """
    now = engine_time(await engine.info()) or time.time()
    await freeze_until(engine, container_id, prefix, owner, now + longest)


async def freeze_until(
    engine: Engine, container_id: str, prefix: str, owner: str, until: float
) -> None:
    """Do what `freeze` does, with the end by the engine's clock.

    Parameters
    ----------
    engine, container_id, prefix, owner
        As for `freeze`.
    until
        The engine's time in seconds since 1970.

    Raises
    ------
    SandboxConflictError
        It could not be frozen, and goes on running.
    """
    await mark(engine, container_id, prefix, owner, until)
    try:
        await _freeze(engine, container_id)
    except BaseException:
        with contextlib.suppress(SandboxError):
            async with asyncio.timeout(5):
                await engine.remove_volume(mark_name(prefix, container_id))
        raise


async def mark(engine: Engine, container_id: str, prefix: str, owner: str, until: float) -> None:
    """Write down until when a container may be paused.

    Parameters
    ----------
    engine, container_id, prefix, owner
        As for `freeze`.
    until
        The engine's time in seconds since 1970.
    """
    name = mark_name(prefix, container_id)
    await engine.remove_volume(name)
    labels = {
        names.VERSION: __version__,
        names.OWNER: owner,
        names.PAUSED: container_id,
        names.UNTIL: str(round(until)),
    }
    await engine.create_volume(name, labels)


async def pause_end(engine: Engine, container_id: str, prefix: str) -> float | None:
    """Return until when a container may be paused; `None` where nobody wrote it down.

    Parameters
    ----------
    engine, container_id, prefix
        As for `freeze`.
    """
    volume = await engine.inspect_volume(mark_name(prefix, container_id))
    labels = (volume or {}).get("Labels") or {}
    text = str(labels.get(names.UNTIL, ""))
    if labels.get(names.PAUSED) != container_id or not text.isdecimal() or len(text) > 12:
        return None
    return float(text)


async def _freeze(engine: Engine, container_id: str) -> None:
    delay = _FIRST_DELAY
    for left in reversed(range(_TRIES)):
        try:
            await engine.pause_container(container_id)
            return
        except SandboxEngineTimeoutError:
            raise
        except SandboxEngineError as error:
            if await _is_paused(engine, container_id):
                return
            if left == 0:
                raise SandboxConflictError(
                    "The sandbox could not be paused: processes come and go in it faster than "
                    "its machine can freeze them. Stop what runs in it, or try again"
                ) from error
        except SandboxError:
            if await _is_paused(engine, container_id):
                return
            raise
        await asyncio.sleep(delay)
        delay *= 2


async def _is_paused(engine: Engine, container_id: str) -> bool:
    return bool((await engine.inspect_container(container_id))["State"].get("Paused"))


async def thaw(engine: Engine, container_id: str, prefix: str) -> None:
    """Let a paused container go on, and take its mark away; idempotent.

    Parameters
    ----------
    engine, container_id, prefix
        As for `freeze`.
    """
    try:
        await engine.unpause_container(container_id)
    except (SandboxEngineError, SandboxConflictError):
        if await _is_paused(engine, container_id):
            raise
    await engine.remove_volume(mark_name(prefix, container_id))
