"""Does the firewall hold? Two sandboxes find out, before one is handed to a person (B4).

One sandbox on the network tries, at the same moment, everything that must be out of reach, and
asks the resolver, which must answer; the other is the neighbour that it must not reach. Every
target is derived, so that there is nothing to set wrongly. A refused connection counts as a way
through: a closed port on the engine's machine looks the same as a firewall that refuses, and
only silence, or the network's word that it does not go there, is proof.

The tier ``internal`` is always proved, since it has to be closed whatever the engine makes of
its options; ``egress`` where the spec requires it. A proof is kept until the engine is seen to
go away, and for `PROOF_TTL` at most. A refusal is not kept: somebody may be mending it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import ipaddress
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal
from weakref import WeakKeyDictionary

from sandbox_kernel.engine.client import Engine, ExecStream
from sandbox_kernel.engine.images import DEFAULT_IMAGE
from sandbox_kernel.errors import (
    SandboxError,
    SandboxImageMissingError,
    SandboxProtocolError,
    SandboxSpecRejectedError,
    SandboxStartError,
)
from sandbox_kernel.process.program import framed, loader_argv, unsuitable
from sandbox_kernel.sandbox.container import CONTROL_USER
from sandbox_kernel.sandbox.firewall import (
    USUAL_CONTROL_PORTS,
    ControlAddress,
    control_addresses,
)
from sandbox_kernel.sandbox.network import SharedNetwork
from sandbox_kernel.sandbox.spec import MIB, SandboxSpec
from sandbox_kernel.sandbox.tiers import gateway_addresses

if TYPE_CHECKING:
    from sandbox_kernel.sandbox.live import LiveSandbox

__all__ = ["Finding", "Readiness", "probe_network", "require_proof"]

log = logging.getLogger(__name__)

State = Literal["ready", "refused", "not-proven"]
Make = Callable[[SandboxSpec, str], Awaitable["LiveSandbox"]]
"""Makes a sandbox for an owner, without asking for a proof."""

PROOF_TTL: Final = 600.0
"""Seconds after which a proof is made anew: rules can be flushed without the engine's doing."""

PROBE_SECONDS: Final = 2.0
"""How long a target gets; the second attempt of a connection comes after one."""

PROBE_IMAGE: Final = DEFAULT_IMAGE
"""Our own, whatever image the sandbox has: who makes an image could make one that lies."""

PROBE_OWNER: Final = "firewall-probe"
"""Whose the probe's sandboxes are; they belong to nobody who could want them back."""

METADATA: Final = "169.254.169.254"
_MACHINE_PORTS: Final = (22, 53)
_BOUND: Final = 20.0
_LARGEST_REPORT: Final = 64 * 1024

_BLOCKED = frozenset({"timeout", "EHOSTUNREACH", "ENETUNREACH", "EACCES"})
_NO_SUCH_FAMILY = frozenset({"EADDRNOTAVAIL", "EAFNOSUPPORT"})
_REACHED = frozenset({"connected", "ECONNREFUSED", "ECONNRESET"})
_SERVER_FAILURE, _REFUSED = "answered 2", "answered 5"


@dataclass(frozen=True, slots=True)
class Finding:
    """One target of the probe.

    Parameters
    ----------
    target
        What it is, for people.
    wanted
        ``blocked``: must be out of reach. ``answer``: must answer.
    outcome
        What happened: ``connected``, ``answered N``, the name of an error, or ``timeout``.
    verdict
        ``blocked``, ``reached``, ``answered``, ``silent``, or ``unknown``, which counts as
        reached.
    """

    target: str
    wanted: Literal["blocked", "answer"]
    outcome: str
    verdict: Literal["blocked", "reached", "answered", "silent", "unknown"]

    @property
    def good(self) -> bool:
        """Whether it is as it has to be."""
        return self.verdict == ("blocked" if self.wanted == "blocked" else "answered")


