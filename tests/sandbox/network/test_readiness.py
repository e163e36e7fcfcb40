"""The readiness probe: six states of an engine, six right answers (B4; NET-05, 13 to 17)."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxError,
    SandboxImageMissingError,
    SandboxImageUnsuitableError,
    SandboxProtocolError,
    SandboxSpecRejectedError,
)
from sandbox_kernel.sandbox import readiness
from sandbox_kernel.sandbox.firewall import FirewallPlan, parse_control
from sandbox_kernel.sandbox.labels import OWNER
from sandbox_kernel.sandbox.live import LiveSandbox
from sandbox_kernel.sandbox.network import SharedNetwork, ensure_network
from sandbox_kernel.sandbox.readiness import (
    PROBE_OWNER,
    PROOF_TTL,
    Finding,
    Readiness,
    judge,
    probe_network,
    require_proof,
)
from sandbox_kernel.sandbox.spec import SandboxSpec
from tests.engines import busybox_archive, wait_until
from tests.sandbox.network.lab import (
    CONTROL_PORT,
    ENGINE,
    RESOLVER,
    NetworkLab,
    load_rules,
)

pytestmark = pytest.mark.timeout(300)

Create = Callable[..., Awaitable[LiveSandbox]]


@pytest.fixture(autouse=True)
def probe_image(monkeypatch: pytest.MonkeyPatch, lab: NetworkLab) -> Callable[[str], None]:
    """Set the image of the probe: the laboratory's own, which is small."""

    def use(image: str) -> None:
        monkeypatch.setattr(readiness, "PROBE_IMAGE", image)

    use(lab.image)
    return use


