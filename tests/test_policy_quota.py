"""How many sandboxes one owner may have, on the engine and against others in the same moment."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import AsyncKernelManager

from sandbox_kernel import Sandbox, SandboxSpec
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.kernel.launch_error import KernelLaunchError
from sandbox_kernel.policy import Quota
from sandbox_kernel.sandbox import labels
from sandbox_kernel.sandbox.live import LiveSandbox
from sandbox_kernel.sandbox.quota import keep_place, owned
from tests.engines import RUN_LABEL, Engines, leftovers
from tests.kernel.conftest import sandbox_spec

Make = Callable[[int], Awaitable[LiveSandbox]]


@pytest.fixture
def owner() -> str:
    """An owner whom nobody else has: the count is of all of an engine."""
    return f"owner-{uuid.uuid4().hex[:8]}"


@pytest.fixture
async def make(
    engine: Engine, busybox_image: str, owner: str, run_labels: dict[str, str]
) -> AsyncIterator[Make]:
    """Make sandboxes of the owner within a limit."""
    made: list[LiveSandbox] = []
    extra = {RUN_LABEL: run_labels[RUN_LABEL]}

    async def make(most: int) -> LiveSandbox:
        sandbox = await LiveSandbox.create(
            engine,
            SandboxSpec(image=busybox_image),
            owner=owner,
            extra_labels=extra,
            quota=Quota(most, "/etc/policy.json"),
        )
        made.append(sandbox)
        return sandbox

    yield make
    for sandbox in made:
        await sandbox.destroy()


def of(engines: Engines, owner: str) -> list[dict[str, Any]]:
    return engines.api.containers(f"{labels.OWNER}={owner}")


async def test_the_one_beyond_the_limit_is_refused_and_one_that_ends_makes_room(
    make: Make, engines: Engines, owner: str
) -> None:
    """A1: with the owner, the number, the limit and the file."""
    first = await make(2)
    await make(2)
    with pytest.raises(SandboxSpecRejectedError) as caught:
        await make(2)
    for word in ("max_sandboxes", owner, "has 2", "allows 2", "/etc/policy.json"):
        assert word in str(caught.value)
    assert len(of(engines, owner)) == 2
    await first.destroy()
    await make(2)
    with pytest.raises(SandboxSpecRejectedError):
        await make(0)


async def test_others_do_not_count(make: Make, engine: Engine, busybox_image: str) -> None:
    """A1: nor does a container that only carries the owner's label."""
    spec = SandboxSpec(image=busybox_image)
    other = await LiveSandbox.create(engine, spec, owner="somebody-else")
    try:
        await make(1)
    finally:
        await other.destroy()


async def test_of_many_at_once_exactly_as_many_as_are_allowed_come_up(
    make: Make, engines: Engines, owner: str
) -> None:
    """A1: two that look at once both see room; who is later gives way, and leaves nothing."""
    outcomes = await asyncio.gather(*(make(2) for _ in range(6)), return_exceptions=True)
    up = [outcome for outcome in outcomes if isinstance(outcome, LiveSandbox)]
    refused = [outcome for outcome in outcomes if isinstance(outcome, SandboxSpecRejectedError)]
    assert (len(up), len(refused)) == (2, 4), outcomes
    assert {entry["Id"] for entry in of(engines, owner)} == {sandbox.id for sandbox in up}


