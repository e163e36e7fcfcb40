"""The network tiers: what each one is, to the last option (B3; security profile, section 4).

``none`` is loopback alone. ``internal`` and ``egress`` are one shared network each per engine,
whose bridges have fixed names, so that a firewall on the engine's machine can be written for
them once. Nothing is asked of an engine here; `network.py` makes the networks.

A plain internal network of an engine is not closed: its gateway is an address of the engine's
machine, and every port of that machine answers there. So ours has a bridge without an address.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NoReturn

from sandbox_kernel import __version__
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.sandbox.labels import NETWORK, VERSION

Tier = Literal["none", "internal", "egress"]
SharedTier = Literal["internal", "egress"]

TIERS: Final[tuple[Tier, ...]] = ("none", "internal", "egress")
"""From the tightest to the widest."""

SHARED_TIERS: Final[tuple[SharedTier, ...]] = ("internal", "egress")

NETWORK_NAMES: Final[Mapping[SharedTier, str]] = {
    "internal": "sbx-internal",
    "egress": "sbx-egress",
}
"""Of the network and of its bridge; a bridge's name has room for 15 characters."""

BLACKHOLE_DNS: Final = "192.0.2.1"
"""An address for documentation: nobody answers. An empty list would mean the host's resolver."""

_BRIDGE = "com.docker.network.bridge."
_OPTIONS: Final[Mapping[SharedTier, Mapping[str, str]]] = {
    "internal": {
        _BRIDGE + "name": NETWORK_NAMES["internal"],
        _BRIDGE + "enable_icc": "false",
        # No address of the engine's machine in the sandboxes' reach.
        _BRIDGE + "inhibit_ipv4": "true",
    },
    "egress": {
        _BRIDGE + "name": NETWORK_NAMES["egress"],
        _BRIDGE + "enable_icc": "false",
    },
}

_ALLOWLIST_WORDS = frozenset({"allowlist", "allow-list", "allow_list", "whitelist", "restricted"})


def check_network(network: Any, dns: Any, require_egress_firewall: Any) -> None:
    """Refuse network settings that can never be honoured.

    Parameters
    ----------
    network
        The tier.
    dns
        The one resolver of the tier ``egress``; other tiers have none, whatever is set here.
    require_egress_firewall
        Whether that tier has to be behind a firewall that was proved.

    Raises
    ------
    SandboxSpecRejectedError
        With what can be had instead.
    """
    if not isinstance(require_egress_firewall, bool):
        reason = "this is neither true nor false"
        _refuse("require_egress_firewall", require_egress_firewall, reason, "Use True or False.")
    if not isinstance(network, str) or network not in TIERS:
        _refuse_network(network)
    if dns is not None:
        check_resolver("dns", dns)
    elif network == "egress" and require_egress_firewall:
        _refuse(
            "dns",
            None,
            "a firewall lets through one resolver only, and none is named for the tier 'egress'",
            "Set dns to the address of the resolver that the firewall allows.",
        )


def check_resolver(setting: str, address: Any) -> None:
    """Refuse what cannot be the address of a sandbox's resolver."""
    try:
        parsed = ipaddress.IPv4Address(address) if isinstance(address, str) else None
    except ValueError:
        parsed = None
    if parsed is None:
        _refuse(setting, address, "this is not an IPv4 address", "Name one, e.g. '198.51.100.53'.")
    if (
        parsed.is_loopback
        or parsed.is_unspecified
        or parsed.is_multicast
        or int(parsed) >> 28 == 15
    ):
        reason = "a sandbox cannot reach such an address: it would be the sandbox itself or nobody"
        _refuse(setting, address, reason, "Name the resolver's address on the network.")


def _refuse_network(network: Any) -> NoReturn:
    tiers = ", ".join(map(repr, TIERS))
    text = network.strip().lower() if isinstance(network, str) else None
    names = text is not None and (text in _ALLOWLIST_WORDS or "." in text or "," in text)
    if names or isinstance(network, Mapping | list | tuple | set | frozenset):
        _refuse(
            "network",
            network,
            "an engine cannot enforce a list of domains: it sees addresses, and which addresses "
            "stand behind a name is for those to say who own the name",
            f"Use one of {tiers}; behind 'egress', a firewall or a filtering proxy of the site "
            "can narrow what is reached.",
        )
    _refuse("network", network, "there is no such network tier", f"Use one of {tiers}.")


