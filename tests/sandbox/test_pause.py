"""Pausing, time without use, and what is cleared away when nobody ends a sandbox (B8, B13)."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxEngineError,
    SandboxGoneError,
    SandboxPausedError,
    SandboxSpecRejectedError,
)
from sandbox_kernel.sandbox import labels
from sandbox_kernel.sandbox.live import CODE_USER, LiveSandbox
from sandbox_kernel.sandbox.pause import mark_name
from sandbox_kernel.sandbox.reap import Reaped, reap
from sandbox_kernel.sandbox.spec import SandboxSpec
from tests.engines import Engines, wait_until
from tests.sandbox.conftest import MakeSandbox, StartOwner, marks, sh

COUNTER = "i=0; while :; do i=$((i + 1)); echo $i > /tmp/count; sleep 0.05; done"


async def end_of(sandbox: LiveSandbox, within: float = 10.0) -> Any:
    return await asyncio.wait_for(asyncio.shield(sandbox.ended), within)


async def stays(sandbox: LiveSandbox, seconds: float) -> None:
    done, _ = await asyncio.wait({sandbox.ended}, timeout=seconds)
    assert [ended.result() for ended in done] == []


def state_of(engines: Engines, container_id: str) -> str | None:
    found = engines.api.inspect(container_id)
    return None if found is None else str(found["State"]["Status"])


def has_mark(engines: Engines, container_id: str) -> bool:
    names = {volume["Name"] for volume in engines.api.volumes(labels.PAUSED)}
    return mark_name("sbx-", container_id) in names


# -- pause and resume ---------------------------------------------------------------------------


async def test_what_runs_stands_still_and_goes_on_with_its_memory(
    make_sandbox: MakeSandbox, engines: Engines, busybox_image: str
) -> None:
    """B8."""
    sandbox = await make_sandbox(image=busybox_image)
    async with await sandbox.exec(["sh", "-c", COUNTER], user=CODE_USER, stdin=False):
        await asyncio.sleep(0.5)
        await sandbox.pause()
        assert sandbox.paused
        assert state_of(engines, sandbox.id) == "paused"
        assert has_mark(engines, sandbox.id)
        await sandbox.pause()
        await sandbox.resume()
        assert not sandbox.paused
        assert not has_mark(engines, sandbox.id)
        await sandbox.resume()
        before = int((await sh(sandbox, "cat /tmp/count")).out)
        for _ in range(100):
            if int((await sh(sandbox, "cat /tmp/count")).out or "0") > before:
                break
        else:
            raise AssertionError("it did not go on")


async def test_many_pauses_in_a_row_lose_nothing(
    make_sandbox: MakeSandbox, busybox_image: str
) -> None:
    """B8, complaint 20: files and memory, also the second time and later."""
    sandbox = await make_sandbox(image=busybox_image, lease_ttl=2)
    for turn in range(6):
        await sh(sandbox, f"echo {turn} >> /workspace/log; echo {turn} >> /tmp/log")
        await sandbox.pause()
        await asyncio.sleep(0.5)
        await sandbox.resume()
    done = await sh(sandbox, "cat /workspace/log /tmp/log | tr -d '\\n'")
    assert done.out == "012345012345"


async def test_a_command_resumes_a_paused_sandbox_first(
    make_sandbox: MakeSandbox, engine: Engine, engines: Engines, busybox_image: str
) -> None:
    """B8: also one that was paused behind our back (ENG-07)."""
    sandbox = await make_sandbox(image=busybox_image)
    await sandbox.pause()
    assert (await sh(sandbox, "echo awake")).out == "awake\n"
    assert state_of(engines, sandbox.id) == "running"
    await engine.pause_container(sandbox.id)
    assert (await sh(sandbox, "echo awake")).out == "awake\n"
    await sandbox.pause()
    async with sandbox.in_use():
        assert state_of(engines, sandbox.id) == "running"


async def test_pausing_is_seen_by_all_who_hold_it(
    make_sandbox: MakeSandbox, busybox_image: str, workspace: str
) -> None:
    """B8, B7: and who comes anew finds it awake."""
    settings: dict[str, Any] = {
        "image": busybox_image,
        "durability": "persistent",
        "workspace": workspace,
        "lease_ttl": 3,
    }
    one, other = await make_sandbox(**settings), await make_sandbox(**settings)
    await one.pause()
    await asyncio.to_thread(wait_until, lambda: other.paused)
    with pytest.raises(SandboxPausedError):
        await other.touch()
    third = await make_sandbox(**settings)
    assert third.id == one.id
    await asyncio.to_thread(wait_until, lambda: not one.paused and not other.paused)
    await stays(one, 4)


async def test_a_paused_sandbox_is_closed_and_destroyed_like_any_other(
    make_sandbox: MakeSandbox, engines: Engines, busybox_image: str, workspace: str
) -> None:
    """Security goal 5."""
    for settings in ({}, {"durability": "persistent", "workspace": workspace}, {"resumable": 9}):
        for end in (LiveSandbox.close, LiveSandbox.destroy):
            sandbox = await make_sandbox(image=busybox_image, **settings)
            await sandbox.pause()
            await end(sandbox)
            assert state_of(engines, sandbox.id) is None
            assert not has_mark(engines, sandbox.id)


async def test_letting_go_of_a_paused_sandbox_leaves_it_paused_for_the_others(
    make_sandbox: MakeSandbox, engines: Engines, busybox_image: str, workspace: str
) -> None:
    """B7, B8: and the last one ends it, whatever was known when it was paused."""
    settings: dict[str, Any] = {
        "image": busybox_image,
        "durability": "persistent",
        "workspace": workspace,
    }
    sandboxes = [await make_sandbox(**settings) for _ in range(3)]
    await sandboxes[0].pause()
    for sandbox in sandboxes[:2]:
        await asyncio.to_thread(wait_until, lambda: sandboxes[2].paused)
        await sandbox.close()
        assert state_of(engines, sandbox.id) == "paused"
        assert has_mark(engines, sandbox.id)
    await sandboxes[2].close()
    assert state_of(engines, sandboxes[2].id) is None
    assert not has_mark(engines, sandboxes[2].id)


async def test_a_pause_that_lasts_too_long_ends_it(
    make_sandbox: MakeSandbox, engines: Engines, busybox_image: str
) -> None:
    """B8: neither silently nor never."""
    sandbox = await make_sandbox(image=busybox_image)
    with pytest.raises(SandboxSpecRejectedError):
        await sandbox.pause(longest=0)
    await sandbox.pause(longest=1)
    reason = await end_of(sandbox)
    assert reason.kind == "idle"
    assert "paused for 1 s" in reason.text
    await asyncio.to_thread(wait_until, lambda: state_of(engines, sandbox.id) is None)
    with pytest.raises(SandboxGoneError, match="paused for 1 s"):
        await sandbox.exec(["true"], user=CODE_USER)


async def test_what_has_ended_cannot_be_paused(
    make_sandbox: MakeSandbox, engines: Engines, busybox_image: str
) -> None:
    sandbox = await make_sandbox(image=busybox_image)
    await sandbox.destroy()
    with pytest.raises(SandboxGoneError):
        await sandbox.pause()
    assert not has_mark(engines, sandbox.id)


async def test_an_engine_that_cannot_freeze_a_busy_sandbox_is_asked_again(
    make_sandbox: MakeSandbox,
    engines: Engines,
    busybox_image: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B8: with cgroups of version 1 the kernel gives up when processes keep coming.

    The engine's refusal is made up here: when a real one refuses cannot be foreseen.
    """
    refusals = 3
    pause = Engine.pause_container

    async def reluctant(self: Engine, container_id: str) -> None:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            raise SandboxEngineError("The engine could not pause: unable to freeze", 500)
        await pause(self, container_id)

    monkeypatch.setattr(Engine, "pause_container", reluctant)
    sandbox = await make_sandbox(image=busybox_image)
    await sandbox.pause()
    assert state_of(engines, sandbox.id) == "paused"
    await sandbox.resume()
    refusals = 100
    with pytest.raises(SandboxConflictError, match="could not be paused"):
        await sandbox.pause()
    assert not sandbox.paused
    assert not has_mark(engines, sandbox.id)
    assert (await sh(sandbox, "echo alive")).out == "alive\n"


