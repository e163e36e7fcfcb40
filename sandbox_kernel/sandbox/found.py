"""Sandboxes as the engine knows them: list them, find one again (B9, decision 8).

The labels are the only record, so that any process can list what any other one made. Sandboxes of
another owner are never found by guessing: to who asks they do not exist (TEN-14).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Protocol, TypeVar

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import SandboxConflictError, SandboxGoneError
from sandbox_kernel.sandbox import labels as names

_ID: Final = re.compile(r"[0-9a-f]{12,64}")
_BEGINNING: Final = re.compile(r"[0-9a-f]{1,64}")
_SHOWN: Final = 5


class Named(Protocol):
    """What a person can name."""

    @property
    def id(self) -> str:
        """What the engine calls it."""
        ...

    @property
    def name(self) -> str:
        """Its name on the engine."""
        ...

    @property
    def workspace(self) -> str | None:
        """The key of its workspace."""
        ...


N = TypeVar("N", bound=Named)


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """What the engine tells of one sandbox.

    Parameters
    ----------
    id, name
        What the engine calls the container.
    owner
        Whose it is.
    state
        ``running``, ``paused``, ``created``, ``exited``, …
    image, network
        As they were asked for.
    durability, workspace
        Of its workspace, and that one's key; `None` where it has none.
    kernel
        The id of the kernel that it is for; empty for none.
    created
        When it was made, by the engine's clock.
    ends
        When its lifetime is over; `None` for never.
    labels
        Its maker's own labels.
    """

    id: str
    name: str
    owner: str
    state: str
    image: str
    network: str
    durability: str
    workspace: str | None
    kernel: str
    created: datetime
    ends: datetime | None
    labels: Mapping[str, str]

    @property
    def short_id(self) -> str:
        """The id as people write it."""
        return self.id[:12]


async def list_sandboxes(engine: Engine, owner: str | None = None) -> list[SandboxInfo]:
    """List sandboxes, the oldest first.

    Parameters
    ----------
    engine
        The engine.
    owner
        Whose; `None` for everybody's.
    """
    listed = await engine.list_containers(_wanted(owner))
    found = [entry for entry in listed if _is_sandbox(entry.get("Labels") or {})]
    return [_info(entry) for entry in sorted(found, key=_age)]


async def find_sandbox(engine: Engine, which: str, owner: str) -> dict[str, Any]:
    """Return the engine's account of the one running sandbox that is meant.

    Parameters
    ----------
    engine
        The engine.
    which
        Its id (12 characters at least), its name, or the key of its workspace.
    owner
        Whose it is.

    Raises
    ------
    SandboxGoneError
        There is none.
    """
    for info in await list_sandboxes(engine, owner):
        by_id = _ID.fullmatch(which) is not None and info.id.startswith(which)
        if not (by_id or which == info.name or which == info.workspace):
            continue
        if info.state in {"running", "paused"}:
            inspected = await engine.inspect_container(info.id)
            if inspected["State"].get("Running"):
                return inspected
    raise SandboxGoneError(f"No sandbox {which[:80]!r} of {owner!r} runs on the engine")


def choose(infos: Sequence[N], which: str) -> N:
    """Return the one sandbox that a person means.

    Parameters
    ----------
    infos
        Those that there are.
    which
        The beginning of its id, its name, or the key of its workspace. What is written in full
        goes before the beginning of an id.

    Raises
    ------
    SandboxGoneError
        It is none of them; the error names some.
    SandboxConflictError
        It can be several; the error names them.
    """
    found = [info for info in infos if which in {info.id, info.name, info.workspace}]
    if not found and _BEGINNING.fullmatch(which):
        found = [info for info in infos if info.id.startswith(which)]
    if len(found) == 1:
        return found[0]
    if found:
        raise SandboxConflictError(
            f"{which[:80]!r} can be any of {_named(found)}. Write more of the id"
        )
    there = f"There are {_named(infos)}" if infos else "There is none at all"
    raise SandboxGoneError(f"There is no sandbox {which[:80]!r}. {there}")


def _named(infos: Sequence[Named]) -> str:
    shown = [
        f"{info.id[:12]} ({info.name if info.workspace is None else repr(info.workspace)})"
        for info in infos[:_SHOWN]
    ]
    more = len(infos) - len(shown)
    return ", ".join([*shown, f"{more} more"] if more else shown)


def _wanted(owner: str | None) -> dict[str, str | None]:
    return {names.VERSION: None, **({} if owner is None else {names.OWNER: owner})}


def _is_sandbox(labels: Mapping[str, str]) -> bool:
    # Helpers of ours have no durability.
    return bool(labels.get(names.DURABILITY))


def _age(entry: Mapping[str, Any]) -> tuple[float, str, str]:
    # The engine's list counts whole seconds; what their makers wrote tells those of one apart.
    labels = entry.get("Labels") or {}
    return float(entry.get("Created") or 0), labels.get(names.CREATED, ""), str(entry["Id"])


def _info(entry: Mapping[str, Any]) -> SandboxInfo:
    labels = {str(k): str(v) for k, v in (entry.get("Labels") or {}).items()}
    created = datetime.fromtimestamp(float(entry.get("Created") or 0), UTC)
    return SandboxInfo(
        id=str(entry["Id"]),
        name=str((entry.get("Names") or [""])[0]).lstrip("/"),
        owner=labels.get(names.OWNER, ""),
        state=str(entry.get("State") or ""),
        image=labels.get(names.IMAGE, ""),
        network=labels.get(names.NETWORK, ""),
        durability=labels.get(names.DURABILITY, ""),
        workspace=names.workspace_key(labels),
        kernel=labels.get(names.KERNEL, ""),
        created=created,
        ends=lifetime_end(created, labels),
        labels=names.caller_labels(labels),
    )


def lifetime_end(created: datetime, labels: Mapping[str, str]) -> datetime | None:
    """Return when a sandbox's lifetime is over; `None` for never, or when no label says it."""
    text = labels.get(names.LIFETIME, "")
    seconds = int(text) if text.isdecimal() and len(text) < 12 else 0
    return datetime.fromtimestamp(created.timestamp() + seconds, UTC) if seconds else None