@pytest.fixture
async def create(lab: NetworkLab, lab_engine: Engine) -> AsyncIterator[Create]:
    """Make sandboxes behind a firewall that has to be proved; nothing of the probe may stay."""
    made: list[LiveSandbox] = []

    async def make(**settings: Any) -> LiveSandbox:
        spec = SandboxSpec(
            **{
                "image": lab.image,
                "network": "egress",
                "dns": RESOLVER,
                "require_egress_firewall": True,
                **settings,
            }
        )
        made.append(await LiveSandbox.create(lab_engine, spec, owner="tester"))
        return made[-1]

    yield make
    for sandbox in made:
        await sandbox.destroy()
    assert probes(lab) == []


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The probes that were made, by the id of their network."""
    made: list[str] = []

    async def counting(engine: Engine, network: SharedNetwork, make: Any, **rest: Any) -> Readiness:
        made.append(network.id)
        return await probe_network(engine, network, make, **rest)

    monkeypatch.setattr(readiness, "probe_network", counting)
    return made


def probes(lab: NetworkLab) -> list[str]:
    return [container["Id"] for container in lab.api.containers(f"{OWNER}={PROBE_OWNER}")]


async def probe(lab: NetworkLab, engine: Engine, tier: str) -> Readiness:
    network = await ensure_network(engine, "egress" if tier == "egress" else "internal")
    return await probe_network(
        engine,
        network,
        functools.partial(LiveSandbox.unproved, engine),
        dns=RESOLVER if tier == "egress" else None,
        controls=parse_control(f"{ENGINE}:{CONTROL_PORT}"),
        image=lab.image,
    )


def reject_as_a_firewall_does_by_default(lab: NetworkLab) -> None:
    lab.clear_firewall()
    lab.in_engine("iptables", "-I", "DOCKER-USER", "-i", "sbx-egress", "!", "-d", RESOLVER,
                  "-j", "REJECT")  # fmt: skip
    lab.in_engine("iptables", "-I", "INPUT", "-i", "sbx-egress", "-p", "tcp",
                  "-j", "REJECT", "--reject-with", "tcp-reset")  # fmt: skip


def let_nothing_out(lab: NetworkLab) -> None:
    lab.clear_firewall()
    for chain in ("DOCKER-USER", "INPUT"):
        lab.in_engine("iptables", "-I", chain, "-i", "sbx-egress", "-j", "DROP")


def load_a_broken_file(lab: NetworkLab) -> None:
    lab.clear_firewall()
    broken = FirewallPlan((RESOLVER,)).render("nft").replace("chain outwards", "chain fwd")
    with pytest.raises(AssertionError, match="syntax error"):
        lab.in_engine("nft", "-f", "-", stdin=broken)


def flush_and_restart(lab: NetworkLab) -> None:
    load_rules(lab, "nft")
    lab.in_engine("iptables", "-F", "DOCKER-USER")
    lab.restart_engine()


STATES: dict[str, tuple[Callable[[NetworkLab], None], str, str]] = {
    "nft rules": (functools.partial(load_rules, form="nft"), "ready", ""),
    "iptables rules": (functools.partial(load_rules, form="iptables"), "ready", ""),
    "no firewall (NET-13)": (functools.partial(load_rules, form=""), "refused", "connected"),
    "default REJECT (NET-14)": (reject_as_a_firewall_does_by_default, "refused", "ECONNREFUSED"),
    "no way out": (let_nothing_out, "not-proven", "resolver"),
    "rules that failed to load (NET-17)": (load_a_broken_file, "refused", "connected"),
    "flushed and restarted (NET-16)": (flush_and_restart, "ready", ""),
}


@pytest.mark.parametrize("state", STATES)
async def test_each_state_of_an_engine_gets_its_answer(lab: NetworkLab, state: str) -> None:
    """B4: security profile, 4.4."""
    bring_about, expected, named = STATES[state]
    bring_about(lab)
    async with Engine(lab.endpoint) as engine:
        result = await probe(lab, engine, "egress")
    assert result.state == expected, result
    assert named in result.reason
    assert bool(result.remedy) == (expected != "ready")
    control = f"the engine's control address {ENGINE}:{CONTROL_PORT}"
    [finding] = [f for f in result.findings if f.target == control]
    assert finding.good == (expected in {"ready", "not-proven"})
    # Twelve targets that say nothing for two seconds each: they were not tried in turn.
    assert len(result.findings) > 10
    assert result.seconds < 15
    assert probes(lab) == []


async def test_flushed_rules_are_noticed_by_the_next_probe(
    lab: NetworkLab, lab_engine: Engine
) -> None:
    """NET-16: the iptables form does not survive a flush, and the probe says so."""
    load_rules(lab, "iptables")
    lab.in_engine("iptables", "-F", "DOCKER-USER")
    result = await probe(lab, lab_engine, "egress")
    assert result.state == "refused"
    assert "metadata" in result.reason


@pytest.mark.parametrize("tier", ["egress", "internal"])
async def test_neighbours_that_the_engine_does_not_keep_apart_are_found(
    lab: NetworkLab, lab_engine: Engine, tier: str
) -> None:
    """F7, NET-05: enable_icc=false does nothing where rules skip what a bridge passes on."""
    load_rules(lab, "nft")
    # The engine turns the filter on when it makes a network that needs it.
    await ensure_network(lab_engine, "egress" if tier == "egress" else "internal")
    lab.bridge_filter(False)
    try:
        result = await probe(lab, lab_engine, tier)
    finally:
        lab.bridge_filter(True)
    assert result.state == "refused"
    [bad] = [finding for finding in result.findings if not finding.good]
    assert "neighbour" in bad.target
    assert bad.outcome == "connected"
    assert "bridge-nf-call-iptables=1" in result.remedy


async def test_a_sandbox_is_made_once_the_firewall_is_proved(
    lab: NetworkLab, lab_engine: Engine, create: Create, counted: list[str]
) -> None:
    """B4: the proof is kept; callers that come at once share it."""
    load_rules(lab, "nft")
    made = await asyncio.gather(*(create() for _ in range(3)))
    assert len(counted) == 1
    assert len({sandbox.id for sandbox in made}) == 3
    await create()
    assert len(counted) == 1


async def test_a_sandbox_is_refused_with_the_targets_named(
    lab: NetworkLab, create: Create, counted: list[str]
) -> None:
    """B4: nothing is made, and the next attempt looks again."""
    load_rules(lab, "")
    with pytest.raises(SandboxSpecRejectedError) as caught:
        await create()
    assert caught.value.setting == "network"
    assert "169.254.169.254:80 (connected)" in str(caught.value)
    assert "jupyter sandbox firewall print" in caught.value.remedy
    assert lab.api.containers(f"{OWNER}=tester") == []
    load_rules(lab, "nft")
    await create()
    assert len(counted) == 2


async def test_a_proof_ends_when_the_engine_goes_away(
    lab: NetworkLab, lab_engine: Engine, create: Create, counted: list[str]
) -> None:
    """B4: the engine comes back without a firewall, and the next sandbox is refused."""
    load_rules(lab, "nft")
    first = await create()
    seen = lab_engine.events.interruptions
    lab.stop_engine()
    lab.clear_firewall()
    lab.start_engine()
    lost_and_back = seen + 2
    await asyncio.to_thread(
        wait_until, lambda: lab_engine.events.interruptions >= lost_and_back, 60
    )
    await asyncio.wait_for(first.ended, 30)
    with pytest.raises(SandboxSpecRejectedError, match="does not hold"):
        await create()
    assert len(counted) == 2


async def test_egress_that_needs_no_proof_is_not_probed(
    lab: NetworkLab, create: Create, counted: list[str]
) -> None:
    """B4 is a choice: without it the tier is as open as the engine's machine lets it be."""
    load_rules(lab, "")
    await create(require_egress_firewall=False)
    assert counted == []