async def test_a_fork_bomb_is_paused_or_refused_and_the_sandbox_can_be_ended(
    make_sandbox: MakeSandbox, engines: Engines, python_image: str
) -> None:
    """RES-01: whichever it is, on the real engine."""
    sandbox = await make_sandbox(image=python_image, pids_limit=64)
    bomb = "import os\nos.write(1, b'x')\nwhile True:\n try: os.fork()\n except OSError: pass\n"
    async with await sandbox.exec(["python3", "-c", bomb], user=CODE_USER, stdin=False) as stream:
        await stream.read()
        with contextlib.suppress(SandboxConflictError):
            await sandbox.pause()
        expected = "paused" if sandbox.paused else "running"
        assert state_of(engines, sandbox.id) == expected
        assert has_mark(engines, sandbox.id) == sandbox.paused
        await sandbox.destroy()
    assert state_of(engines, sandbox.id) is None


# -- time without use ---------------------------------------------------------------------------


async def test_a_sandbox_that_nobody_uses_ends_and_says_so(
    make_sandbox: MakeSandbox, engines: Engines, busybox_image: str
) -> None:
    """B8."""
    sandbox = await make_sandbox(image=busybox_image, idle_ttl=3)
    assert sandbox.expires_at is not None
    left = (sandbox.expires_at - datetime.now(UTC)).total_seconds()
    assert 0 < left <= 3.5
    reason = await end_of(sandbox, 12)
    assert reason.kind == "idle"
    assert "not used for 3 s" in reason.text
    await asyncio.to_thread(wait_until, lambda: state_of(engines, sandbox.id) is None)