def network_body(tier: SharedTier) -> dict[str, Any]:
    """Return the body of the engine's call that makes a tier's network."""
    return {
        "Name": NETWORK_NAMES[tier],
        "CheckDuplicate": True,
        "Driver": "bridge",
        "Internal": tier == "internal",
        "Attachable": False,
        "Ingress": False,
        "EnableIPv6": False,
        "Options": dict(_OPTIONS[tier]),
        "Labels": {VERSION: __version__, NETWORK: tier},
    }


def network_differences(tier: SharedTier, inspected: Mapping[str, Any]) -> list[str]:
    """List where a network of the engine is something else than this tier's.

    What was not asked for has to be empty. The subnet is free: whoever runs the engine may have
    made the network beforehand with one of their choice.

    Parameters
    ----------
    tier
        The tier.
    inspected
        The engine's account of the network.
    """
    wanted = network_body(tier)
    labels = {**(inspected.get("Labels") or {})}
    made_by = labels.pop(VERSION, "")
    ipam = inspected.get("IPAM") or {}
    facts: tuple[tuple[str, object, object], ...] = (
        ("Name", inspected.get("Name"), wanted["Name"]),
        ("Driver", inspected.get("Driver"), "bridge"),
        ("Scope", inspected.get("Scope"), "local"),
        ("Internal", bool(inspected.get("Internal")), wanted["Internal"]),
        ("Attachable", bool(inspected.get("Attachable")), False),
        ("Ingress", bool(inspected.get("Ingress")), False),
        ("EnableIPv4", inspected.get("EnableIPv4", True), True),
        ("EnableIPv6", bool(inspected.get("EnableIPv6")), False),
        ("ConfigOnly", bool(inspected.get("ConfigOnly")), False),
        ("ConfigFrom", (inspected.get("ConfigFrom") or {}).get("Network") or "", ""),
        ("Options", dict(inspected.get("Options") or {}), wanted["Options"]),
        ("Labels", labels, {NETWORK: tier}),
        (f"Labels[{VERSION!r}]", bool(made_by), True),
        ("IPAM.Driver", ipam.get("Driver") or "default", "default"),
        ("IPAM.Options", dict(ipam.get("Options") or {}), {}),
        ("IPAM.Config", _subnets(ipam.get("Config") or ()), ["an IPv4 subnet"]),
    )
    return [f"{name} is {given!r} instead of {asked!r}" for name, given, asked in facts
            if given != asked]  # fmt: skip


def _subnets(config: Iterable[Mapping[str, Any]]) -> list[str]:
    """Describe the subnets; exactly one of IPv4, with nothing beside its gateway, is right."""
    described = []
    for pool in config:
        beside = {k: v for k, v in pool.items() if k not in {"Subnet", "Gateway", "IPRange"} and v}
        try:
            ipaddress.IPv4Network(str(pool.get("Subnet")))
        except ValueError:
            beside["Subnet"] = pool.get("Subnet")
        plain = not beside
        described.append("an IPv4 subnet" if plain else str(dict(pool)))
    return described


def gateway_addresses(inspected: Mapping[str, Any], *, guess: bool = False) -> tuple[str, ...]:
    """Return a network's IPv4 gateways: addresses of the engine's machine, where it has them.

    Parameters
    ----------
    inspected
        The engine's account of the network.
    guess
        Whether to take the first address of a subnet for which no gateway is named, as an engine
        does for its first network. On a network without one, a container may have it.
    """
    found = []
    for pool in (inspected.get("IPAM") or {}).get("Config") or ():
        try:
            subnet = ipaddress.IPv4Network(str(pool.get("Subnet")))
            given = str(pool.get("Gateway") or "").partition("/")[0]
            if given or guess:
                found.append(str(ipaddress.IPv4Address(given) if given else subnet[1]))
        except (ValueError, IndexError):
            continue
    return tuple(found)


def shared_tier(network: str) -> SharedTier | None:
    """Return the tier when it is one with a network, else `None`."""
    return next((tier for tier in SHARED_TIERS if tier == network), None)


def _refuse(setting: str, value: object, reason: str, remedy: str) -> NoReturn:
    raise SandboxSpecRejectedError(setting, value, reason, remedy)