async def test_internal_is_always_proved(
    lab: NetworkLab, create: Create, counted: list[str]
) -> None:
    """F5: whatever an engine makes of the options, the tier has to be closed."""
    load_rules(lab, "")
    await create(network="internal", require_egress_firewall=False)
    assert len(counted) == 1


async def test_a_workspace_on_egress_is_shared(lab: NetworkLab, create: Create) -> None:
    """B7, B3: who comes second gets the same sandbox, attested with its network and resolver."""
    load_rules(lab, "nft")
    key = {"durability": "persistent", "workspace": "on egress"}
    first = await create(**key)
    second = await create(**key)
    try:
        assert second.id == first.id
        with pytest.raises(SandboxConflictError, match="dns"):
            await create(**key, dns=None, require_egress_firewall=False)
    finally:
        await first.destroy()
        await second.destroy()
        lab.api.remove_volume(first.volume)


async def test_a_cancelled_probe_leaves_nothing(
    lab: NetworkLab, create: Create, counted: list[str]
) -> None:
    """B13: cancelled when its sandboxes are being made, and when they run."""
    load_rules(lab, "nft")
    for enough in (1, 2):
        creating = asyncio.ensure_future(create())
        await asyncio.to_thread(wait_until, lambda n=enough: len(probes(lab)) >= n, 30)
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        await asyncio.to_thread(wait_until, lambda: probes(lab) == [], 30)
    await create()
    assert len(counted) == 3


async def test_a_probe_needs_its_image(
    lab: NetworkLab, create: Create, probe_image: Callable[[str], None]
) -> None:
    """B4: one that is missing, or has no Python, is an error and not a proof."""
    load_rules(lab, "nft")
    probe_image("nobody/has:this")
    with pytest.raises(SandboxImageMissingError, match="nobody/has:this"):
        await create()
    lab.api.import_image(busybox_archive(), "sandbox-kernel-test/bare:latest", ["ENV PATH=/bin"])
    probe_image("sandbox-kernel-test/bare:latest")
    with pytest.raises(SandboxImageUnsuitableError, match="no python3"):
        await create()


@pytest.mark.parametrize(
    "answer",
    ["", "garbage", "[]", '{"nonce": "guessed", "port": 1}', "{" * 5000],
    ids=["silent", "garbage", "no object", "another nonce", "deep"],
)
async def test_a_lying_image_proves_nothing(
    lab: NetworkLab, create: Create, probe_image: Callable[[str], None], answer: str
) -> None:
    """B4: the report has to carry the nonce of this very probe."""
    load_rules(lab, "nft")
    liar = f"#!/bin/sh\nhead -c 100 >/dev/null\necho '{answer}'\n"
    archive = busybox_archive({"bin/python3": liar.encode()})
    lab.api.import_image(archive, "sandbox-kernel-test/liar:latest", ["ENV PATH=/bin"])
    probe_image("sandbox-kernel-test/liar:latest")
    with pytest.raises(SandboxProtocolError, match="no report"):
        await create()


# -- verdicts, without an engine ------------------------------------------------------------------

TARGETS = {("192.0.2.7", 22): "a machine", ("fd00::7", 22): "a machine by IPv6"}


