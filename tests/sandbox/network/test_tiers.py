"""The network tiers: what may be asked for, and the one network that each has (B3)."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.images import image_present
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxSpecRejectedError,
)
from sandbox_kernel.sandbox.attest import differences
from sandbox_kernel.sandbox.container import container_body
from sandbox_kernel.sandbox.labels import NETWORK, VERSION, make_labels
from sandbox_kernel.sandbox.live import LiveSandbox
from sandbox_kernel.sandbox.network import (
    SharedNetwork,
    choose_network,
    ensure_network,
    find_network,
)
from sandbox_kernel.sandbox.spec import SandboxSpec, resolve_limits
from sandbox_kernel.sandbox.tiers import (
    BLACKHOLE_DNS,
    NETWORK_NAMES,
    SHARED_TIERS,
    SharedTier,
    gateway_addresses,
    network_body,
    network_differences,
)
from tests.sandbox.network.lab import RESOLVER, NetworkLab

# -- what may be asked for ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "network",
    [
        "allowlist", "pypi.org", "pypi.org,files.pythonhosted.org", ["pypi.org"],
        {"access": "allowlist", "domains": ["pypi.org"]}, ("a.example",),
    ],
)  # fmt: skip
def test_a_list_of_domains_is_refused_with_the_reason(network: Any) -> None:
    """B3 (S2): an engine cannot enforce one, and a sandbox that only looks so is worse."""
    with pytest.raises(
        SandboxSpecRejectedError, match="cannot enforce a list of domains"
    ) as caught:
        SandboxSpec(network=network)
    assert caught.value.setting == "network"
    assert "'egress'" in caught.value.remedy


@pytest.mark.parametrize("network", ["host", "bridge", "container:x", "", "None", None, 1, True])
def test_there_is_no_other_tier(network: Any) -> None:
    """B3, ESC-17: an engine's own networks cannot be asked for by name."""
    with pytest.raises(SandboxSpecRejectedError, match="no such network tier"):
        SandboxSpec(network=network)


@pytest.mark.parametrize(
    "dns",
    ["", "resolver", "fe80::1", "127.0.0.53", "0.0.0.0", "224.0.0.1", "255.255.255.255",
     "1.2.3", "1.2.3.4/32", 1, ["1.2.3.4"]],
)  # fmt: skip
def test_a_resolver_is_an_address_that_a_sandbox_can_reach(dns: Any) -> None:
    with pytest.raises(SandboxSpecRejectedError) as caught:
        SandboxSpec(network="egress", dns=dns)
    assert caught.value.setting == "dns"


def test_a_required_firewall_needs_its_resolver_named() -> None:
    """B4: the rules admit one resolver, so it has to be known which."""
    with pytest.raises(SandboxSpecRejectedError, match="lets through one resolver only"):
        SandboxSpec(network="egress", require_egress_firewall=True)
    SandboxSpec(network="egress", require_egress_firewall=True, dns=RESOLVER)
    SandboxSpec(network="none", require_egress_firewall=True)  # a setting of the whole site
    with pytest.raises(SandboxSpecRejectedError, match="neither true nor false"):
        SandboxSpec(require_egress_firewall="no")  # type: ignore[arg-type]


# -- what a network has to be ---------------------------------------------------------------------


def account(tier: SharedTier) -> dict[str, Any]:
    """Return an engine's account of a tier's network, as Docker 20.10 gives it."""
    body = network_body(tier)
    del body["CheckDuplicate"]
    return {
        **body,
        "Id": "1" * 64,
        "Created": "2026-01-01T00:00:00Z",
        "Scope": "local",
        "IPAM": {
            "Driver": "default",
            "Options": None,
            "Config": [{"Subnet": "172.18.0.0/16", "Gateway": "172.18.0.1"}],
        },
        "ConfigFrom": {"Network": ""},
        "ConfigOnly": False,
        "Containers": {},
    }


