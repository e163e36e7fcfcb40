"""What a sandbox of each tier reaches, as a golden table (B3; NET-01 to NET-08).

On a real engine in network namespaces with a simulated outside. The first column of controls
shows that each target is there and that the programs can tell: without a firewall, and on an
engine's own kind of internal network, most of them are reached.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from sandbox_kernel.app.checks import version_tuple
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.sandbox.live import CODE_USER, LiveSandbox
from sandbox_kernel.sandbox.network import find_network
from sandbox_kernel.sandbox.spec import SandboxSpec
from sandbox_kernel.sandbox.tiers import gateway_addresses
from tests.engines import wait_until
from tests.sandbox.network.lab import (
    CONTROL_PORT,
    ENGINE,
    LOOPBACK_RESOLVER,
    METADATA,
    PRIVATE,
    PUBLIC,
    PUBLISHED_PORT,
    RESOLVER,
    NetworkLab,
    load_rules,
)

pytestmark = pytest.mark.timeout(300)

GOLDEN = """
                        none    internal  egress  egress+nft  egress+iptables  internal+nft  plain
own loopback            open    open      open    open        open             open          open
peer                    -       shut      shut    shut        shut             shut          open
host by the gateway     shut    shut      open    shut        shut             shut          open
host by docker0         shut    shut      open    shut        shut             shut          open
engine control          shut    shut      open    shut        shut             shut          open
published port          shut    shut      open    shut        shut             shut          shut
metadata                shut    shut      open    shut        shut             shut          shut
private 10/8            shut    shut      open    shut        shut             shut          shut
private 172.16/12       shut    shut      open    shut        shut             shut          shut
private 192.168/16      shut    shut      open    shut        shut             shut          shut
private 100.64/10       shut    shut      open    shut        shut             shut          shut
public web              shut    shut      open    open        open             shut          shut
public https            shut    shut      open    open        open             shut          shut
public mail             shut    shut      open    shut        shut             shut          shut
public dns by tcp       shut    shut      open    shut        shut             shut          shut
public dns over tls     shut    shut      open    shut        shut             shut          shut
public dns              shut    shut      open    shut        shut             shut          shut
own resolver            -       shut      open    open        open             shut          open
its resolver directly   shut    shut      open    open        open             shut          shut
IPv6                    shut    shut      shut    shut        shut             shut          shut
"""
"""``plain`` is what an engine makes of ``--internal`` alone: the reason for our options.

Without a network there is no neighbour, and the resolver's address is the sandbox's own loopback.
"""

_header, *_rows = [line for line in GOLDEN.splitlines() if line.strip()]
COLUMNS = _header.split()
TABLE = {row[:24].strip(): dict(zip(COLUMNS, row[24:].split(), strict=True)) for row in _rows}


PORT = 7007
LISTENER = """
nc -ll -p "$1" -e /bin/true >/dev/null 2>&1 </dev/null &
until nc -w 1 127.0.0.1 "$1" </dev/null; do :; done
"""


def targets(peer: str | None, gateway: str) -> dict[str, str]:
    """Return the words by which the program in a sandbox tries each target."""
    private = dict(zip(("10/8", "172.16/12", "192.168/16", "100.64/10"), PRIVATE, strict=True))
    return {
        # A listener of the sandbox's own: in every column it can tell what is open.
        "own loopback": f"tcp:127.0.0.1:{PORT}",
        **({"peer": f"tcp:{peer}:{PORT}"} if peer else {}),
        "host by the gateway": f"tcp:{gateway}:22",
        "host by docker0": "tcp:172.17.0.1:22",
        "engine control": f"tcp:{ENGINE}:{CONTROL_PORT}",
        "published port": f"tcp:{ENGINE}:{PUBLISHED_PORT}",
        "metadata": f"tcp:{METADATA}:80",
        **{f"private {name}": f"tcp:{address}:80" for name, address in private.items()},
        "public web": f"tcp:{PUBLIC}:80",
        "public https": f"tcp:{PUBLIC}:443",
        "public mail": f"tcp:{PUBLIC}:25",
        "public dns by tcp": f"tcp:{PUBLIC}:53",
        "public dns over tls": f"tcp:{PUBLIC}:853",
        "public dns": f"dns:{PUBLIC}",
        "own resolver": "dns:127.0.0.11",
        "its resolver directly": f"dns:{RESOLVER}",
        "IPv6": "tcp:fd00:77::1:80",
    }


async def program(engine: Engine, container: str, *argv: str, stdin: bytes | None = None) -> str:
    """Run a program in a container as the code's user and return its output."""
    output = b""
    stream = await engine.exec(container, argv, user=CODE_USER, stdin=stdin is not None)
    async with stream:
        if stdin is not None:
            await stream.write(stdin)
            await stream.end_input()
        while (chunk := await stream.read()) is not None:
            output += chunk.data
    assert (await engine.inspect_exec(stream.id)).exit_code == 0, output
    return output.decode()


