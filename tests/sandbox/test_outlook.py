"""What a sandbox uses, and what is known before one is made."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox_kernel import EngineSettings, SandboxUnavailableError
from sandbox_kernel.sandbox.order import settle
from sandbox_kernel.sandbox.outlook import look
from sandbox_kernel.sandbox.usage import Usage, usage_of


async def test_usage_is_that_of_the_sandbox(create: Any) -> None:
    """E7, peers 23: memory, processor time and processes, by the engine's account."""
    async with create() as sandbox:
        idle = await sandbox.usage()
        assert 0 < idle.memory < 1 << 30
        assert 0 < idle.pids < 20
        await sandbox.run(["python3", "-c", "sum(range(10**7))"])
        assert (await sandbox.usage()).cpu_seconds > idle.cpu_seconds + 0.1


def test_what_the_engine_leaves_out_counts_as_nothing() -> None:
    """E7: cgroup v1, v2 and an empty answer."""
    cpu = {"cpu_usage": {"total_usage": 1_500_000_000}}
    memory = {"usage": 100, "stats": {"total_inactive_file": 30, "inactive_file": 5}}
    stats = {"cpu_stats": cpu, "memory_stats": memory, "pids_stats": {"current": 3}}
    assert usage_of(stats) == Usage(70, 1.5, 3)
    stats["memory_stats"] = {"usage": 100, "stats": {"inactive_file": 5}}
    assert usage_of(stats).memory == 95
    assert usage_of({"memory_stats": {}, "pids_stats": None}) == Usage(0, 0.0, 0)


async def test_the_outlook_names_engine_and_image(
    settings: EngineSettings, python_image: str
) -> None:
    """E7: where, over what, how fast, and whether the image is there."""
    found = await look(settle({"image": python_image}, door="python", engine=settings))
    assert found.version
    assert found.image_id is not None
    assert found.image_id.startswith("sha256:")
    assert found.encrypted is (settings.tls_cert_path is not None)
    assert 0 < found.latency < 5
    missing = await look(settle({"image": "nobody/nothing:1"}, door="python", engine=settings))
    assert (missing.image, missing.image_id) == ("nobody/nothing:1", None)


async def test_no_engine_is_an_error_that_names_it() -> None:
    """E4."""
    nowhere = EngineSettings(host="unix:///nowhere/docker.sock")
    with pytest.raises(SandboxUnavailableError, match=r"/nowhere/docker\.sock"):
        await look(settle({}, door="python", engine=nowhere))
