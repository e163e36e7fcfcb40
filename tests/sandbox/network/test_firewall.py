"""The ruleset as it is printed, loaded and proved from the command line (B3, B4, E7)."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.sandbox.firewall import (
    DENIED,
    ControlAddress,
    FirewallPlan,
    Format,
    control_addresses,
    parse_control,
)
from sandbox_kernel.sandbox.tiers import NETWORK_NAMES
from tests.sandbox.network.lab import CONTROL_PORT, ENGINE, RESOLVER, NetworkLab, load_rules

PROGRAM = Path(sys.executable).with_name("jupyter-sandbox")
FORMS: tuple[Format, ...] = ("nft", "iptables")

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# -- addresses ------------------------------------------------------------------------------------


def test_addresses_are_derived_from_the_engines_own() -> None:
    """B4: every address of the host counts; loopback is the sandbox itself, and says nothing."""
    asked: list[str] = []

    def lookup(host: str) -> list[str]:
        asked.append(host)
        return ["192.0.2.7", "2001:db8::7", "127.0.1.1", "::1"]

    found = control_addresses(Endpoint("http://engine.example:2375"), lookup)
    assert found == (ControlAddress("192.0.2.7", 2375), ControlAddress("2001:db8::7", 2375))
    assert asked == ["engine.example"]
    assert str(found[1]) == "[2001:db8::7]:2375"
    assert control_addresses(Endpoint("unix:///run/docker.sock"), lookup) == ()
    assert asked == ["engine.example"]
    assert control_addresses(Endpoint("http://127.0.0.1:2375")) == ()
    assert parse_control("[2001:db8::1]:2376") == (ControlAddress("2001:db8::1", 2376),)


@pytest.mark.parametrize(
    "text",
    ["", "engine", "engine:", ":2376", "engine:x", "engine:0", "http://e:1", "u@e:1", "e:1/p"],
)
def test_an_address_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(SandboxSpecRejectedError, match="not an address with a port"):
        parse_control(text, lambda _: ["192.0.2.7"])


def test_a_host_without_an_address_is_said() -> None:
    def nowhere(_: str) -> list[str]:
        raise OSError("no such host")

    with pytest.raises(SandboxSpecRejectedError, match="no address"):
        parse_control("engine.invalid:2376", nowhere)


# -- the text -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_rules_are_a_constant_text_and_addresses_are_data(form: Format) -> None:
    """Nothing is spliced into a rule: what differs between two sites is whole lines of data."""
    one = FirewallPlan((RESOLVER,), (ENGINE,)).render(form).splitlines()
    other = FirewallPlan(("192.0.2.53",), ("192.0.2.9",)).render(form).splitlines()
    differing = [pair for pair in zip(one, other, strict=True) if pair[0] != pair[1]]
    assert len(differing) == 2
    shape = {"nft": r"add element inet sandbox_kernel \w+ \{ [\d.]+ \}", "iptables": r"\w+=[\d.]+"}
    assert all(re.fullmatch(shape[form], line) for pair in differing for line in pair)
    for bridge in NETWORK_NAMES.values():
        assert any(bridge in line for line in one)


def test_a_plan_takes_addresses_only() -> None:
    """No text can get into a rule by way of an address; there is no rule for IPv6 to need one."""
    for resolvers in ((), ("fe80::1",), ("1.2.3.4; rm -rf /",), ("127.0.0.53",)):
        with pytest.raises(SandboxSpecRejectedError):
            FirewallPlan(resolvers)
    with pytest.raises(ValueError, match="does not appear"):
        FirewallPlan((RESOLVER,), ("$(reboot)",))
    assert FirewallPlan((RESOLVER,), ("2001:db8::1", ENGINE)).controls == (ENGINE,)


def test_the_denied_ranges_cover_what_is_not_public() -> None:
    """NET-01, NET-04: by the registry of special addresses, with room for documentation ones."""
    denied = [ipaddress.ip_network(text) for text in DENIED]
    for text in ("10.9.8.7", "172.31.0.1", "192.168.1.1", "100.127.0.1", "169.254.169.254",
                 "127.0.0.1", "0.1.2.3", "224.0.0.251", "255.255.255.255", "198.19.0.1",
                 "192.0.0.8", "100.100.100.200"):  # fmt: skip
        assert any(ipaddress.ip_address(text) in network for network in denied), text
    for text in ("1.1.1.1", "172.32.0.1", "100.128.0.1", "192.167.0.1", "11.0.0.1"):
        assert not any(ipaddress.ip_address(text) in network for network in denied), text


def test_the_script_passes_shellcheck() -> None:
    text = FirewallPlan((RESOLVER, "192.0.2.53")).render("iptables")
    done = subprocess.run(["shellcheck", "-s", "sh", "-"], input=text, text=True, check=False)
    assert done.returncode == 0


# -- on a machine ---------------------------------------------------------------------------------


def chains(lab: NetworkLab) -> str:
    return lab.in_engine("iptables", "-S") + lab.in_engine("ip6tables", "-S")


def test_the_script_can_be_run_again_and_taken_back(lab: NetworkLab) -> None:
    """A second run changes nothing, and removal leaves what was there before."""
    load_rules(lab, "")
    script = FirewallPlan((RESOLVER,), (ENGINE,)).render("iptables")
    before = chains(lab)
    lab.in_engine("sh", "-s", "apply", stdin=script)
    once = chains(lab)
    assert once.count("-A DOCKER-USER -i sbx-egress -j SBX-OUTWARDS\n") == 1
    lab.in_engine("sh", "-s", "apply", stdin=script)
    assert chains(lab) == once
    # Somebody put a rule of their own in front: the next run is first again.
    lab.in_engine("iptables", "-I", "DOCKER-USER", "-i", "sbx-egress", "-j", "RETURN")
    lab.in_engine("sh", "-s", "apply", stdin=script)
    rules = re.findall(r"^-A DOCKER-USER .*sbx-egress.*$", chains(lab), re.MULTILINE)
    assert rules[-1] == "-A DOCKER-USER -i sbx-egress -j RETURN"
    lab.in_engine("iptables", "-D", "DOCKER-USER", "-i", "sbx-egress", "-j", "RETURN")
    lab.in_engine("sh", "-s", "remove", stdin=script)
    assert chains(lab) == before


def test_the_table_replaces_itself(lab: NetworkLab) -> None:
    """Another resolver, and the old one is gone; a file that does not load changes nothing."""
    load_rules(lab, "nft")
    other = FirewallPlan(("192.0.2.53",)).render("nft")
    lab.in_engine("nft", "-f", "-", stdin=other)
    shown = lab.in_engine("nft", "list", "table", "inet", "sandbox_kernel")
    assert "192.0.2.53" in shown
    assert RESOLVER not in shown
    with pytest.raises(AssertionError):
        lab.in_engine("nft", "-f", "-", stdin=other.replace("chain outwards", "chain fwd"))
    assert lab.in_engine("nft", "list", "table", "inet", "sandbox_kernel") == shown


@pytest.fixture
def firewall(lab: NetworkLab, tmp_path: Path) -> Run:
    """Call ``jupyter sandbox firewall`` on the laboratory's machine, which dials its engine."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("SANDBOX_", "DOCKER_"))}
    environ = {
        **ours,
        "HOME": str(tmp_path),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "SANDBOX_DOCKER_HOST": f"tcp://{ENGINE}:{CONTROL_PORT}",
        "SANDBOX_DOCKER_ALLOW_INSECURE_ENGINE": "1",
    }

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["nsenter", f"--net=/run/netns/{lab.inside}", PROGRAM, *arguments],
            env={**environ, **variables}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