@dataclass(frozen=True, slots=True)
class Readiness:
    """What the probe found on one network.

    Parameters
    ----------
    tier
        Of the network.
    findings
        Every target.
    seconds
        How long it took to find out.
    """

    tier: str
    findings: tuple[Finding, ...]
    seconds: float = field(compare=False, default=0.0)

    @property
    def state(self) -> State:
        """``ready``; ``refused``: something can be reached; ``not-proven``: nothing can."""
        bad = [finding for finding in self.findings if not finding.good]
        if any(finding.wanted == "blocked" for finding in bad):
            return "refused"
        return "not-proven" if bad or not self.findings else "ready"

    @property
    def reason(self) -> str:
        """The state in words, every target that failed by name."""
        bad = [f for f in self.findings if not f.good]
        if self.state == "ready":
            return f"the network of the tier {self.tier!r} is closed where it has to be"
        if self.state == "refused":
            open_ones = [f"{f.target} ({f.outcome})" for f in bad if f.wanted == "blocked"]
            return (
                "the firewall does not hold: from a sandbox there is a way to "
                f"{', '.join(open_ones)}"
            )
        silent = ", ".join(f"{f.target} ({f.outcome})" for f in bad) or "nothing was tried"
        return (
            "the firewall is not proven: what must be out of reach is, but so is "
            f"{silent}, and a network without any way out would look the same"
        )

    @property
    def remedy(self) -> str:
        """What to do about it; empty when it is ready."""
        if self.state == "ready":
            return ""
        if self.state == "not-proven":
            return (
                "Check that dns names a resolver that the engine's machine reaches, and that the "
                "firewall lets sandboxes ask it; then run `jupyter sandbox firewall check`."
            )
        peers = [f for f in self.findings if f.target.startswith(_PEER) and not f.good]
        neighbours = (
            " Neighbours on one bridge are kept apart only with "
            "`sysctl net.bridge.bridge-nf-call-iptables=1` there and an engine that may set rules."
            if peers
            else ""
        )
        return (
            "Load what `jupyter sandbox firewall print` gives on the engine's machine, then run "
            f"`jupyter sandbox firewall check`.{neighbours}"
        )


_PEER = "a neighbour on the same network"


