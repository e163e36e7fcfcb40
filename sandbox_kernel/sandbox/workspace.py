"""The volume of a persistent workspace: its name, its labels, and whether it is ours (B6, TEN).

A workspace is found by its key and its owner, any text each. Both go into the name as a digest,
so that no two pairs share a volume and none of them is ever a path. The name is also that of the
container, by which the engine settles who of several creators was first (B7). Nothing in it can
be read: sandboxes on one network learn each other's names from the engine's resolver.

A volume is used only when its labels say that it is this workspace: whoever else may create
volumes on the engine could have put one there that is a folder of the engine's machine.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from sandbox_kernel import __version__
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxDiskFullError,
    SandboxEngineError,
    SandboxSpecRejectedError,
)
from sandbox_kernel.sandbox import labels as names

FORMAT: Final = "1"
"""Of the names and labels below. Another one never finds the workspaces of this one."""

_DIGEST = 26
_DOMAIN = b"sandbox-kernel workspace 1"


def workspace_name(prefix: str, owner: str, key: str) -> str:
    """Return the name of a workspace's volume, and of its container.

    Parameters
    ----------
    prefix
        What names begin with in this installation.
    owner, key
        Whose workspace, and which: any text.

    Examples
    --------
    >>> workspace_name("sbx-", "alice", "physics/Lab 1.ipynb")
    'sbx-n7myahkmghe5kgzgbjkhrmvwb3'
    """
    digest = hashlib.sha256(_DOMAIN)
    for part in (owner, key):
        data = part.encode()
        # The length in front: no two pairs give the same bytes.
        digest.update(b"\0%d\0" % len(data) + data)
    return prefix + base64.b32encode(digest.digest()).decode().lower()[:_DIGEST]


@dataclass(frozen=True, slots=True)
class Workspace:
    """A persistent workspace.

    Parameters
    ----------
    name
        Of its volume.
    owner, key
        Whose it is, and by what it is found.
    created
        When it was made, in ISO 8601; empty where that cannot be told.
    image
        The image that it was made with, by the name that was used then.
    labels
        All labels of the volume.
    is_new
        Whether its volume has just been made, by whoever got this.
    """

    name: str
    owner: str
    key: str
    created: str
    image: str
    labels: Mapping[str, str]
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class VolumeMount:
    """What has to be mounted at the workspace's place.

    Parameters
    ----------
    source
        The volume's name; `None` for an anonymous one.
    labels
        Its labels: those that an anonymous one gets, or those that a named one has.
    options
        The options of its driver.
    """

    source: str | None
    labels: Mapping[str, str]
    options: Mapping[str, str]


def quota_options(disk: int) -> dict[str, str]:
    """Return the options with which the engine bounds a volume; 0 bytes for no bound."""
    return {"size": str(disk)} if disk else {}


async def ensure_workspace(
    engine: Engine,
    *,
    prefix: str,
    owner: str,
    key: str,
    image: str,
    disk: int = 0,
    extra: Mapping[str, str] | None = None,
) -> Workspace:
    """Make the volume of a workspace, unless there is one, and make sure that it is the one.

    Parameters
    ----------
    engine
        The engine.
    prefix, owner, key
        What gives its name.
    image
        The image of its first sandbox.
    disk
        Bytes that it may hold, or 0.
    extra
        Further labels for a new one.

    Raises
    ------
    SandboxConflictError
        A volume of that name exists and is something else.
    SandboxSpecRejectedError
        The engine cannot bound a volume's size.
    """
    name = workspace_name(prefix, owner, key)
    labels = {
        **(extra or {}),
        names.VERSION: __version__,
        names.OWNER: owner,
        names.CREATED: datetime.now(UTC).isoformat(timespec="seconds"),
        names.IMAGE: image,
        names.DURABILITY: "persistent",
        names.WORKSPACE: names.key_text(key),
        names.FORMAT: FORMAT,
        names.MAKER: secrets.token_hex(8),
    }
    # Asked for first: engines that were restarted answer a creation with what is there, and
    # without its labels (seen on Docker 20.10).
    volume = await engine.inspect_volume(name)
    if volume is None:
        with quota_refusals(disk):
            volume = await engine.create_volume(name, labels, quota_options(disk))
    found = verified(volume, name=name, owner=owner, key=key, disk=disk)
    return replace(found, is_new=found.labels.get(names.MAKER) == labels[names.MAKER])


@contextlib.contextmanager
def quota_refusals(disk: int) -> Iterator[None]:
    """Refuse a disk limit where the engine cannot make a volume that has one (B5).

    Parameters
    ----------
    disk
        Bytes that were asked for, or 0.
    """
    try:
        yield
    except SandboxDiskFullError:
        raise
    except SandboxEngineError as error:
        if not disk or "quota" not in str(error).lower():
            raise
        raise SandboxSpecRejectedError(
            "disk_limit",
            disk,
            "the engine cannot bound the size of a volume: that needs its data on XFS, mounted "
            "with the option pquota",
            "Leave disk_limit out, use an engine that can, or have the workspace watched "
            "(disk_soft_limit).",
        ) from error


def verified(
    volume: Mapping[str, Any], *, name: str, owner: str, key: str, disk: int = 0
) -> Workspace:
    """Return the workspace that a volume is, or refuse the volume.

    Parameters
    ----------
    volume
        The engine's account of it.
    name, owner, key
        Of the workspace that it has to be.
    disk
        Bytes that it has to be bounded to, or 0 for any.

    Raises
    ------
    SandboxConflictError
        With what is wrong with it.
    """
    labels = {str(k): str(v) for k, v in (volume.get("Labels") or {}).items()}
    options = {str(k): str(v) for k, v in (volume.get("Options") or {}).items()}
    plain = set(options) <= {"size"}
    facts = (
        ("its name", volume.get("Name"), name),
        ("its driver", volume.get("Driver"), "local"),
        ("its scope", volume.get("Scope") or "local", "local"),
        ("whether it has options", not plain, False),
        ("the mark of sandbox-kernel", names.VERSION in labels, True),
        ("its format", labels.get(names.FORMAT), FORMAT),
        ("its durability", labels.get(names.DURABILITY), "persistent"),
        ("its owner", labels.get(names.OWNER), owner),
        ("its key", names.workspace_key(labels), key),
    )
    wrong = [f"{what} is {given!r} instead of {asked!r}"
             for what, given, asked in facts if given != asked]  # fmt: skip
    if wrong:
        raise SandboxConflictError(
            f"The volume {name!r} is on the engine and is not this workspace: {'; '.join(wrong)}. "
            "Look at it (docker volume inspect) and remove it, or use another key"
        )
    if disk and options.get("size") != str(disk):
        raise SandboxConflictError(
            f"The workspace {key!r} exists with the disk limit {options.get('size') or 'none'}, "
            f"and {disk} was asked for. Ask for the same, or clone it to a new one"
        )
    return _workspace(name, owner, key, labels)


def workspace_of(volume: Mapping[str, Any]) -> Workspace | None:
    """Return the workspace that a listed volume says to be; `None` for any other volume."""
    labels = {str(k): str(v) for k, v in (volume.get("Labels") or {}).items()}
    key = names.workspace_key(labels)
    owner = labels.get(names.OWNER, "")
    if key is None or labels.get(names.DURABILITY) != "persistent":
        return None
    try:
        return verified(volume, name=str(volume.get("Name")), owner=owner, key=key)
    except SandboxConflictError:
        return None


def _workspace(name: str, owner: str, key: str, labels: dict[str, str]) -> Workspace:
    created, image = labels.get(names.CREATED, ""), labels.get(names.IMAGE, "")
    return Workspace(name, owner, key, created, image, labels)
