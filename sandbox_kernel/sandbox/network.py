"""The shared networks on an engine: made on demand, converged upon, never trusted by name (B3).

A name is no key to an engine: it may hold several networks of one name, made by anybody. So a
network is used by its id, and only after its whole configuration was compared with what ours
has. It is left in place for the next sandbox; without one on it, it costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxDiskFullError,
    SandboxEngineError,
    SandboxSpecRejectedError,
)
from sandbox_kernel.sandbox.tiers import (
    NETWORK_NAMES,
    SharedTier,
    gateway_addresses,
    network_body,
    network_differences,
)

__all__ = ["SharedNetwork", "ensure_network", "find_network"]

log = logging.getLogger(__name__)

_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class SharedNetwork:
    """The network of a tier on one engine, compared with what it has to be.

    Parameters
    ----------
    tier
        The tier.
    id
        By which containers are connected to it.
    name
        Under which the engine lists it with a container.
    gateways
        Its gateway addresses, which are the engine's machine where the bridge has them.
    """

    tier: SharedTier
    id: str
    name: str
    gateways: tuple[str, ...]


async def ensure_network(engine: Engine, tier: SharedTier) -> SharedNetwork:
    """Return the network of a tier, which is made when the engine has none yet.

    Any number of callers, in any number of processes, come to the same network.

    Parameters
    ----------
    engine
        An open engine.
    tier
        ``internal`` or ``egress``.

    Raises
    ------
    SandboxSpecRejectedError
        Something else has the network's name or bridge, or the engine cannot make it.
    """
    for _ in range(_TRIES):
        found = await find_network(engine, tier)
        if found is not None:
            return found
        made = await _make(engine, tier)
        found = await find_network(engine, tier)
        if made is not None and (found is None or found.id != made):
            # Somebody was faster. Nobody uses the younger one, as everybody chooses the older.
            await engine.remove_network(made)
        if found is not None:
            if made == found.id:
                log.info("made the network %s (%s)", found.name, found.id[:12])
            return found
    name = NETWORK_NAMES[tier]
    raise SandboxSpecRejectedError(
        "network",
        tier,
        f"the engine makes no network {name!r}: another one has its bridge, or removes it again",
        f"Find it with `docker network ls` and remove it, or free the bridge {name!r}.",
    )


async def find_network(engine: Engine, tier: SharedTier) -> SharedNetwork | None:
    """Return the network of a tier, or `None` when the engine has none.

    Raises
    ------
    SandboxSpecRejectedError
        A network of that name is something else.
    """
    listed = await engine.list_networks(NETWORK_NAMES[tier])
    return choose_network(tier, listed)


def choose_network(tier: SharedTier, listed: Iterable[Mapping[str, Any]]) -> SharedNetwork | None:
    """Choose among the networks that have a tier's name; every caller makes the same choice."""
    networks = sorted(listed, key=lambda n: (str(n.get("Created", "")), str(n.get("Id", ""))))
    for network in networks:
        wrong = network_differences(tier, network)
        if wrong:
            name = NETWORK_NAMES[tier]
            raise SandboxSpecRejectedError(
                "network",
                tier,
                f"the engine's network {name!r} ({str(network.get('Id', ''))[:12]}) is not the one "
                f"of this tier: {'; '.join(wrong)}",
                f"Remove it (docker network rm {str(network.get('Id', ''))[:12]}); it is made "
                "again as it has to be.",
            )
    if not networks:
        return None
    oldest = networks[0]
    return SharedNetwork(tier, str(oldest["Id"]), NETWORK_NAMES[tier], gateway_addresses(oldest))


async def _make(engine: Engine, tier: SharedTier) -> str | None:
    """Make the network and return its id; `None` when somebody else has just made it."""
    try:
        return await engine.create_network(network_body(tier))
    except SandboxConflictError as error:
        log.debug("the network of the tier %s was not made: %s", tier, error)
        return None
    except SandboxDiskFullError:
        raise
    except SandboxEngineError as error:
        if error.status is None:
            raise
        raise SandboxSpecRejectedError(
            "network",
            tier,
            f"the engine cannot make the network of this tier ({error})",
            "Use Docker 20.10 or later with its bridge driver, or the tier 'none'.",
        ) from error
