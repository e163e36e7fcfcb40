"""Kernels on the network tiers (B3, B4, K7): the kernelspec names the tier, and nothing else."""

from __future__ import annotations

import pytest

from sandbox_kernel.kernel.launch_error import KernelLaunchError
from tests.engines import Engines
from tests.kernel.conftest import MakeManager, connect, containers_of, evaluate

ROUTES = "import json; print(json.dumps(open('/proc/net/route').read().count(chr(10)) - 1))"


async def test_a_kernel_runs_on_the_tier_egress(
    make_manager: MakeManager, engines: Engines
) -> None:
    """B3: with a way out, its channels still ride on the exec alone, also after a restart."""
    manager = make_manager(network="egress", dns="198.51.100.53")
    await manager.start_kernel()
    client = await connect(manager)
    assert await evaluate(client, ROUTES) >= 1
    [container] = containers_of(engines, manager)
    assert list(container["NetworkSettings"]["Networks"]) == ["sbx-egress"]
    assert container["Ports"] == []
    await manager.restart_kernel()
    await client.wait_for_ready(timeout=60)
    assert await evaluate(client, ROUTES) >= 1
    client.stop_channels()


async def test_a_kernel_without_a_proved_firewall_says_why(
    make_manager: MakeManager, engines: Engines
) -> None:
    """B4, K8: the person reads which way is open, and nothing is left.

    The test engine sets no firewall rules, so that its own machine answers.
    """
    manager = make_manager(network="egress", dns="198.51.100.53", require_egress_firewall=True)
    with pytest.raises(KernelLaunchError, match=r"network = 'egress'.*there is a way to") as caught:
        await manager.start_kernel()
    assert "jupyter sandbox firewall print" in str(caught.value)
    assert containers_of(engines, manager) == []


async def test_a_kernel_gets_no_list_of_domains(make_manager: MakeManager) -> None:
    """B3 (S2): refused with the reason."""
    manager = make_manager(network="pypi.org")
    with pytest.raises(KernelLaunchError, match="cannot enforce a list of domains"):
        await manager.start_kernel()