def report(v4: str, v6: str = "EADDRNOTAVAIL", dns: str = "answered 0") -> dict[str, Any]:
    tcp = [["192.0.2.7", 22, v4], ["fd00::7", 22, v6]]
    return {"tcp": tcp, "dns": [["127.0.0.11", dns], ["198.51.100.53", dns]]}


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        ("timeout", "ready"), ("EHOSTUNREACH", "ready"), ("ENETUNREACH", "ready"),
        ("EACCES", "ready"), ("connected", "refused"), ("ECONNREFUSED", "refused"),
        ("ECONNRESET", "refused"), ("EPERM", "refused"), ("EADDRNOTAVAIL", "refused"),
        ("", "refused"),
    ],
)  # fmt: skip
def test_only_silence_and_the_networks_word_count_as_blocked(outcome: str, state: str) -> None:
    """F8, NET-14: a refused connection is no proof, nor is anything unknown."""
    found = Readiness("egress", tuple(judge("egress", TARGETS, report(outcome), "198.51.100.53")))
    assert found.state == state


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_no_other_report_is_ever_ready(v4: str, v6: str, dns: str) -> None:
    """Goal 8: no false READY."""
    found = Readiness("egress", tuple(judge("egress", TARGETS, report(v4, v6, dns))))
    blocked = {"timeout", "EHOSTUNREACH", "ENETUNREACH", "EACCES"}
    by_ipv6 = blocked | {"EADDRNOTAVAIL", "EAFNOSUPPORT"}
    if not (v4 in blocked and v6 in by_ipv6 and dns.startswith("answered ")):
        assert found.state != "ready"


def test_a_target_that_the_report_leaves_out_is_not_blocked() -> None:
    findings = judge("egress", TARGETS, {"tcp": [], "dns": [["127.0.0.11", "answered 0"]]})
    assert Readiness("egress", tuple(findings)).state == "refused"


@pytest.mark.parametrize(
    "broken", [{}, {"tcp": 1, "dns": []}, {"tcp": [[1]], "dns": []}, {"tcp": [], "dns": [["x"]]}]
)
def test_a_report_of_another_form_is_an_error(broken: dict[str, Any]) -> None:
    with pytest.raises(SandboxProtocolError):
        judge("egress", TARGETS, broken)


@pytest.mark.parametrize(
    ("tier", "host", "outcome", "good"),
    [
        ("egress", "198.51.100.53", "answered 3", True),
        ("egress", "198.51.100.53", "answered 2", True),
        ("egress", "127.0.0.11", "answered 2", False),  # the engine's own words
        ("egress", "198.51.100.53", "timeout", False),
        ("internal", "127.0.0.11", "answered 3", False),  # somebody was asked
        ("internal", "127.0.0.11", "answered 2", True),
        ("internal", "127.0.0.11", "timeout", True),
    ],
)
def test_a_resolver_must_answer_on_one_tier_and_on_no_other(
    tier: str, host: str, outcome: str, good: bool
) -> None:
    [finding] = judge(tier, {}, {"tcp": [], "dns": [[host, outcome]]})
    assert finding.good is good


def test_without_any_finding_nothing_is_proved() -> None:
    assert Readiness("egress", ()).state == "not-proven"
    assert Readiness("egress", tuple(judge("egress", {}, {"tcp": [], "dns": []}))).state != "ready"


async def test_a_proof_is_made_anew_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """NET-16: rules can be flushed without the engine's doing.

    No engine: ten minutes of one would have to pass.
    """
    now = 1000.0
    made: list[float] = []

    class Events:
        interruptions = 0

    class Silent:
        events = Events()
        endpoint = None

    async def found(*_: object, **__: object) -> Readiness:
        made.append(now)
        good = Finding("a machine", "blocked", "timeout", "blocked")
        return Readiness("internal", (good,))

    monkeypatch.setattr(readiness, "probe_network", found)
    monkeypatch.setattr(readiness, "control_addresses", lambda _: ())
    network = SharedNetwork("internal", "id", "sbx-internal", ())
    spec = SandboxSpec(network="internal")
    engine: Any = Silent()

    async def nobody(_: SandboxSpec, __: str) -> LiveSandbox:
        raise SandboxError("nothing is made here")

    for time in (1000.0, 1001.0, 1000.0 + PROOF_TTL - 1, 1001.0 + PROOF_TTL):
        now = time
        await require_proof(engine, network, spec, nobody, clock=lambda: now)  # noqa: B023
    assert made == [1000.0, 1001.0 + PROOF_TTL]