def mutations(tier: SharedTier) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give networks that differ in one thing."""
    good = account(tier)
    for name in ("Driver", "Scope", "Name"):
        yield name, {**good, name: "other"}
    for name in ("Internal", "Attachable", "Ingress", "EnableIPv6", "ConfigOnly"):
        yield name, {**good, name: not good.get(name)}
    yield "EnableIPv4", {**good, "EnableIPv4": False}
    yield "ConfigFrom", {**good, "ConfigFrom": {"Network": "other"}}
    for name in ("Options", "Labels"):
        yield f"{name} more", {**good, name: {**good[name], "com.example.more": "x"}}
        for key in good[name]:
            if key != VERSION:
                yield f"{name} {key}", {**good, name: {**good[name], key: "other"}}
            less = {k: v for k, v in good[name].items() if k != key}
            yield f"{name} without {key}", {**good, name: less}
    pool = {"Subnet": "172.18.0.0/16", "Gateway": "172.18.0.1"}
    v6 = {"Subnet": "fd00::/64", "Gateway": "fd00::1"}
    for name, config in {
        "IPv6 too": [pool, v6], "IPv6 alone": [v6], "two": [pool, pool], "none": [],
        "auxiliary": [{**pool, "AuxiliaryAddresses": {"host": "172.18.0.9"}}],
    }.items():  # fmt: skip
        yield f"IPAM {name}", {**good, "IPAM": {**good["IPAM"], "Config": config}}
    yield "IPAM driver", {**good, "IPAM": {**good["IPAM"], "Driver": "other"}}
    yield "IPAM options", {**good, "IPAM": {**good["IPAM"], "Options": {"a": "b"}}}


@pytest.mark.parametrize("tier", SHARED_TIERS)
def test_every_difference_of_a_network_is_noticed(tier: SharedTier) -> None:
    """B3: options, labels, addresses; what a newer engine adds is refused until looked at."""
    assert network_differences(tier, account(tier)) == []
    missed = [name for name, other in mutations(tier) if not network_differences(tier, other)]
    assert missed == []
    [other] = set(SHARED_TIERS) - {tier}
    assert network_differences(other, account(tier))


def test_a_network_of_another_version_of_ours_is_used() -> None:
    """An upgrade must not leave a site without its networks, nor a choice of the subnet."""
    network = account("egress")
    network["Labels"][VERSION] = "0.0.1"
    network["IPAM"]["Config"] = [{"Subnet": "192.0.2.0/24", "IPRange": "192.0.2.128/25"}]
    network["EnableIPv4"] = True  # newer engines say so
    assert network_differences("egress", network) == []
    assert gateway_addresses(network) == ()
    assert gateway_addresses(network, guess=True) == ("192.0.2.1",)


@given(st.lists(st.tuples(st.integers(0, 3), st.uuids()), min_size=1, max_size=6))
def test_everybody_chooses_the_same_one(found: list[tuple[int, Any]]) -> None:
    """B3: an engine permits several networks of one name; the oldest is the network."""
    networks = [
        {**account("egress"), "Id": uuid.hex * 2, "Created": f"2026-01-01T00:00:0{second}Z"}
        for second, uuid in found
    ]
    chosen = {
        choice.id
        for order in (networks, networks[::-1])
        if (choice := choose_network("egress", order)) is not None
    }
    [one] = chosen
    assert (min(n["Created"] for n in networks), one) in {(n["Created"], n["Id"]) for n in networks}


# -- on an engine ---------------------------------------------------------------------------------


@pytest.fixture
async def fresh(lab: NetworkLab, lab_engine: Engine) -> AsyncIterator[Engine]:
    """The laboratory's engine without networks of ours, before and after."""

    async def clear() -> None:
        for name in NETWORK_NAMES.values():
            for network in await lab_engine.list_networks(name):
                await lab_engine.remove_network(network["Id"])

    await clear()
    yield lab_engine
    await clear()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tier", SHARED_TIERS)
