"""How many sandboxes one owner may have, counted on the engine by their labels (A1).

There is no lock across processes and machines, so that two creators at the limit may both look,
and both see room. Each therefore looks again when its container is there and not yet started:
it goes on only once it has seen that all of them together are within the limit. Of those that
have looked, whoever made its container last saw all the others, so that at most as many go on
as are allowed. Which ones is settled by rank: what runs comes before what is being made, then
the older container, then the smaller id; who ranks beyond the limit gives up at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.policy import Quota
from sandbox_kernel.sandbox import labels as names

__all__ = ["admit", "keep_place", "owned"]

_PATIENCE: Final = 10.0
"""Seconds that others get to take away what is beyond the limit."""

_POLL: Final = 0.1
_ABANDONED: Final = 120.0
"""Seconds after which a container that was never started belongs to a creator that is gone."""

_OVER: Final = frozenset({"exited", "dead", "removing"})


async def owned(engine: Engine, owner: str, now: float | None = None) -> list[dict[str, Any]]:
    """Return the containers that count as sandboxes of an owner, the one that ranks first first.

    Parameters
    ----------
    engine
        The engine.
    owner
        Whose.
    now
        The engine's time in seconds, to tell containers that were never started.
    """
    listed = await engine.list_containers({names.OWNER: owner, names.VERSION: None})
    counted = [
        entry
        for entry in listed
        if entry.get("State") not in _OVER
        and not (entry.get("Labels") or {}).get(names.HELPER)
        and not (now is not None and _waits(entry) and now - _created(entry) > _ABANDONED)
    ]
    return sorted(counted, key=lambda entry: (_waits(entry), _created(entry), str(entry.get("Id"))))


async def admit(engine: Engine, owner: str, quota: Quota, info: Mapping[str, Any]) -> None:
    """Refuse an owner that has as many sandboxes as are allowed.

    Parameters
    ----------
    engine, owner, quota
        Where, whose, and how many.
    info
        The engine's answer to ``/info``.

    Raises
    ------
    SandboxSpecRejectedError
        There is no room; nothing was created.
    """
    count = len(await owned(engine, owner, engine_time(info)))
    if count >= quota.most:
        raise quota.refusal(owner, count)


async def keep_place(
    engine: Engine, owner: str, quota: Quota, info: Mapping[str, Any], container_id: str
) -> None:
    """Return once a container that was just created may be started.

    Parameters
    ----------
    engine, owner, quota, info
        As for `admit`.
    container_id
        The container.

    Raises
    ------
    SandboxSpecRejectedError
        Others were first. The caller has to remove the container.
    """
    now = engine_time(info)
    deadline = time.monotonic() + _PATIENCE
    while True:
        ranking = [str(entry.get("Id")) for entry in await owned(engine, owner, now)]
        if len(ranking) <= quota.most:
            return
        beyond = container_id not in ranking[: quota.most]
        if beyond or time.monotonic() > deadline:
            raise quota.refusal(owner, len(ranking) - 1)
        await asyncio.sleep(_POLL)


def engine_time(info: Mapping[str, Any]) -> float | None:
    """Return the engine's own time in seconds since 1970, where it says it."""
    try:
        moment = datetime.fromisoformat(str(info.get("SystemTime"))[:19])
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC).timestamp()


def _waits(entry: Mapping[str, Any]) -> bool:
    return entry.get("State") == "created"


def _created(entry: Mapping[str, Any]) -> float:
    created = entry.get("Created")
    return float(created) if isinstance(created, int | float) else 0.0
