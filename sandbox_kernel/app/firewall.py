"""``jupyter sandbox firewall``: the rules for the engine's machine, and the proof of them (B4)."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, cast

from traitlets import CaselessStrEnum, Unicode

from sandbox_kernel.app.checks import Check
from sandbox_kernel.app.command import ENGINE_ALIASES, ENGINE_FLAGS, SandboxCommand
from sandbox_kernel.app.display import plain
from sandbox_kernel.app.group import CommandGroup
from sandbox_kernel.config import survey
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.engine.images import DEFAULT_IMAGE
from sandbox_kernel.engine.thread import EngineThread
from sandbox_kernel.errors import SandboxError, SandboxSpecRejectedError
from sandbox_kernel.sandbox.firewall import (
    ControlAddress,
    FirewallPlan,
    Format,
    control_addresses,
    parse_control,
)
from sandbox_kernel.sandbox.live import LiveSandbox
from sandbox_kernel.sandbox.network import SharedNetwork, ensure_network, find_network
from sandbox_kernel.sandbox.readiness import Readiness, probe_network, require_proof
from sandbox_kernel.sandbox.spec import SandboxSpec
from sandbox_kernel.sandbox.tiers import SHARED_TIERS, SharedTier, check_resolver

__all__ = ["FirewallApp", "FirewallCheckApp", "FirewallPrintApp", "network_checks"]

_CHECK = "jupyter sandbox firewall check"

_COMMANDS: dict[str, Any] = {
    "print": (
        "sandbox_kernel.app.firewall.FirewallPrintApp",
        "Print the rules to load on the engine's machine.",
    ),
    "check": (
        "sandbox_kernel.app.firewall.FirewallCheckApp",
        "Prove, from sandboxes, that the rules hold.",
    ),
}

_ADDRESSES: dict[Any, Any] = {
    **ENGINE_ALIASES,
    "engine-control": (
        "FirewallCommand.engine_control",
        "Where the engine takes orders, as host:port (default: from the engine's address).",
    ),
    "resolver": (
        "FirewallCommand.resolver",
        "The one resolver that sandboxes may ask (default: the setting dns).",
    ),
}
_PRINT_ALIASES: dict[Any, Any] = {
    **_ADDRESSES,
    "format": ("FirewallPrintApp.format", "nft (the default) or iptables."),
}
_CHECK_ALIASES: dict[Any, Any] = {
    **_ADDRESSES,
    "tier": ("FirewallCheckApp.tier", "egress (the default) or internal."),
    "image": (
        "FirewallCheckApp.image",
        f"Image with Python 3.8 to look from (default: {DEFAULT_IMAGE}).",
    ),
}


class FirewallApp(CommandGroup):
    """``jupyter sandbox firewall``."""

    name = "jupyter-sandbox-firewall"
    description = """The network tier 'egress' is as open as the engine's machine lets it be. Print
    the rules that close what sandboxes must not reach, load them there, and prove that they
    hold."""
    examples = """\