@pytest.mark.timeout(300)
def test_what_is_printed_is_what_the_check_asks_for(lab: NetworkLab, firewall: Run) -> None:
    """B4, E7: refused, printed, loaded, ready; the control address is the engine's own."""
    load_rules(lab, "")
    check = ("firewall", "check", "--json", f"--image={lab.image}", f"--resolver={RESOLVER}")
    refused = firewall(*check)
    assert refused.returncode == 1
    answer = json.loads(refused.stdout)
    assert answer["ok"] is False
    assert answer["state"] == "refused"
    control = f"the engine's control address {ENGINE}:{CONTROL_PORT}"
    [finding] = [f for f in answer["findings"] if f["target"] == control]
    assert finding == {
        "target": control, "wanted": "blocked", "outcome": "connected", "verdict": "reached",
        "good": False,
    }  # fmt: skip

    printed = firewall("firewall", "print", f"--resolver={RESOLVER}")
    assert printed.returncode == 0
    assert printed.stdout == FirewallPlan((RESOLVER,), (ENGINE,)).render("nft")
    assert f"Engine control: {ENGINE}" in printed.stderr
    assert "nft -f FILE" in printed.stderr
    lab.in_engine("nft", "-f", "-", stdin=printed.stdout)

    ready = firewall(*check)
    assert ready.returncode == 0, ready.stdout
    assert json.loads(ready.stdout)["state"] == "ready"
    people = firewall("firewall", "check", "--tier=internal", f"--image={lab.image}")
    assert people.returncode == 0
    assert "READY: the network of the tier 'internal'" in people.stdout
    assert f"✓ {control}" in people.stdout