async def test_being_used_keeps_a_sandbox_but_never_beyond_its_lifetime(
    make_sandbox: MakeSandbox, busybox_image: str
) -> None:
    """B8: by touch, and for the length of a block."""
    sandbox = await make_sandbox(image=busybox_image, idle_ttl=3, lease_ttl=3, max_lifetime=16)
    for _ in range(10):
        await asyncio.sleep(0.5)
        expires = await sandbox.touch()
        assert expires is not None
    async with sandbox.in_use():
        await stays(sandbox, 5)
        async with sandbox.in_use():
            assert (await end_of(sandbox, 20)).kind == "lifetime"
    with pytest.raises(SandboxGoneError, match="lifetime"):
        await sandbox.touch()


async def test_looking_at_a_sandbox_is_no_use_of_it(
    make_sandbox: MakeSandbox, engine: Engine, busybox_image: str
) -> None:
    """Complaint 21: polling keeps nothing alive."""
    sandbox = await make_sandbox(image=busybox_image, idle_ttl=3)
    began = asyncio.get_running_loop().time()
    while not sandbox.ended.done() and asyncio.get_running_loop().time() - began < 12:
        with contextlib.suppress(SandboxGoneError):
            await engine.inspect_container(sandbox.id)
        assert sandbox.expires_at is not None
        await asyncio.sleep(0.2)
    assert (await end_of(sandbox, 1)).kind == "idle"


async def test_a_computation_is_use_also_when_nobody_waits_for_it(
    make_sandbox: MakeSandbox, busybox_image: str
) -> None:
    """Complaint 21: a long job that was started in the background is not killed."""
    sandbox = await make_sandbox(image=busybox_image, idle_ttl=3)
    busy = "(while :; do :; done) >/dev/null 2>&1 &"
    assert (await sh(sandbox, busy)).code == 0
    await stays(sandbox, 9)
    assert await sandbox.kill_user_processes() == "processes"
    assert (await end_of(sandbox, 12)).kind == "idle"


async def test_a_paused_sandbox_is_not_idle(make_sandbox: MakeSandbox, busybox_image: str) -> None:
    sandbox = await make_sandbox(image=busybox_image, idle_ttl=4, lease_ttl=2)
    await sandbox.pause()
    await asyncio.sleep(7)
    await sandbox.resume()
    assert (await sh(sandbox, "echo alive")).out == "alive\n"


# -- reaping ------------------------------------------------------------------------------------


@pytest.fixture
def owner() -> str:
    """Somebody of whom nobody else has sandboxes."""
    return f"owner-{uuid.uuid4().hex}"


@pytest.fixture
async def make(
    engine: Engine, busybox_image: str, run_labels: dict[str, str], owner: str
) -> AsyncIterator[Callable[..., Awaitable[LiveSandbox]]]:
    """Make sandboxes of that owner."""
    made = []

    async def make(**settings: Any) -> LiveSandbox:
        spec = SandboxSpec(image=busybox_image, **settings)
        sandbox = await LiveSandbox.create(
            engine, spec, owner=owner, extra_labels=marks(run_labels)
        )
        made.append(sandbox)
        return sandbox

    yield make
    for sandbox in made:
        await sandbox.destroy()


async def copy_of(sandbox: LiveSandbox, **changes: Any) -> str:
    """Make another container with the same labels, and not start it."""
    inspected = await sandbox.engine.inspect_container(sandbox.id)
    host = {**inspected["HostConfig"], "AutoRemove": False}
    body = {**inspected["Config"], **changes, "HostConfig": host}
    return (await sandbox.engine.create_container(None, body)).id


async def reaped(engine: Engine, owner: str, which: str = "") -> list[Reaped]:
    """Reap until something, or a certain thing, was."""
    for _ in range(100):
        found = await reap(engine, owner)
        if any(which in thing.id for thing in found):
            return found
        await asyncio.sleep(0.2)
    raise AssertionError("nothing was reaped")