async def address_of(engine: Engine, container: str) -> str:
    networks = (await engine.inspect_container(container))["NetworkSettings"]["Networks"]
    [settings] = networks.values()
    return str(settings["IPAddress"])


async def reached(
    engine: Engine, eyes: str, peer: str | None, gateway: str, name: str
) -> dict[str, str]:
    """Return what each target of the table is from a container, and why."""
    for container in filter(None, (eyes, peer)):
        await program(engine, container, "sh", "-c", LISTENER, "sh", str(PORT))
    wanted = targets(await address_of(engine, peer) if peer else None, gateway)
    if peer is None:
        del wanted["own resolver"]
    knock = Path(__file__).with_name("knock.py").read_bytes()
    out = await program(engine, eyes, "python3", "-", name, *wanted.values(), stdin=knock)
    found = json.loads(out)
    return {target: found[word] for target, word in wanted.items()}


def verdicts(found: dict[str, str]) -> dict[str, str]:
    """Turn what happened into words of the table; a refused connection is one that got there."""
    open_ones = {"connected", "answered", "ECONNREFUSED"}
    # Newer engines say by themselves that nobody may be asked: code 2, a failure of the server.
    shut = {"timeout", "EHOSTUNREACH", "ENETUNREACH", "EADDRNOTAVAIL", "code 2"}
    words = {**dict.fromkeys(open_ones, "open"), **dict.fromkeys(shut, "shut")}
    return {target: words.get(outcome, outcome) for target, outcome in found.items()}


def golden(column: str) -> dict[str, str]:
    return {target: row[column] for target, row in TABLE.items() if row[column] != "-"}


Pair = tuple[LiveSandbox, LiveSandbox]
MakePair = Callable[[str], Awaitable[Pair]]


@pytest.fixture
async def make_pair(lab: NetworkLab, lab_engine: Engine) -> AsyncIterator[MakePair]:
    """Make two sandboxes of one tier, without asking for a proof: the table is the proof."""
    made: list[LiveSandbox] = []

    async def make(tier: str) -> Pair:
        spec = SandboxSpec(image=lab.image, network=tier, dns=RESOLVER)
        for _ in range(2):
            made.append(await LiveSandbox.unproved(lab_engine, spec, "tester"))
        return made[-2], made[-1]

    yield make
    for sandbox in made:
        await sandbox.destroy()


@pytest.mark.parametrize("column", [c for c in COLUMNS if c not in {"none", "plain"}])
async def test_a_tier_reaches_what_the_table_says(
    lab: NetworkLab, lab_engine: Engine, make_pair: MakePair, column: str
) -> None:
    """B3, NET-01, NET-02, NET-04, NET-05: each target, with and without the rules."""
    tier, _, rules = column.partition("+")
    load_rules(lab, rules)
    eyes, peer = await make_pair(tier)
    network = await find_network(lab_engine, "egress" if tier == "egress" else "internal")
    assert network is not None
    # Newer engines have no gateway on a network without an address of the machine.
    [gateway, *_] = [*network.gateways, "172.18.255.254"]
    found = await reached(lab_engine, eyes.id, peer.id, gateway, f"{column}.example")
    assert verdicts(found) == golden(column), found
    asked = {host for host, name in lab.questions() if name == f"{column}.example"}
    # NET-07: what leaves is what the table lets out, to the very resolver; never the host's own.
    assert asked == ({RESOLVER} if tier == "egress" else set()) | (
        {PUBLIC} if column == "egress" else set()
    )


