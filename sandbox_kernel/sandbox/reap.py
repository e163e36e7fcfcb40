"""Clear away what nobody will miss: `reap`, the backstop behind the lease (B13).

A sandbox ends by itself, and the engine removes it. What that does not cover is cleared here: a
paused sandbox does not tick, a creator can be killed between making and starting, and an engine
that is killed itself can leave anything. Only what carries our labels is touched, by its exact
id, after a second look; workspaces that persist are never touched. Times are the engine's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import SandboxConflictError, SandboxError, SandboxGoneError
from sandbox_kernel.sandbox import labels as names
from sandbox_kernel.sandbox.found import lifetime_end
from sandbox_kernel.sandbox.pause import LONGEST_PAUSE, mark, mark_name, pause_end
from sandbox_kernel.sandbox.plan import kept_prefix, labels_of
from sandbox_kernel.sandbox.quota import engine_time

log = logging.getLogger(__name__)

_UNSTARTED: Final = 120.0
"""Seconds after which a container that was never started belongs to a creator that is gone."""

_LATE: Final = 60.0
"""Seconds by which a sandbox may be late to end at its lifetime, on a busy machine."""


@dataclass(frozen=True, slots=True)
class Reaped:
    """One thing that was cleared away, or would be.

    Parameters
    ----------
    kind
        ``container``, ``volume``, or ``mark`` for a paused sandbox that will have to end.
    id, name
        What the engine calls it.
    owner
        Whose it was.
    why
        The reason, for people.
    done
        Whether it was done; not on a dry run, nor when the engine did not let it.
    trouble
        Why it could not be done.
    """

    kind: Literal["container", "volume", "mark"]
    id: str
    name: str
    owner: str
    why: str
    done: bool = False
    trouble: str = ""

    def __str__(self) -> str:
        """Say it in words."""
        what = f"{'paused container' if self.kind == 'mark' else self.kind} {self.name}"
        whose = f" of {self.owner!r}" if self.owner else ""
        if self.trouble:
            return f"could not remove {what}{whose} ({self.why}): {self.trouble}"
        verb = "marked" if self.kind == "mark" else "removed"
        return f"{verb if self.done else f'would have {verb}'} {what}{whose}: {self.why}"


async def reap(engine: Engine, owner: str | None = None, *, dry_run: bool = False) -> list[Reaped]:
    """Remove sandboxes whose time is over and leftovers.

    Parameters
    ----------
    engine
        The engine.
    owner
        Whose; `None` for everybody's.
    dry_run
        Only say what would be done.

    Returns
    -------
    list of Reaped
        What was done, or not; each can be printed.
    """
    now = engine_time(await engine.info()) or time.time()
    wanted = {names.VERSION: None, **({} if owner is None else {names.OWNER: owner})}
    found: list[Reaped] = []
    for entry in await engine.list_containers(wanted):
        with contextlib.suppress(SandboxGoneError):
            inspected = await engine.inspect_container(str(entry["Id"]))
            thing = await _judge_container(engine, inspected, now)
            if thing is not None:
                found.append(thing if dry_run else await _deal_with(engine, thing, inspected, now))
    for volume in await _leftover_volumes(engine, wanted, now):
        found.append(volume if dry_run else await _remove_volume(engine, volume))
    for thing in found:
        log.info("reap: %s", thing)
    return found


async def _judge_container(
    engine: Engine, inspected: Mapping[str, Any], now: float
) -> Reaped | None:
    labels, state = labels_of(inspected), inspected["State"]
    container_id, name = str(inspected["Id"]), str(inspected["Name"]).lstrip("/")
    created = _seconds(inspected.get("Created"), now)
    status = state.get("Status")

    def because(why: str, kind: Literal["container", "mark"] = "container") -> Reaped:
        return Reaped(kind, container_id, name, labels.get(names.OWNER, ""), why)

    if status in {"exited", "dead"}:
        return because("it has ended and was left behind")
    if status == "created" and now - created > _UNSTARTED:
        return because("it was made and never started")
    if status not in {"running", "paused"}:
        return None
    ends = lifetime_end(datetime.fromtimestamp(created, UTC), labels)
    if ends is not None and now > ends.timestamp() + _LATE:
        return because("its lifetime is over")
    if status == "paused":
        until = await pause_end(engine, container_id, kept_prefix(labels))
        if until is None:
            return because("nobody wrote down until when it is paused", "mark")
        if now > until:
            return because("it was paused for longer than it may be")
    return None


async def _deal_with(
    engine: Engine, thing: Reaped, inspected: Mapping[str, Any], now: float
) -> Reaped:
    labels = labels_of(inspected)
    prefix = kept_prefix(labels)
    try:
        if thing.kind == "mark":
            until = now + LONGEST_PAUSE
            await mark(engine, thing.id, prefix, thing.owner, until)
            day = datetime.fromtimestamp(until, UTC).isoformat(timespec="minutes")
            return dataclasses.replace(
                thing, done=True, why=f"it may be removed after {day}, unless it is resumed"
            )
        await engine.remove_container(thing.id)
        await engine.remove_volume(mark_name(prefix, thing.id))
    except SandboxError as error:
        return dataclasses.replace(thing, trouble=str(error))
    return dataclasses.replace(thing, done=True)


async def _leftover_volumes(
    engine: Engine, wanted: Mapping[str, str | None], now: float
) -> list[Reaped]:
    """Find anonymous volumes and marks whose container is gone."""
    listed = await engine.list_volumes(wanted)
    # Taken after the volumes: a container that is made now has a volume that is made now.
    containers = await engine.list_containers({})
    used = {m.get("Name") for entry in containers for m in entry.get("Mounts") or ()}
    paused = {str(entry["Id"]) for entry in containers if entry.get("State") == "paused"}
    found = []
    for volume in listed:
        labels = {str(k): str(v) for k, v in (volume.get("Labels") or {}).items()}
        name = str(volume.get("Name"))
        if now - _seconds(volume.get("CreatedAt"), now) < _UNSTARTED or name in used:
            continue
        if labels.get(names.PAUSED) and labels[names.PAUSED] not in paused:
            why = "it marks a paused sandbox that is not paused"
        elif labels.get(names.DURABILITY) == "ephemeral":
            why = "it was the workspace of a sandbox that is gone"
        else:
            continue
        found.append(Reaped("volume", name, name, labels.get(names.OWNER, ""), why))
    return found


async def _remove_volume(engine: Engine, thing: Reaped) -> Reaped:
    try:
        await engine.remove_volume(thing.id)
    except SandboxConflictError:
        return dataclasses.replace(thing, trouble="a container uses it again")
    except SandboxError as error:
        return dataclasses.replace(thing, trouble=str(error))
    return dataclasses.replace(thing, done=True)


def _seconds(moment: object, otherwise: float) -> float:
    """Read a time of the engine's; engines give fractions of any length."""
    text = str(moment)
    zone = text[19:].lstrip(".0123456789")
    try:
        return datetime.fromisoformat(text[:19] + (zone or "+00:00")).timestamp()
    except ValueError:
        return otherwise