async def test_nothing_that_lives_is_reaped(make: MakeSandbox, engine: Engine, owner: str) -> None:
    """Security goal 6, TEN-11, CON-04."""
    running, paused = await make(max_lifetime=3600), await make()
    await paused.pause()
    assert await reap(engine, owner) == []
    await stays(running, 0.5)
    await paused.resume()
    assert (await sh(paused, "echo alive")).out == "alive\n"


async def test_leftovers_are_named_and_removed(
    make: MakeSandbox,
    engine: Engine,
    engines: Engines,
    owner: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B13: what was made and never started, what has ended, a volume of nobody."""
    monkeypatch.setattr("sandbox_kernel.sandbox.reap._UNSTARTED", 1.0)
    sandbox = await make()
    unstarted = await copy_of(sandbox)
    ended = await copy_of(sandbox, Cmd=["true"])
    await engine.start_container(ended)
    await asyncio.to_thread(wait_until, lambda: state_of(engines, ended) == "exited")
    orphan = await copy_of(sandbox)
    inspected = await engine.inspect_container(orphan)
    (volume,) = [mount["Name"] for mount in inspected["Mounts"]]
    engines.api.request("DELETE", f"/containers/{orphan}", {"force": 1})
    try:
        await asyncio.sleep(2.1)
        wanted = {unstarted, ended, volume}
        planned = await reap(engine, owner, dry_run=True)
        assert {thing.id for thing in planned} == wanted
        assert not any(thing.done for thing in planned)
        assert all(state_of(engines, i) for i in (unstarted, ended))
        assert await reap(engine, "somebody else") == []
        done = await reap(engine, owner)
        assert {thing.id for thing in done} == wanted
        assert all(thing.done for thing in done)
        text = "\n".join(map(str, done))
        for words in ("never started", "has ended", "that is gone", owner):
            assert words in text
        assert not any(state_of(engines, i) for i in (unstarted, ended))
        assert volume not in {v["Name"] for v in engines.api.volumes()}
        assert await reap(engine, owner) == []
        assert (await sh(sandbox, "echo alive")).out == "alive\n"
    finally:
        for leftover in (unstarted, ended):
            engines.api.remove(leftover)


async def test_a_sandbox_whose_owner_died_while_it_was_paused_is_reaped(
    start_owner: StartOwner, engine: Engine, engines: Engines, busybox_image: str
) -> None:
    """B8, B13: a paused sandbox does not tick, so the engine will never remove it by itself."""
    holder = await start_owner(image=busybox_image, lease_ttl=2, pause=1.0)
    assert state_of(engines, holder.id) == "paused"
    await holder.gone()

    found = [t for t in await reaped(engine, "tester", holder.id) if t.id == holder.id]
    assert "longer than it may be" in str(found[0])
    assert found[0].done
    assert state_of(engines, holder.id) is None
    assert holder.volume not in {v["Name"] for v in engines.api.volumes()}
    assert not has_mark(engines, holder.id)


async def test_a_sandbox_that_others_have_paused_gets_a_last_day(
    make: MakeSandbox,
    engine: Engine,
    engines: Engines,
    owner: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ENG-07: nobody wrote down until when; it is neither removed at once nor kept for ever."""
    sandbox = await make()
    await engine.pause_container(sandbox.id)
    (thing,) = await reap(engine, owner, dry_run=True)
    assert "would have marked" in str(thing)
    assert not has_mark(engines, sandbox.id)
    monkeypatch.setattr("sandbox_kernel.sandbox.reap.LONGEST_PAUSE", 1.0)
    (thing,) = await reap(engine, owner)
    assert (thing.kind, thing.done) == ("mark", True)
    assert state_of(engines, sandbox.id) == "paused"
    again = await reaped(engine, owner)
    assert (again[0].kind, again[0].done) == ("container", True)
    assert (await end_of(sandbox)).kind == "removed"


async def test_a_lifetime_also_ends_what_is_paused(
    make: MakeSandbox, engine: Engine, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox_kernel.sandbox.reap._LATE", 0.0)
    sandbox = await make(max_lifetime=2)
    await sandbox.pause()
    found = await reaped(engine, owner)
    assert "lifetime is over" in str(found[0])
    assert (await end_of(sandbox)).kind == "removed"


async def test_persistent_workspaces_are_never_reaped(
    make: MakeSandbox,
    engine: Engine,
    engines: Engines,
    owner: str,
    workspace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B6."""
    monkeypatch.setattr("sandbox_kernel.sandbox.reap._UNSTARTED", 0.0)
    sandbox = await make(durability="persistent", workspace=workspace)
    await sandbox.close()
    await asyncio.sleep(1.1)
    assert await reap(engine, owner) == []
    assert sandbox.volume in {v["Name"] for v in engines.api.volumes()}