def test_the_other_form_is_printed_too(firewall: Run) -> None:
    printed = firewall("firewall", "print", "--format=iptables", SANDBOX_DOCKER_DNS=RESOLVER)
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout == FirewallPlan((RESOLVER,), (ENGINE,)).render("iptables")
    assert "sh FILE apply" in printed.stderr


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        (("--resolver=127.0.0.53",), "resolver"),
        (("--resolver=198.51.100.53", "--engine-control=engine"), "engine_control"),
    ],
)
def test_a_wrong_address_is_one_error(
    firewall: Run, arguments: tuple[str, ...], setting: str
) -> None:
    done = firewall("firewall", "print", "--json", *arguments)
    assert done.returncode == 1
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["error"]["setting"] == setting
    assert answer["error"]["remedy"]


def test_the_group_says_what_it_has(firewall: Run) -> None:
    assert firewall("firewall", "prove").returncode == 2
    assert "check" in firewall("firewall", "--help").stdout
    assert firewall("firewall", "check", "--tier=none").returncode != 0
    assert firewall("firewall", "print", "--resolvers=1.1.1.1").returncode == 2


def network_of(done: subprocess.CompletedProcess[str], tier: str) -> dict[str, str] | None:
    checks = json.loads(done.stdout)["checks"]
    found: list[dict[str, str]] = [c for c in checks if c["name"] == f"network {tier}"]
    return found[0] if found else None


@pytest.mark.timeout(300)
def test_status_says_how_the_networks_are(lab: NetworkLab, firewall: Run) -> None:
    """E7: a note where nothing is required, the probe's answer where it is."""
    load_rules(lab, "nft")
    # The probe runs in our own image, by its name.
    lab.api.request("POST", f"/images/{lab.image}/tag", {"repo": "sandbox-kernel/python"})
    try:
        json.loads(firewall("firewall", "check", "--json", f"--image={lab.image}").stdout)
        note = network_of(firewall("status", "--json"), "egress")
        assert note is not None
        assert note["level"] == "note"
        assert "jupyter sandbox firewall check" in note["text"]

        required = {"SANDBOX_DOCKER_REQUIRE_EGRESS_FIREWALL": "1", "SANDBOX_DOCKER_DNS": RESOLVER}
        ok = network_of(firewall("status", "--json", **required), "egress")
        assert ok is not None
        assert ok["level"] == "ok"

        load_rules(lab, "")
        warning = network_of(firewall("status", "--json", **required), "egress")
        assert warning is not None
        assert warning["level"] == "warning"
        assert "does not hold" in warning["text"]
        assert "firewall print" in warning["remedy"]

        by_default = {**required, "SANDBOX_DOCKER_NETWORK": "egress"}
        problem = network_of(firewall("status", "--json", **by_default), "egress")
        assert problem is not None
        assert problem["level"] == "problem"
    finally:
        lab.api.remove_image("sandbox-kernel/python:latest")
