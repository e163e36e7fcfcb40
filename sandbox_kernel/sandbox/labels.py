"""Names and values of the labels by which sandboxes are found again (decision 8).

The engine is the only database, and an image's own labels become a container's labels, so
every name of ours is written on every container: what does not apply is written empty, and a
name in our namespace that an image brings along is overwritten. The caller's own labels travel
as one JSON value, so that they come back exactly (B9).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Final

from sandbox_kernel import __version__
from sandbox_kernel.engine.events import EVENT_LABEL

PREFIX: Final = "io.sandbox-kernel."

VERSION: Final = EVENT_LABEL
"""Version of sandbox-kernel that made the object; its presence marks the object as ours."""

OWNER: Final = PREFIX + "owner"
CREATED: Final = PREFIX + "created"
IMAGE: Final = PREFIX + "image"
NETWORK: Final = PREFIX + "network"
DURABILITY: Final = PREFIX + "durability"
WORKSPACE: Final = PREFIX + "workspace"
TTL: Final = PREFIX + "ttl"
LIFETIME: Final = PREFIX + "lifetime"
KERNEL: Final = PREFIX + "kernel"
CALLER: Final = PREFIX + "labels"

LIMITS: Final = PREFIX + "limits"
"""What else has to be known to make the same request again, as JSON; see `plan.py`."""

FORMAT: Final = PREFIX + "format"
"""Of a persistent workspace's volume: the version of the rules that its name and labels follow."""

MAKER: Final = PREFIX + "maker"
"""A random text, by which a creator knows its own container among those of one name."""

PAUSED: Final = PREFIX + "paused"
UNTIL: Final = PREFIX + "until"
"""Of the mark of a paused sandbox: its container, and when that may be removed."""

CORE: Final = (
    *(VERSION, OWNER, CREATED, IMAGE, NETWORK, DURABILITY, WORKSPACE, TTL, LIFETIME, CALLER),
    *(LIMITS, FORMAT, MAKER, PAUSED, UNTIL),
)
"""Written by this layer alone."""

HELPER: Final = PREFIX + "helper"
"""Of a short sandbox of ours that looks into a workspace: nobody's code runs in it, and it does not
count among those that its owner may have."""

OPTIONAL: Final = (KERNEL, HELPER)
"""Written by the layers above where they apply, else empty."""


def make_labels(
    *,
    owner: str,
    created: str,
    image: str,
    network: str,
    ttl: int,
    lifetime: int,
    caller: Mapping[str, str],
    extra: Mapping[str, str],
    foreign: Iterable[str] = (),
    durability: str = "ephemeral",
    workspace: str | None = None,
    limits: str = "",
    maker: str = "",
) -> dict[str, str]:
    """Return every label of ours for a new sandbox.

    Parameters
    ----------
    owner
        Whose it is.
    created
        When, in ISO 8601.
    image
        The image by the name that the caller used.
    network
        The network tier.
    ttl, lifetime
        Of the lease, in seconds; a lifetime of 0 has no end.
    caller
        The caller's own labels.
    extra
        Labels of the layers above, by their full names.
    foreign
        Names that the image brings along; those in our namespace are blanked.
    durability, workspace
        Of the workspace, and its key.
    limits
        The text of the label `LIMITS`.
    maker
        The text of the label `MAKER`.

    Raises
    ------
    ValueError
        `extra` names something outside our namespace, or that only this layer may write.
    """
    for name in extra:
        if not name.startswith(PREFIX) or name in CORE:
            raise ValueError(f"{name!r} is not a label that a caller of this layer may set")
    blank = dict.fromkeys((*CORE, *OPTIONAL, *(n for n in foreign if n.startswith(PREFIX))), "")
    return {
        **blank,
        **extra,
        VERSION: __version__,
        OWNER: owner,
        CREATED: created,
        IMAGE: image,
        NETWORK: network,
        DURABILITY: durability,
        WORKSPACE: "" if workspace is None else key_text(workspace),
        LIMITS: limits,
        MAKER: maker,
        TTL: str(ttl),
        LIFETIME: str(lifetime),
        CALLER: json.dumps(dict(caller), sort_keys=True, ensure_ascii=True),
    }


def key_text(key: str) -> str:
    """Return a workspace's key as its label holds it: exactly, and without control characters."""
    return json.dumps(key, ensure_ascii=True)


def workspace_key(labels: Mapping[str, str]) -> str | None:
    """Return the key in an object's labels, or `None` where there is none that can be read."""
    try:
        value = json.loads(labels.get(WORKSPACE, ""))
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def caller_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the caller's own labels of a container; none where they cannot be read."""
    try:
        value = json.loads(labels.get(CALLER, ""))
    except ValueError:
        return {}
    if not isinstance(value, dict):
        return {}
    return {str(name): str(text) for name, text in value.items()}
