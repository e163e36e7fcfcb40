"""The shared stream of events, on a real engine and, for reading, on made-up lines."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.events import LOST, RESYNC, Event, EventHub, Watch, parse_event
from sandbox_kernel.errors import SandboxUnavailableError
from tests.engine.conftest import MakeContainer
from tests.engines import FaultProxy


async def until(watch: Watch, action: str) -> Event:
    async with asyncio.timeout(10):
        async for event in watch:
            if event.action == action:
                return event
    raise AssertionError


async def test_what_happens_to_a_container_is_told_to_its_watcher(
    engine: Engine, make_container: MakeContainer
) -> None:
    """K4: from entry on nothing is missed, and other containers are not heard."""
    container = await make_container(start=False)
    other = await make_container(start=False)
    async with engine.events.watch(container) as watch:
        await engine.start_container(other)
        await engine.start_container(container)
        first = await watch.get()
        assert (first.action, first.container_id) == ("start", container)
        assert first.time_ns > 0
        async with await engine.exec(
            container, ["sh", "-c", "exit 5"], user="10001", env={"SECRET": "hunter2"}
        ) as stream:
            assert await stream.read() is None
        created = await until(watch, "exec_create")
        assert "exit 5" not in repr(created)
        ended = await until(watch, "exec_die")
        assert ended.attributes["execID"] == stream.id
        assert ended.attributes["exitCode"] == "5"
        await engine.remove_container(container)
        died = await until(watch, "die")
        assert died.attributes["exitCode"] == "137"
        await until(watch, "destroy")


async def test_running_out_of_memory_is_told(engine: Engine, make_container: MakeContainer) -> None:
    """K4: the state does not tell it of an exec that was killed; the event does."""
    container = await make_container(HostConfig={"Memory": 32 << 20, "MemorySwap": 32 << 20})
    async with engine.events.watch(container) as watch:
        command = ["sh", "-c", "tail -c 200m /dev/zero | tail -c 200m >/dev/null"]
        async with await engine.exec(container, command, user="10001") as stream:
            while await stream.read() is not None:
                pass
        await until(watch, "oom")


async def test_a_lost_stream_is_made_again_and_watchers_look_for_themselves(
    proxy: FaultProxy, make_container: MakeContainer
) -> None:
    """K4: aiodocker's own events go silent for good after a loss."""
    container = await make_container(start=False)
    async with Engine(proxy.endpoint) as engine, engine.events.watch(container) as watch:
        for _ in range(2):
            proxy.cut()
            assert (await watch.get()).action == LOST
            await until(watch, RESYNC)
        await engine.start_container(container)
        await until(watch, "start")


async def test_an_engine_that_is_away_for_a_while_is_found_again(
    proxy: FaultProxy, make_container: MakeContainer
) -> None:
    """K4: the stream is tried again with a growing delay until the engine is back."""
    container = await make_container(start=False)
    async with Engine(proxy.endpoint) as engine, engine.events.watch(container) as watch:
        await proxy.stop()
        assert (await watch.get()).action == LOST
        await asyncio.sleep(0.4)
        await proxy.start()
        await until(watch, RESYNC)


async def test_closing_the_engine_leaves_no_task(
    endpoint: Any, make_container: MakeContainer
) -> None:
    """B13: whatever state the stream is in."""
    container = await make_container(start=False)
    before = asyncio.all_tasks()
    engine = Engine(endpoint)
    await engine.open()
    async with engine.events.watch(container):
        assert {t.get_name() for t in asyncio.all_tasks() - before} == {"engine-events"}
        await engine.close()
        assert asyncio.all_tasks() == before
    with pytest.raises(SandboxUnavailableError, match="closed"):
        async with engine.events.watch(container):
            pass


async def test_closing_while_the_engine_is_away_leaves_no_task(
    proxy: FaultProxy, make_container: MakeContainer
) -> None:
    """B13: the wait before the next try is ended too."""
    container = await make_container(start=False)
    engine = Engine(proxy.endpoint)
    await engine.open()
    async with engine.events.watch(container) as watch:
        await proxy.stop()
        assert (await watch.get()).action == LOST
        await engine.close()
    assert not [t for t in asyncio.all_tasks() if t.get_name() == "engine-events"]


async def test_closing_while_the_stream_is_opened_leaves_no_task() -> None:
    """B13: the opener is held up, for which no real engine can be made to wait."""
    gate, closed = asyncio.Event(), []

    class Response:
        def close(self) -> None:
            closed.append(self)

    async def slow() -> Any:
        await gate.wait()
        return Response()

    hub = EventHub(slow)

    async def watch() -> None:
        async with hub.watch("0" * 64):
            pass

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    await hub.close()
    gate.set()
    with pytest.raises(SandboxUnavailableError):
        await asyncio.wait_for(watching, 10)
    assert len(closed) == 1
    assert "engine-events" not in {task.get_name() for task in asyncio.all_tasks()}


async def test_a_stream_that_cannot_be_had_is_an_error_for_who_asks(proxy: FaultProxy) -> None:
    """E4: the first watcher is told why; nothing is left of it."""
    async with Engine(proxy.endpoint) as engine:
        await proxy.stop()
        with pytest.raises(SandboxUnavailableError):
            async with engine.events.watch("0" * 64):
                pass
        assert engine.events._watches == {}


async def test_a_watcher_that_is_slow_is_told_to_look(engine: Engine) -> None:
    """K4: a container that makes events without end cannot fill this process's memory."""
    watch = Watch("c")
    for number in range(5000):
        watch.put(Event("oom", "c", {}, number))
    got = []
    while not watch._queue.empty():
        got.append(await watch.get())
    assert len(got) <= 1000
    assert got[0].action == RESYNC


def line(**changes: Any) -> bytes:
    event = {
        "Type": "container",
        "Action": "die",
        "Actor": {"ID": "c", "Attributes": {"exitCode": "3"}},
        "timeNano": 7,
        **changes,
    }
    return json.dumps(event).encode()


@pytest.mark.parametrize(
    ("action", "normal"),
    [
        ("die", "die"),
        ("exec_create: sh -c secret", "exec_create"),
        ("exec_start: sh -c 'a: b'", "exec_start"),
        ("exec_died", "exec_die"),
        ("remove", "destroy"),
        ("health_status: healthy", "health_status"),
    ],
)
def test_actions_of_different_engines_have_one_name(action: str, normal: str) -> None:
    """K4: Podman's words are Docker's, and no command line is kept."""
    event = parse_event(line(Action=action))
    assert event == Event(normal, "c", {"exitCode": "3"}, 7)


@pytest.mark.parametrize(
    "bad",
    [b"", b"{", b"[]", b"3", b'{"Actor": 3}', line(Actor={"ID": 3}), line(Type="image"),
     line(Action=3), line(Actor=None), line(timeNano="x"), b"[" * 100_000],
)  # fmt: skip
def test_what_is_not_an_event_is_passed_over(bad: bytes) -> None:
    """K4: one odd line does not end the stream."""
    assert parse_event(bad) is None


@given(st.binary())
def test_any_bytes_can_be_read(data: bytes) -> None:
    """K4: reading never raises."""
    parse_event(data)