jupyter sandbox firewall print --resolver 198.51.100.53 > sandbox.nft
jupyter sandbox firewall print --resolver 198.51.100.53 --format iptables > sandbox-firewall.sh
jupyter sandbox firewall check --resolver 198.51.100.53
"""
    subcommands = _COMMANDS


class FirewallCommand(SandboxCommand):
    """What the two commands share: the addresses, given or derived."""

    engine_control = Unicode(
        "", help="Where the engine takes orders over the network, as host:port. Since 0.2."
    ).tag(config=True)
    resolver = Unicode(
        "", help="IPv4 address of the one resolver that sandboxes may ask. Since 0.2."
    ).tag(config=True)

    def controls(self, endpoint: Endpoint | None) -> tuple[ControlAddress, ...]:
        """Return where the engine takes orders, as far as that is known."""
        if self.engine_control:
            return parse_control(self.engine_control)
        return () if endpoint is None else control_addresses(endpoint)

    def named_resolver(self) -> str | None:
        """Return the resolver that an option or the configuration names."""
        if self.resolver:
            check_resolver("resolver", self.resolver)
            return self.resolver
        dns = survey().settings["dns"].value
        return None if dns is None else str(dns)


class FirewallPrintApp(FirewallCommand):
    """``jupyter sandbox firewall print``."""

    name = "jupyter-sandbox-firewall-print"
    description = """Print the rules that keep sandboxes on the tiers 'egress' and 'internal' from
    the engine's machine, its control port, private networks, metadata services and each other,
    and let 'egress' reach one resolver, and the public rest over TCP and QUIC. Nothing is
    changed: load the rules on the engine's machine, with `nft -f FILE` or `sh FILE apply`."""
    examples = FirewallApp.examples

    aliases = _PRINT_ALIASES
    flags = ENGINE_FLAGS

    format = CaselessStrEnum(
        ["nft", "iptables"],
        default_value="nft",
        help="""Form of the rules. nft is a table of its own that survives restarts of the engine
        and flushes of its chains; iptables is for machines without nft. Since 0.2.""",
    ).tag(config=True)

    def run(self) -> int:
        """Print them; what was derived goes to standard error."""
        endpoint = self._endpoint()
        controls = self.controls(endpoint)
        resolver = self.named_resolver() or _resolver_of_this_machine(endpoint)
        resolvers = () if resolver is None else (resolver,)
        plan = FirewallPlan(resolvers, tuple(dict.fromkeys(c.address for c in controls)))
        text = plan.render(cast(Format, self.format))
        if self.json_output:
            self.print_json(
                {
                    "ok": True,
                    "format": self.format,
                    "resolvers": list(plan.resolvers),
                    "controls": list(plan.controls),
                    "rules": text,
                }
            )
            return 0
        print(text, end="")
        where = ", ".join(plan.controls) or "none besides the addresses of its machine"
        how = "nft -f FILE" if self.format == "nft" else "sh FILE apply"
        for line in (
            f"Engine control: {where}; resolver: {', '.join(plan.resolvers)}.",
            f"Load it on the engine's machine with `{how}`, at each start of it, and then run "
            f"`{_CHECK}`.",
        ):
            self.err.print(plain(line), markup=False)
        return 0

    def _endpoint(self) -> Endpoint | None:
        """Return the engine, which is not called; rules can be printed where there is none."""
        try:
            return self.endpoint()
        except SandboxError:
            if self.engine_host and not self.engine_control:
                raise
            return None


class FirewallCheckApp(FirewallCommand):
    """``jupyter sandbox firewall check``."""

    name = "jupyter-sandbox-firewall-check"
    description = """Start two sandboxes on a network tier and find out what they reach. The
    engine's control port, its machine, the metadata service and each other must be out of reach,
    and on 'egress' the resolver must answer. A refused connection counts as a way through. The
    exit code is 0 when all is as it has to be and 1 when not."""
    examples = """\
jupyter sandbox firewall check --resolver 198.51.100.53
jupyter sandbox firewall check --tier internal
jupyter sandbox firewall check --json | jq .state
"""

    aliases = _CHECK_ALIASES
    flags = ENGINE_FLAGS

    tier = CaselessStrEnum(
        list(SHARED_TIERS), default_value="egress", help="Network tier to look at. Since 0.2."
    ).tag(config=True)
    image = Unicode(
        DEFAULT_IMAGE, help="Image with Python 3.8 or later to look from. Since 0.2."
    ).tag(config=True)

    def run(self) -> int:
        """Find out, and show it."""
        endpoint = self.endpoint()
        tier = cast(SharedTier, self.tier)
        network, result = EngineThread.current().run(
            functools.partial(
                _check,
                endpoint,
                tier,
                dns=self.named_resolver() if tier == "egress" else None,
                controls=self.controls(endpoint),
                image=self.image,
            )
        )
        if self.json_output:
            self.print_json(_record(network, result))
        else:
            self._show(result)
        return 0 if result.state == "ready" else 1

    def _show(self, result: Readiness) -> None:
        width = max(len(finding.target) for finding in result.findings)
        for finding in result.findings:
            mark = "[green]✓[/]" if finding.good else "[bold red]✗[/]"
            self.out.print(mark, end=" ")
            text = f"{finding.target:<{width}}  {finding.verdict} ({finding.outcome})"
            self.out.print(plain(text), markup=False)
        self.out.print()
        self.out.print(plain(f"{result.state.upper()}: {result.reason}."), markup=False)
        if result.remedy:
            self.out.print(f"  → {plain(result.remedy)}", markup=False)