async def require_proof(
    engine: Engine,
    network: SharedNetwork,
    spec: SandboxSpec,
    make: Make,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Refuse a sandbox on a network that is not shown to be closed where it has to be.

    Callers that come while a probe is under way share its result.

    Parameters
    ----------
    engine
        The engine.
    network
        The network of the spec's tier.
    spec
        What is wanted.
    make
        Makes the probe's sandboxes.
    clock
        Gives the time in seconds.

    Raises
    ------
    SandboxSpecRejectedError
        With the targets that failed.
    SandboxError
        The probe itself could not be made.
    """
    if network.tier == "egress" and not spec.require_egress_firewall:
        return
    key = (network.id, spec.dns if network.tier == "egress" else None)
    proof = _proofs.setdefault(engine, {}).setdefault(key, _Proof())
    asked = clock()
    async with proof.lock:
        if not proof.holds(engine, asked, clock()):
            proof.result = None
            interruptions = engine.events.interruptions
            proof.result = await probe_network(
                engine,
                network,
                make,
                dns=key[1],
                controls=await asyncio.to_thread(control_addresses, engine.endpoint),
                image=PROBE_IMAGE,
            )
            proof.made, proof.interruptions = clock(), interruptions
        result = proof.result
    assert result is not None
    if result.state != "ready":
        raise SandboxSpecRejectedError("network", spec.network, result.reason, result.remedy)


class _Proof:
    """The last result for one network; most often a proof."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.result: Readiness | None = None
        self.made = 0.0
        self.interruptions = -1

    def holds(self, engine: Engine, asked: float, now: float) -> bool:
        """Whether it answers a question asked at a time; a refusal only if asked before it."""
        if self.result is None or self.interruptions != engine.events.interruptions:
            return False
        if self.result.state != "ready":
            return asked <= self.made
        return now - self.made < PROOF_TTL


_proofs: WeakKeyDictionary[Engine, dict[tuple[str, str | None], _Proof]] = WeakKeyDictionary()


async def probe_network(
    engine: Engine,
    network: SharedNetwork,
    make: Make,
    *,
    dns: str | None = None,
    controls: Sequence[ControlAddress] = (),
    image: str = PROBE_IMAGE,
    seconds: float = PROBE_SECONDS,
) -> Readiness:
    """Find out what a sandbox on a network reaches.

    Parameters
    ----------
    engine
        The engine.
    network
        The network; never ``none``'s, which has none.
    make
        Makes the probe's sandboxes, which are gone when this ends.
    dns
        The resolver of the tier ``egress``, which is also asked directly.
    controls
        Where the engine takes orders over the network.
    image
        What the probe runs in.
    seconds
        How long a target gets.

    Raises
    ------
    SandboxError
        The probe could not be made.
    """
    began = time.monotonic()
    try:
        async with _two_sandboxes(make, _probe_spec(network, dns, image)) as sandboxes:
            async with asyncio.timeout(_BOUND):
                findings = await _look(
                    engine, network, *sandboxes, dns=dns, controls=controls, seconds=seconds
                )
            result = Readiness(network.tier, tuple(findings), time.monotonic() - began)
    except SandboxImageMissingError as error:
        error.add_note(f"The image {image!r} is needed to prove the network {network.name!r}.")
        raise
    except TimeoutError as error:
        if isinstance(error, SandboxError):
            raise
        raise SandboxStartError(
            f"The probe of the network {network.name!r} did not end within {_BOUND:g} s"
        ) from error
    log.info(
        "network %s is %s, found in %.0f ms", network.name, result.state, result.seconds * 1000
    )
    return result


def _probe_spec(network: SharedNetwork, dns: str | None, image: str) -> SandboxSpec:
    return SandboxSpec(
        image=image,
        network=network.tier,
        dns=dns if network.tier == "egress" else None,
        cpu_limit=None,
        mem_limit=128 * MIB,
        pids_limit=64,
        lease_ttl=10,
        max_lifetime=_BOUND * 2,
    )


@contextlib.asynccontextmanager
async def _two_sandboxes(
    make: Make, spec: SandboxSpec
) -> AsyncIterator[tuple[LiveSandbox, LiveSandbox]]:
    """Make two sandboxes at once, and remove them at the end, whatever happens."""
    making = [asyncio.ensure_future(make(spec, PROBE_OWNER)) for _ in range(2)]
    try:
        try:
            await asyncio.gather(*making)
        except BaseException:
            for task in making:
                task.cancel()
            await asyncio.wait(making)
            raise
        yield making[0].result(), making[1].result()
    finally:
        made = [t.result() for t in making if not t.cancelled() and t.exception() is None]
        await asyncio.gather(*(sandbox.destroy() for sandbox in made), return_exceptions=True)


async def _targets(
    engine: Engine, network: SharedNetwork, controls: Sequence[ControlAddress]
) -> dict[tuple[str, int], str]:
    """Return what must be out of reach, with the words for it."""
    found = {(c.address, c.port): f"the engine's control address {c}" for c in controls}
    found[METADATA, 80] = f"the metadata service {METADATA}:80"
    # The gateway of the engine's first network is one more address of its machine.
    first = await engine.inspect_network("bridge")
    others = () if first is None else gateway_addresses(first, guess=True)
    for address in (*network.gateways, *others):
        for port in _machine_ports(controls):
            found.setdefault((address, port), f"the engine's machine {address}:{port}")
    return found


def _machine_ports(controls: Sequence[ControlAddress]) -> tuple[int, ...]:
    control = [c.port for c in controls] or USUAL_CONTROL_PORTS
    return tuple(dict.fromkeys((*control, *_MACHINE_PORTS)))


async def _look(
    engine: Engine,
    network: SharedNetwork,
    eyes: LiveSandbox,
    peer: LiveSandbox,
    *,
    dns: str | None,
    controls: Sequence[ControlAddress],
    seconds: float,
) -> list[Finding]:
    nonce = secrets.token_hex(8)
    targets = await _targets(engine, network, controls)
    await _address(engine, eyes, network)  # or nothing that it finds is about this network
    async with await _program(peer, {"listen": True, "nonce": nonce}) as listening:
        port = int((await _report(peer, listening, nonce))["port"])
        address = await _address(engine, peer, network)
        targets[address, port] = f"{_PEER}, {address}:{port}"
        # Where the resolver is on the engine's machine, its port is open on purpose.
        wanted = [key for key in targets if key != (dns, 53)]
        order = {
            "listen": False,
            "nonce": nonce,
            "tcp": wanted,
            "gateway_ports": _machine_ports(controls),
            "dns": [] if dns is None else [dns],
            # Random, so that no answer can come out of a cache on the way.
            "question": f"{nonce}.invalid",
            # A question that nobody answers keeps the engine from removing the sandbox for
            # seconds, and the way to the engine's own resolver loses none.
            "repeat": network.tier == "egress",
            "seconds": seconds,
        }
        async with await _program(eyes, order) as looking:
            report = await _report(eyes, looking, nonce)
    return judge(network.tier, {key: targets[key] for key in wanted}, report, dns)


def judge(
    tier: str,
    targets: Mapping[tuple[str, int], str],
    report: Mapping[str, Any],
    dns: str | None = None,
) -> list[Finding]:
    """Turn the facts of a report into verdicts.

    Parameters
    ----------
    tier
        Of the network.
    targets
        What must be out of reach, with the words for it; each has to be in the report.
    report
        What the program in the sandbox found.
    dns
        The resolver that was to be asked.

    Raises
    ------
    SandboxProtocolError
        The report is not one.
    """
    try:
        tcp = {(str(host), int(port)): str(outcome) for host, port, outcome in report["tcp"]}
        asked = {str(host): str(outcome) for host, outcome in report["dns"]}
    except (TypeError, ValueError, KeyError) as error:
        raise SandboxProtocolError("The probe's report cannot be understood") from error
    findings = [
        Finding(words, "blocked", outcome := tcp.get(key, "missing"), _reachable(key[0], outcome))
        for key, words in targets.items()
    ]
    for host, port in sorted(tcp.keys() - targets.keys() - {(dns, 53)}):
        outcome = tcp[host, port]
        words = f"the sandbox's gateway {host}:{port}"
        findings.append(Finding(words, "blocked", outcome, _reachable(host, outcome)))
    if dns is not None:
        asked.setdefault(dns, "missing")
    for host, outcome in asked.items():
        findings.append(_answer(tier, host, outcome))
    if tier == "egress" and not asked:
        findings.append(Finding("the sandbox's resolver", "answer", "none is named", "silent"))
    return findings


def _reachable(host: str, outcome: str) -> Literal["blocked", "reached", "unknown"]:
    if outcome in _BLOCKED or (":" in host and outcome in _NO_SUCH_FAMILY):
        return "blocked"
    return "reached" if outcome in _REACHED else "unknown"


def _answer(tier: str, host: str, outcome: str) -> Finding:
    """Judge a resolver: on ``egress`` it must answer, on ``internal`` no answer may get out."""
    answered = outcome.startswith("answered ")
    # What the engine itself says when nobody answered it.
    made_up = ipaddress.ip_address(host).is_loopback and outcome in {_SERVER_FAILURE, _REFUSED}
    if tier == "egress":
        words = f"the sandbox's resolver {host}"
        good = answered and not made_up
        return Finding(words, "answer", outcome, "answered" if good else "silent")
    words = f"a resolver by way of {host}"
    leaks = answered and not made_up
    return Finding(words, "blocked", outcome, "reached" if leaks else "blocked")


async def _program(sandbox: LiveSandbox, order: Mapping[str, object]) -> ExecStream:
    stream = await sandbox.exec(loader_argv(), user=CONTROL_USER)
    try:
        await stream.write(_text() + json.dumps(order).encode() + b"\n")
    except BaseException:
        await stream.close()
        raise
    return stream


@cache
def _text() -> bytes:
    return framed(importlib.resources.files(__package__).joinpath("reach.py").read_text("utf-8"))


async def _report(sandbox: LiveSandbox, stream: ExecStream, nonce: str) -> dict[str, Any]:
    """Read the line that the program writes; the engine's own words come on the same stream."""
    output = bytearray()
    while b"\n" not in output and len(output) < _LARGEST_REPORT:
        chunk = await stream.read()
        if chunk is None:
            break
        if chunk.stream == 1:
            output += chunk.data
    try:
        report = json.loads(output.partition(b"\n")[0])
        if report["nonce"] == nonce:
            return dict(report)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    state = await sandbox.engine.inspect_exec(stream.id)
    cause = unsuitable(state.exit_code, sandbox.spec.image, "The probe's image")
    raise cause or SandboxProtocolError("The probe in the sandbox gave no report")


async def _address(engine: Engine, sandbox: LiveSandbox, network: SharedNetwork) -> str:
    """Return a sandbox's address, and make sure that it is on the network that is proved."""
    inspected = await engine.inspect_container(sandbox.id)
    attached = (inspected.get("NetworkSettings") or {}).get("Networks") or {}
    for settings in attached.values():
        if settings.get("NetworkID") == network.id:
            with contextlib.suppress(ValueError):
                return str(ipaddress.IPv4Address(str(settings.get("IPAddress"))))
    raise SandboxStartError(f"The probe has no address on the network {network.name!r}")