async def test_creators_at_once_converge_on_one_network(
    lab: NetworkLab, fresh: Engine, tier: SharedTier
) -> None:
    """B3: several callers on several connections, as several processes have them."""
    engines = [Engine(lab.endpoint) for _ in range(3)]
    try:
        for engine in engines:
            await engine.open()
        for _ in range(3):
            made = await asyncio.gather(
                *(ensure_network(engine, tier) for engine in engines for _ in range(5))
            )
            [network] = await fresh.list_networks(NETWORK_NAMES[tier])
            assert {one.id for one in made} == {network["Id"]}
            assert network_differences(tier, network) == []
            await fresh.remove_network(network["Id"])
    finally:
        for engine in engines:
            await engine.close()


async def test_a_younger_network_of_ours_is_removed_by_who_made_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B3: the loser clears up. No engine: Docker's bridges cannot have one name twice."""
    older = {**account("egress"), "Id": "a" * 64, "Created": "2026-01-01T00:00:00Z"}
    younger = {**account("egress"), "Id": "b" * 64, "Created": "2026-01-01T00:00:01Z"}
    answers = [[], [older, younger]]
    removed: list[str] = []

    class Permissive:
        async def list_networks(self, _: str) -> list[dict[str, Any]]:
            return answers.pop(0)

        async def create_network(self, _: dict[str, Any]) -> str:
            return str(younger["Id"])

        async def remove_network(self, network: str) -> None:
            removed.append(network)

    engine: Any = Permissive()
    assert (await ensure_network(engine, "egress")).id == older["Id"]
    assert removed == [younger["Id"]]


PLANTED: dict[str, dict[str, Any]] = {
    "neighbours allowed": {"Options": {"com.docker.network.bridge.name": "sbx-egress"}},
    "nobody's labels": {"Labels": {}},
    "another's labels": {"Labels": {NETWORK: "internal", VERSION: "1"}},
    "internal": {"Internal": True},
    "automatic bridge": {"Options": {"com.docker.network.bridge.enable_icc": "false"}},
}


@pytest.mark.parametrize("planted", PLANTED)
async def test_a_network_of_that_name_that_is_another_is_refused(
    lab: NetworkLab, fresh: Engine, planted: str
) -> None:
    """B3: by its options or labels; nothing is made, and the remedy names its id."""
    other = await fresh.create_network({**network_body("egress"), **PLANTED[planted]})
    with pytest.raises(SandboxSpecRejectedError, match="is not the one of this tier") as caught:
        await ensure_network(fresh, "egress")
    assert f"docker network rm {other[:12]}" in caught.value.remedy
    spec = SandboxSpec(image=lab.image, network="egress")
    with pytest.raises(SandboxSpecRejectedError):
        await LiveSandbox.create(fresh, spec, owner="tester")
    await fresh.remove_network(other)
    assert (await ensure_network(fresh, "egress")).tier == "egress"


async def test_a_second_network_of_that_name_is_refused_too(fresh: Engine) -> None:
    """B3: with two of one name nobody could say which one a firewall covers."""
    ours = await ensure_network(fresh, "egress")
    body = {**network_body("egress"), "CheckDuplicate": False, "Options": {}}
    try:
        other = await fresh.create_network(body)
    except SandboxConflictError:
        pytest.skip("this engine permits no second network of a name")
    with pytest.raises(SandboxSpecRejectedError, match=other[:12]):
        await ensure_network(fresh, "egress")
    await fresh.remove_network(other)
    assert await find_network(fresh, "egress") == ours


async def test_a_bridge_that_another_network_has_is_said(fresh: Engine) -> None:
    other = await fresh.create_network({**network_body("egress"), "Name": "somebody"})
    try:
        with pytest.raises(SandboxSpecRejectedError, match="another one has its bridge"):
            await ensure_network(fresh, "egress")
    finally:
        await fresh.remove_network(other)