async def _check(
    endpoint: Endpoint, tier: SharedTier, **options: Any
) -> tuple[SharedNetwork, Readiness]:
    engine = await EngineThread.current().engine(endpoint)
    network = await ensure_network(engine, tier)
    make = functools.partial(LiveSandbox.unproved, engine)
    return network, await probe_network(engine, network, make, **options)


def _record(network: SharedNetwork, result: Readiness) -> dict[str, Any]:
    return {
        "ok": result.state == "ready",
        "state": result.state,
        "tier": result.tier,
        "network": {"name": network.name, "id": network.id},
        "reason": result.reason,
        "remedy": result.remedy,
        "seconds": round(result.seconds, 3),
        "findings": [
            {**dataclasses.asdict(finding), "good": finding.good} for finding in result.findings
        ],
    }


def _resolver_of_this_machine(endpoint: Endpoint | None) -> str | None:
    """Return the resolver that the engine's machine asks, where that is this one."""
    if endpoint is None or not endpoint.is_local:
        return None
    # Where a local stub is in front, systemd keeps the resolvers behind it in a second file.
    for name in ("/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"):
        try:
            lines = Path(name).read_text("utf-8", "replace").splitlines()
        except OSError:
            continue
        for words in map(str.split, lines):
            if len(words) > 1 and words[0] == "nameserver" and _usable(words[1]):
                return words[1]
    return None


def _usable(address: str) -> bool:
    try:
        check_resolver("resolver", address)
    except SandboxSpecRejectedError:
        return False
    return True


async def network_checks(engine: Engine, spec: SandboxSpec) -> list[Check]:
    """Check the networks of the tiers, for ``status``; what is required is proved.

    Parameters
    ----------
    engine
        The engine.
    spec
        What a sandbox gets by default.
    """
    checks = []
    for tier in SHARED_TIERS:
        name = f"network {tier}"
        wanted = spec.network == tier
        try:
            if wanted or (tier == "egress" and spec.require_egress_firewall):
                checks.append(await _proof_check(name, engine, spec, tier))
            elif await find_network(engine, tier) is not None and tier == "egress":
                text = "it is as open as the engine's machine lets it be"
                checks.append(Check(name, "note", f"{text}; `{_CHECK}` finds out how open"))
        except SandboxSpecRejectedError as error:
            text = f"{error.setting}: {error.reason}"
            checks.append(Check(name, "problem" if wanted else "warning", text, error.remedy))
    return checks


async def _proof_check(name: str, engine: Engine, spec: SandboxSpec, tier: SharedTier) -> Check:
    asked = dataclasses.replace(spec, network=tier)
    network = await ensure_network(engine, tier)
    if tier == "egress" and not asked.require_egress_firewall:
        text = "sandboxes get it by default, and no firewall has to be proved for it"
        return Check(name, "warning", text, f"Set require_egress_firewall; see `{_CHECK}`.")
    make = functools.partial(LiveSandbox.unproved, engine)
    await require_proof(engine, network, asked, make)
    return Check(name, "ok", "closed where it has to be, as a probe has just shown")
