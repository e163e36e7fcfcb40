"""The ruleset that keeps sandboxes on the tier ``egress`` where they belong (B3).

Two forms of one set of rules: `firewall.nft` and `firewall.sh`, which are whole files that can be
read and checked as they are. What differs from site to site is addresses, and those are added
as data, never spliced into a rule. Nothing is applied here: whoever runs the engine's machine
loads it, and `readiness.py` finds out whether it holds.
"""

from __future__ import annotations

import ipaddress
import shlex
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Final, Literal
from urllib.parse import urlsplit

from sandbox_kernel.engine.endpoint import PLAIN_PORT, TLS_PORT, Endpoint
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.sandbox.tiers import check_resolver

__all__ = ["DENIED", "ControlAddress", "FirewallPlan", "control_addresses", "parse_control"]

Format = Literal["nft", "iptables"]

DENIED: Final = (
    "0.0.0.0/8",  # this network
    "10.0.0.0/8",  # private
    "100.64.0.0/10",  # shared by carriers and clouds
    "127.0.0.0/8",  # loopback
    "169.254.0.0/16",  # link-local, where clouds serve credentials
    "172.16.0.0/12",  # private, engines' own networks among them
    "192.0.0.0/24",  # protocol assignments
    "192.168.0.0/16",  # private
    "198.18.0.0/15",  # benchmarks
    "224.0.0.0/4",  # multicast
    "240.0.0.0/4",  # reserved, and broadcast
)
"""Where no sandbox may go, whatever else is allowed."""

USUAL_CONTROL_PORTS: Final = (PLAIN_PORT, TLS_PORT)


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """An address and a port on which an engine takes orders."""

    address: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


Lookup = Callable[[str], Iterable[str]]
"""Gives the addresses of a host name; raises `OSError` where there are none."""


def addresses_of(host: str) -> tuple[str, ...]:
    """Look a host name up; an address is its own answer."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def parse_control(text: str, lookup: Lookup = addresses_of) -> tuple[ControlAddress, ...]:
    """Read ``host:port``; every address of the host counts.

    Raises
    ------
    SandboxSpecRejectedError
        It has another form, or the host has no address.
    """
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.path or parts.query or "@" in text:
        raise SandboxSpecRejectedError(
            "engine_control",
            text,
            "this is not an address with a port",
            "Write host:port, for example 'engine.example.org:2376'.",
        )
    return _control(host, port, text, lookup)


def control_addresses(
    endpoint: Endpoint, lookup: Lookup = addresses_of
) -> tuple[ControlAddress, ...]:
    """Return where an engine takes orders over the network, as far as its endpoint tells.

    A Unix socket tells nothing, and neither does a loopback address: in a sandbox, that is the
    sandbox itself.

    Parameters
    ----------
    endpoint
        The engine.
    lookup
        How host names are looked up.
    """
    if endpoint.socket_path is not None:
        return ()
    parts = urlsplit(endpoint.url)
    assert parts.hostname is not None
    port = parts.port or (TLS_PORT if endpoint.tls is not None else PLAIN_PORT)
    return _control(parts.hostname, port, endpoint.url, lookup)


def _control(host: str, port: int, shown: str, lookup: Lookup) -> tuple[ControlAddress, ...]:
    try:
        addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in lookup(host)]
    except (OSError, ValueError) as error:
        raise SandboxSpecRejectedError(
            "engine_control", shown, "the host has no address", "Check the name."
        ) from error
    return tuple(ControlAddress(str(a), port) for a in addresses if not a.is_loopback)


@dataclass(frozen=True, slots=True)
class FirewallPlan:
    """The addresses of one site.

    Parameters
    ----------
    resolvers
        The resolvers that sandboxes may ask; the specs' ``dns`` is one of them.
    controls
        Addresses of the engine, of which no port may be reached. Those of the machine that the
        rules run on are out of reach anyway.
    """

    resolvers: tuple[str, ...]
    controls: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.resolvers:
            raise SandboxSpecRejectedError(
                "resolver",
                None,
                "no resolver is named, and without one sandboxes reach nothing by name",
                "Name one with --resolver; see /etc/resolv.conf of the engine's machine.",
            )
        for address in self.resolvers:
            check_resolver("resolver", address)
        # The rules let no IPv6 through at all.
        kept = tuple(a for a in self.controls if ipaddress.ip_address(a).version == 4)
        object.__setattr__(self, "controls", kept)

    def render(self, format: Format = "nft") -> str:
        """Return the ruleset as a file to load: with ``nft -f``, or with ``sh`` and ``apply``."""
        if format == "nft":
            elements = {
                "denied": DENIED,
                "resolvers": self.resolvers,
                "controls": self.controls,
            }
            added = [
                f"add element inet sandbox_kernel {name} {{ {', '.join(values)} }}"
                for name, values in elements.items()
                if values
            ]
            return "\n".join([_text("firewall.nft"), *added, ""])
        lists = {"RESOLVERS": self.resolvers, "CONTROLS": self.controls, "DENIED": DENIED}
        first, _, rest = _text("firewall.sh").partition("\n")
        given = [f"{name}={shlex.quote(' '.join(values))}" for name, values in lists.items()]
        return "\n".join([first, *given, rest])


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
