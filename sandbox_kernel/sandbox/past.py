"""What happened to a sandbox, as far as the engine still knows, also after its end (K4).

Nothing of a sandbox is written down anywhere: its main process has no log, and the engine removes
the container with its end. What is left is the engine's memory of events, which carry the labels.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.events import Event
from sandbox_kernel.errors import SandboxConflictError
from sandbox_kernel.sandbox import labels as names
from sandbox_kernel.sandbox.ending import EndReason, reason_of
from sandbox_kernel.sandbox.plan import told_by
from sandbox_kernel.sandbox.quota import engine_time

__all__ = ["PastSandbox", "past_sandboxes"]

_WORDS: Final[Mapping[str, str]] = {
    "create": "made",
    "start": "started",
    "exec_start": "a program was started in it",
    "oom": "something in it was killed for lack of memory",
    "pause": "paused",
    "unpause": "resumed",
    "kill": "the engine was told to kill it",
    "die": "ended",
    "destroy": "removed",
}


@dataclass(frozen=True, slots=True)
class PastSandbox:
    """What the engine remembers of one sandbox.

    Parameters
    ----------
    id, name, owner, workspace
        As of `SandboxInfo`.
    happened
        When, by the engine's clock, and what, in words.
    ended
        Why it ended; `None` while it runs, or where that is not known any more.
    """

    id: str
    name: str
    owner: str
    workspace: str | None
    happened: tuple[tuple[datetime, str], ...]
    ended: EndReason | None


async def past_sandboxes(engine: Engine, owner: str | None = None) -> list[PastSandbox]:
    """Return what the engine remembers of sandboxes, those that have ended included.

    Parameters
    ----------
    engine
        The engine.
    owner
        Whose; `None` for everybody's.
    """
    now = engine_time(await engine.info()) or time.time()
    told: dict[str, list[Event]] = {}
    for event in await engine.past_events(now + 1):
        labels = event.attributes
        whose = labels.get(names.OWNER, "")
        # Helpers of ours have no durability, and containers that look into workspaces no user.
        if labels.get(names.DURABILITY) and not labels.get(names.HELPER) and owner in {None, whose}:
            told.setdefault(event.container_id, []).append(event)
    return [_past(container_id, events) for container_id, events in told.items()]


def _past(container_id: str, events: Sequence[Event]) -> PastSandbox:
    labels = events[-1].attributes
    happened = tuple(
        (datetime.fromtimestamp(event.time_ns / 1e9, UTC), _WORDS[event.action])
        for event in events
        if event.action in _WORDS
    )
    return PastSandbox(
        id=container_id,
        name=labels.get("name", ""),
        owner=labels.get(names.OWNER, ""),
        workspace=names.workspace_key(labels),
        happened=happened,
        ended=_reason(events),
    )


def _reason(events: Sequence[Event]) -> EndReason | None:
    died = next((event for event in events if event.action == "die"), None)
    if died is None:
        return None
    code = died.attributes.get("exitCode", "")
    with contextlib.suppress(SandboxConflictError):
        spec, limits = told_by(died.attributes, {})
        return reason_of(
            int(code) if code.isdecimal() else None,
            spec,
            limits,
            killed_from_outside=any(
                event.action == "kill" and event.attributes.get("signal") in {"9", "15", None}
                for event in events
            ),
            out_of_memory=any(event.action == "oom" for event in events),
            said="",
        )
    return None
