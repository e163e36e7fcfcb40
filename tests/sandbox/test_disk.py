"""Workspaces that are watched where the engine cannot limit them (B5, RES-08)."""

from __future__ import annotations

import asyncio
import re
import uuid
from typing import Any

import pytest

from sandbox_kernel import CommandGoneError
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import SandboxUnavailableError
from sandbox_kernel.sandbox.disk import exceeded, volume_size
from sandbox_kernel.sandbox.live import CODE_USER
from tests.engines import Engines
from tests.sandbox.conftest import Create, MakeSandbox, sh

MIB = 1 << 20
FILL = "head -c 6000000 /dev/zero > /workspace/f"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox_kernel.sandbox.disk._PERIOD", 0.3)


async def test_a_workspace_that_grows_too_large_ends_its_sandbox_with_the_reason(
    create: Create, engines: Engines
) -> None:
    """RES-08: in several files; what runs is told why, and nothing of it is left."""
    async with create(spec={"disk_soft_limit": 8 * MIB}) as sandbox:
        await sandbox.shell("head -c 5000000 /dev/zero > a", check=True)
        await asyncio.sleep(1)
        with pytest.raises(CommandGoneError) as caught:
            await sandbox.shell("head -c 5000000 /dev/zero > b; sleep 100", timeout=60)
    assert caught.value.reason == "disk-full"
    assert re.search(r"takes 9\.\d+ MiB; its limit is 8 MiB \(disk_soft", str(caught.value))
    assert engines.api.inspect(sandbox.id) is None


async def test_what_is_hidden_from_the_count_is_asked_of_the_engine(
    make_sandbox: MakeSandbox, busybox_image: str
) -> None:
    """RES-08: a folder that even its owner may not look into."""
    sandbox = await make_sandbox(image=busybox_image, disk_soft_limit=4 * MIB)
    hide = f"mkdir /workspace/d; cd /workspace/d; {FILL.replace('/workspace/', '')}; chmod 0 ../d"
    stream = await sandbox.exec(["sh", "-c", hide], user=CODE_USER, stdin=False)
    async with stream:
        while await stream.read() is not None:
            pass
    reason = await asyncio.wait_for(asyncio.shield(sandbox.ended), 60)
    assert reason.kind == "disk-full"


async def test_a_count_that_is_held_up_is_asked_of_the_engine_from_then_on(
    make_sandbox: MakeSandbox, busybox_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RES-08: code can stop what counts beside it; a tree can be too large to count in time."""
    monkeypatch.setattr("sandbox_kernel.sandbox.running.COUNT", ("sleep", "1000"))
    monkeypatch.setattr("sandbox_kernel.sandbox.running.COUNT_TIMEOUT", 0.5)
    sandbox = await make_sandbox(image=busybox_image, disk_soft_limit=4 * MIB)
    await sh(sandbox, FILL)
    reason = await asyncio.wait_for(asyncio.shield(sandbox.ended), 60)
    assert reason.kind == "disk-full"
    assert sandbox._counts_in_vain


async def test_a_shared_workspace_is_measured_by_one_and_ends_for_all(
    make_sandbox: MakeSandbox, busybox_image: str, engines: Engines
) -> None:
    """B7: the durable workspace stays as it is."""
    spec: dict[str, Any] = {
        "image": busybox_image,
        "durability": "persistent",
        "workspace": uuid.uuid4().hex,
        "disk_soft_limit": 4 * MIB,
    }
    first = await make_sandbox(**spec)
    second = await make_sandbox(**spec)
    assert first.id == second.id
    assert await second._workspace_size() is None
    await sh(second, FILL)
    reasons = await asyncio.wait_for(asyncio.gather(first.ended, second.ended), 60)
    assert reasons[0].kind == "disk-full"
    assert reasons[1].kind in {"removed", "disk-full"}
    third = await make_sandbox(**{**spec, "disk_soft_limit": None})
    assert (await sh(third, "wc -c < /workspace/f")).out == "6000000\n"
    await third.destroy()
    engines.api.remove_volume(third.volume)


async def test_what_cannot_be_measured_now_is_measured_later() -> None:
    """RES-08: a paused sandbox, one at its limit of processes, an engine that is away."""
    sizes: list[int | Exception | None] = [SandboxUnavailableError("lost", "gone"), None, 5, 7]

    async def measure() -> int | None:
        size = sizes.pop(0)
        if isinstance(size, Exception):
            raise size
        return size

    assert await asyncio.wait_for(exceeded(measure, 6), 30) == 7
    assert sizes == []


@pytest.mark.parametrize(
    ("usage", "size"),
    [
        ({"Volumes": [{"Name": "v", "UsageData": {"Size": 5, "RefCount": 1}}]}, 5),
        ({"Volumes": [{"Name": "v", "UsageData": {"Size": -1}}]}, None),
        ({"Volumes": [{"Name": "v"}]}, None),
        ({"Volumes": [{"Name": "w", "UsageData": {"Size": 5}}]}, None),
        ({"Volumes": None}, None),
        ({}, None),
        (None, None),
    ],
)
def test_an_account_without_the_volume_tells_nothing(usage: Any, size: int | None) -> None:
    """Engines write -1 for what they did not count."""
    assert volume_size(usage, "v") == size


async def test_the_engine_tells_how_large_a_volume_is(
    engine: Engine, make_sandbox: MakeSandbox, busybox_image: str
) -> None:
    """E7."""
    sandbox = await make_sandbox(image=busybox_image)
    await sh(sandbox, FILL)
    size = volume_size(await engine.disk_usage(), sandbox.volume)
    assert size is not None
    assert 6_000_000 <= size < 8_000_000