async def test_a_network_in_use_is_not_removed(lab: NetworkLab, fresh: Engine) -> None:
    """The engine's own refusal becomes an error with a class."""
    spec = SandboxSpec(image=lab.image, network="egress")
    sandbox = await LiveSandbox.create(fresh, spec, owner="tester")
    network = await find_network(fresh, "egress")
    assert network is not None
    try:
        with pytest.raises(SandboxConflictError, match="in use"):
            await fresh.remove_network(network.id)
    finally:
        await sandbox.destroy()
    await fresh.remove_network(network.id)
    await fresh.remove_network(network.id)  # gone already
    assert await fresh.inspect_network(network.id) is None


# -- the container on it --------------------------------------------------------------------------

Triple = tuple[dict[str, Any], dict[str, Any], SharedNetwork]


@pytest.fixture
async def triple(lab: NetworkLab, lab_engine: Engine) -> Triple:
    """A request on ``egress``, and the real engine's account of the container made of it."""
    image = await image_present(lab_engine, lab.image)
    assert image is not None
    spec = SandboxSpec(image=lab.image, network="egress", dns=RESOLVER)
    network = await ensure_network(lab_engine, "egress")
    labels = make_labels(
        owner="tester", created="now", image=lab.image, network="egress", ttl=60, lifetime=0,
        caller={}, extra={},
    )  # fmt: skip
    limits = resolve_limits(spec, await lab_engine.info())
    body = container_body(spec, limits, image, labels, network)
    created = await lab_engine.create_container(None, body)
    try:
        return body, await lab_engine.inspect_container(created.id), network
    finally:
        await lab_engine.remove_container(created.id)


def test_a_container_is_attested_with_its_network(triple: Triple) -> None:
    """ESC-19: the network by its id, the resolver, nothing beside them."""
    body, inspected, network = triple
    assert differences(body, inspected, network) == []
    assert body["HostConfig"]["NetworkMode"] == network.id
    assert body["HostConfig"]["Dns"] == [RESOLVER]
    host, networks = inspected["HostConfig"], inspected["NetworkSettings"]["Networks"]
    [(name, settings)] = networks.items()
    changed: list[tuple[dict[str, Any], str, Any]] = [
        (host, "NetworkMode", "bridge"), (host, "NetworkMode", network.name),
        (host, "Dns", []), (host, "Dns", [RESOLVER, "203.0.113.10"]),
        (host, "DnsOptions", ["attempts:9"]), (host, "DnsSearch", ["example.org"]),
        (host, "ExtraHosts", ["engine:10.0.0.1"]), (host, "Links", ["/other:alias"]),
        (networks, "other", {}), (networks, name, {**settings, "NetworkID": "f" * 64}),
        (networks, name, {**settings, "IPAMConfig": {"IPv4Address": "172.18.0.9"}}),
        (networks, name, {**settings, "DriverOpts": {"a": "b"}}),
        (networks, name, {**settings, "Links": ["/other:alias"]}),
    ]  # fmt: skip
    missed = []
    for place, key, value in changed:
        before = copy.deepcopy(place.get(key))
        place[key] = value
        if not differences(body, inspected, network):
            missed.append((key, value))
        if before is None and key == "other":
            del place[key]
        else:
            place[key] = before
    assert missed == []
    assert differences(body, inspected, network) == []
    assert differences(body, inspected)  # on a network that nobody asked for
    del networks[name]
    networks["another"] = settings
    assert differences(body, inspected, network)


async def test_each_tier_names_its_resolver(lab: NetworkLab, lab_engine: Engine) -> None:
    """F6, NET-07: never the host's, from whose network an engine would ask."""
    expected = {"none": [BLACKHOLE_DNS], "internal": [BLACKHOLE_DNS], "egress": [RESOLVER]}
    for tier, servers in expected.items():
        spec = SandboxSpec(image=lab.image, network=tier, dns=RESOLVER)
        sandbox = await LiveSandbox.unproved(lab_engine, spec, "tester")
        try:
            inspected = await lab_engine.inspect_container(sandbox.id)
        finally:
            await sandbox.destroy()
        assert inspected["HostConfig"]["Dns"] == servers
        assert inspected["HostConfig"]["DnsSearch"] == ["."]