async def test_processes_that_know_nothing_of_each_other_stay_within_the_limit(
    engines: Engines, busybox_image: str, owner: str
) -> None:
    """A1: the engine is the only thing that they share."""
    settings = {
        "url": engines.unix, "image": busybox_image, "owner": owner, "most": 1,
    }  # fmt: skip
    program = [sys.executable, "-m", "tests.sandbox.claimant", json.dumps(settings)]
    running = [
        await asyncio.create_subprocess_exec(
            *program, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        for _ in range(3)
    ]
    try:
        for process in running:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
        said = [(await process.stdout.readline()).decode().strip() for process in running]  # type: ignore[union-attr]
        assert sorted(said) == ["refused", "refused", "up"]
    finally:
        for process in running:
            process.stdin.close()  # type: ignore[union-attr]
            await process.wait()
    assert leftovers(engines, f"{labels.OWNER}={owner}") == []


class Listing:
    """An engine with given lists of containers: a real one gives no chosen order of events."""

    def __init__(self, *lists: list[dict[str, Any]]) -> None:
        self._lists = list(lists)

    async def list_containers(self, _: object) -> list[dict[str, Any]]:
        return self._lists.pop(0) if len(self._lists) > 1 else self._lists[0]


def entry(name: str, created: float, state: str = "created") -> dict[str, Any]:
    return {"Id": name, "Created": created, "State": state}


async def place(container: str, most: int, *lists: list[dict[str, Any]], now: str = "") -> bool:
    info = {"SystemTime": now} if now else {}
    engine: Any = Listing(*lists)
    try:
        await keep_place(engine, "ann", Quota(most, "F"), info, container)
    except SandboxSpecRejectedError:
        return False
    return True


async def test_who_ranks_beyond_the_limit_gives_up_and_who_ranks_within_waits_for_that() -> None:
    """A1: what runs before what is made, then the older, then the smaller id."""
    both = [entry("b", 5), entry("a", 5)]
    assert not await place("b", 1, both)
    assert await place("a", 1, both, both, [entry("a", 5)])
    assert not await place("a", 1, [entry("a", 5), entry("z", 9, "running")])
    assert await place("a", 2, both)


async def test_an_older_container_that_shows_late_does_not_push_out_what_runs() -> None:
    """A1: it was begun first, seen last, and loses."""
    assert not await place("a", 1, [entry("a", 1), entry("b", 2, "running")])


async def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A1: whoever ranks within the limit and never sees the others go gives up too."""
    monkeypatch.setattr("sandbox_kernel.sandbox.quota._PATIENCE", 0.3)
    began = time.monotonic()
    assert not await place("a", 1, [entry("a", 5), entry("b", 5)])
    assert time.monotonic() - began < 10


async def test_what_a_creator_left_that_was_killed_does_not_count_for_ever() -> None:
    """A1: a container that was never started; not one that runs or is paused."""
    now = "1970-01-01T00:10:00.123456789Z"
    old = [entry("old", 100), entry("mine", 590)]
    assert await place("mine", 1, old, now=now)
    for state in ("running", "paused"):
        old = [entry("old", 100, state), entry("mine", 590)]
        assert not await place("mine", 1, old, now=now)
    over = [entry("x", 1, "exited"), entry("y", 1, "dead"), entry("z", 1, "removing")]
    listing: Any = Listing([*over, entry("mine", 590)])
    assert [e["Id"] for e in await owned(listing, "ann")] == ["mine"]


async def test_kernels_and_python_count_together(
    config_folder: Path,
    engine_unix: Endpoint,
    busybox_image: str,
    owner: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A1, A2: one owner, whatever the door; the hub's word is who that is."""
    monkeypatch.setenv("JUPYTERHUB_USER", owner)
    (config_folder / "jupyter_sandbox_policy.json").write_text('{"max_sandboxes": 1}')
    manager = AsyncKernelManager(kernel_id=uuid.uuid4().hex)
    manager._kernel_spec = sandbox_spec(engine_unix, image=busybox_image)
    spec = SandboxSpec(image=busybox_image)
    async with Sandbox.create(spec, engine=engine_unix.url):
        with pytest.raises(SandboxSpecRejectedError, match="max_sandboxes") as caught:
            await Sandbox.create(spec, engine=engine_unix.url)
        with pytest.raises(KernelLaunchError, match="max_sandboxes") as refused:
            await manager.start_kernel()
        assert str(caught.value) in str(refused.value)
    async with Sandbox.create(spec, engine=engine_unix.url):
        pass