async def test_no_network_reaches_nothing(lab: NetworkLab, make_pair: MakePair) -> None:
    """B3: the tier ``none``, without any firewall."""
    eyes, _ = await make_pair("none")
    found = await reached(eyes.engine, eyes.id, None, "172.18.0.1", "none.example")
    assert verdicts(found) == golden("none")
    del found["own loopback"]
    outcomes = set(found.values())
    assert outcomes <= {"ENETUNREACH", "EADDRNOTAVAIL"}
    assert "none.example" not in {name for _, name in lab.questions()}


async def test_an_internal_network_of_the_engine_alone_is_not_closed(
    lab: NetworkLab, lab_engine: Engine
) -> None:
    """F5, F6: the negative control. The same programs reach the host and leak questions there."""
    body = {"Name": "plain", "Driver": "bridge", "Internal": True}
    network = await lab_engine.create_network(body)
    made = []
    try:
        for _ in range(2):
            created = await lab_engine.create_container(
                None,
                {
                    "Image": lab.image,
                    "Cmd": ["sleep", "300"],
                    "HostConfig": {"NetworkMode": network},
                },
            )
            made.append(created.id)
            await lab_engine.start_container(created.id)
        inspected = await lab_engine.inspect_network(network)
        assert inspected is not None
        [gateway] = gateway_addresses(inspected)
        found = await reached(lab_engine, made[0], made[1], gateway, "plain.example")
        seen = verdicts(found)
        if version_tuple((await lab_engine.version())["Version"]) < (26, 0, 0):
            assert seen == golden("plain"), found
            assert (LOOPBACK_RESOLVER, "plain.example") in lab.questions()
        else:
            # Newer engines give it no route and no resolver; the gateway is still the machine.
            assert {t for t, word in seen.items() if word == "open"} == {
                "own loopback", "peer", "host by the gateway"
            }, found  # fmt: skip
    finally:
        for container in made:
            await lab_engine.remove_container(container)
        await lab_engine.remove_network(network)


@pytest.mark.parametrize("rules", ["nft", "iptables"])
async def test_questions_to_the_resolver_are_limited(
    lab: NetworkLab, make_pair: MakePair, rules: str
) -> None:
    """NET-08: a thousand questions in a burst do not all get out.

    The first one is answered, so that the others belong to an established connection.
    """
    load_rules(lab, rules)
    eyes, _ = await make_pair("egress")
    burst = (
        "import socket,os,sys\n"
        "sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "sock.connect((sys.argv[1], 53))\n"
        "for number in range(1001):\n"
        "    if number == 1: sock.recv(4096)\n"
        "    name = b'n%04d' % number\n"
        "    sock.send(os.urandom(2) + bytes.fromhex('01000001000000000000')\n"
        "              + b'\\5' + name + bytes([len(sys.argv[2])]) + sys.argv[2].encode()\n"
        "              + b'\\0\\0\\x10\\0\\1')\n"
    )
    mark = f"burst-{rules}"
    await program(eyes.engine, eyes.id, "python3", "-c", burst, RESOLVER, mark)

    def heard() -> int:
        return sum(name.endswith(mark) for _, name in lab.questions())

    wait_until(heard, 10, "the first question")
    last = -1
    while (now := heard()) != last:  # until no more arrive
        last = now
        await asyncio.sleep(0.3)
    # A burst of 100, and 20 more for each second that sending took.
    assert 50 <= last < 500


def test_the_documented_table_is_the_golden_one() -> None:
    """People read it in docs/network.md; it must say what is tested."""
    text = (Path(__file__).parents[3] / "docs" / "network.md").read_text("utf-8")
    section = text.partition("## What is reached")[2].partition("\n## ")[0]
    lines = [line.strip("| ") for line in section.splitlines() if line.startswith("| ")]
    _, *rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    columns = ("none", "internal", "egress", "egress+nft", "egress+iptables")
    documented = {target: dict(zip(columns, cells, strict=True)) for target, *cells in rows}
    assert documented == {t: {c: row[c] for c in columns} for t, row in TABLE.items()}
