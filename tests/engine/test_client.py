"""The engine client against a real engine, over its socket and over mutual TLS alike."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
from aiodocker import DockerError
from aiodocker.containers import DockerContainer

from sandbox_kernel.engine.client import NEWEST_API, OLDEST_API, Engine
from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxEngineError,
    SandboxEngineTimeoutError,
    SandboxGoneError,
    SandboxImageMissingError,
    SandboxPausedError,
    SandboxUnavailableError,
)
from tests.engine.conftest import MakeContainer
from tests.engines import Engines, FaultProxy, wait_until


async def test_the_engine_answers_and_an_api_version_is_agreed_on(engine: Engine) -> None:
    """E4: a version between the oldest that will do and the newest that was tried."""
    await engine.ping()
    major, _, minor = engine.api_version.partition(".")
    assert OLDEST_API <= (int(major), int(minor)) <= NEWEST_API
    assert (await engine.version())["Version"]
    assert (await engine.info())["NCPU"] > 0


async def test_a_container_lives_and_is_removed(
    engine: Engine, engines: Engines, container_body: dict[str, Any]
) -> None:
    """E2: create, start, inspect, list, kill and remove over either road."""
    name = f"sbx-test-{uuid.uuid4().hex[:12]}"
    body = {**container_body, "Labels": {**container_body["Labels"], "io.sandbox-kernel.x": name}}
    created = await engine.create_container(name, body)
    try:
        assert created.warnings == ()
        await engine.start_container(created.id)
        assert (await engine.inspect_container(created.id))["State"]["Running"] is True
        found = await engine.list_containers({"io.sandbox-kernel.x": name})
        assert [item["Id"] for item in found] == [created.id]
        assert await engine.list_containers({"io.sandbox-kernel.x": "another"}) == []
        await engine.kill_container(created.id)
        state = (await engine.inspect_container(created.id))["State"]
        assert (state["Running"], state["ExitCode"]) == (False, 137)
    finally:
        await engine.remove_container(created.id)
    assert engines.api.inspect(created.id) is None
    await engine.remove_container(created.id)
    await engine.kill_container(created.id)


async def test_a_warning_of_the_engine_reaches_the_caller(
    make_container: MakeContainer, engine: Engine, container_body: dict[str, Any]
) -> None:
    """E4: what the engine does not honour is told; aiodocker itself drops that."""
    await make_container(start=False)  # proves that a plain body draws none
    host = {
        **container_body["HostConfig"],
        "Memory": 1 << 26,
        "MemorySwappiness": 10,
        "OomKillDisable": True,
        "KernelMemory": 1 << 25,
    }
    created = await engine.create_container(None, {**container_body, "HostConfig": host})
    try:
        assert any("deprecated" in w.lower() or "not" in w.lower() for w in created.warnings)
    finally:
        await engine.remove_container(created.id)


async def test_removal_by_two_at_once_succeeds_for_both(
    engine: Engine, make_container: MakeContainer, engines: Engines
) -> None:
    """B13: the engine answers 409 while it removes; that is success for the second one."""
    container = await make_container()
    await asyncio.gather(*(engine.remove_container(container) for _ in range(4)))
    assert engines.api.inspect(container) is None


async def test_a_container_that_ends_while_it_is_removed_is_removed_all_the_same(
    engine: Engine,
    make_container: MakeContainer,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B13: an engine before 23 then says that it is not running, and leaves it there.

    The answers are made up, since no real engine can be made to show that moment.
    """
    container = await make_container()
    said = ["cannot remove - Container 3f2a is not running", "removal of it is already in progress"]
    delete = DockerContainer.delete

    async def unlucky(self: DockerContainer, **options: Any) -> Any:
        if said:
            raise DockerError(500 if len(said) > 1 else 409, said.pop(0))
        return await delete(self, **options)

    monkeypatch.setattr(DockerContainer, "delete", unlucky)
    await engine.remove_container(container)
    assert engines.api.inspect(container) is None


async def test_a_cancelled_creation_leaves_no_container(
    engine: Engine, engines: Engines, container_body: dict[str, Any]
) -> None:
    """B13: the engine goes on creating; the client waits for it and removes the result."""
    marker = f"io.sandbox-kernel.cancelled={uuid.uuid4().hex}"
    key, _, value = marker.partition("=")
    body = {**container_body, "Labels": {**container_body["Labels"], key: value}}
    for pause in (0.0, 0.001, 0.003, 0.006):
        task = asyncio.create_task(engine.create_container(None, body))
        await asyncio.sleep(pause)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert engines.api.containers(marker) == []


async def test_a_container_that_is_not_there_is_gone(engine: Engine) -> None:
    """E4: 404 is one error, whatever the call."""
    for call in (
        engine.inspect_container("0" * 64),
        engine.start_container("0" * 64),
        engine.attach_container("0" * 64),
        engine.exec("0" * 64, ["true"], user="0"),
        engine.inspect_exec("0" * 64),
    ):
        with pytest.raises(SandboxGoneError, match="does not exist"):
            await call


async def test_a_container_that_stopped_is_gone(
    engine: Engine, make_container: MakeContainer
) -> None:
    """E4: an exec in a container that does not run is told apart from other conflicts."""
    container = await make_container(start=False)
    with pytest.raises(SandboxGoneError, match="is not running"):
        await engine.exec(container, ["true"], user="0")


async def test_a_paused_container_says_so(engine: Engine, container: str) -> None:
    """B8: an exec into a frozen container is refused with a class of its own."""
    await engine.pause_container(container)
    with pytest.raises(SandboxPausedError, match="is paused"):
        await engine.exec(container, ["true"], user="0")
    await engine.unpause_container(container)
    async with await engine.exec(container, ["true"], user="0") as stream:
        assert await stream.read() is None


async def test_a_name_in_use_is_a_conflict(
    engine: Engine, engines: Engines, container_body: dict[str, Any]
) -> None:
    """B7: a lost race for a name can be recognised."""
    name = f"sbx-test-{uuid.uuid4().hex[:12]}"
    created = await engine.create_container(name, container_body)
    try:
        with pytest.raises(SandboxConflictError, match="already in use"):
            await engine.create_container(name, container_body)
    finally:
        await engine.remove_container(created.id)


async def test_a_missing_image_names_the_command_that_builds_ours(
    engine: Engine, container_body: dict[str, Any]
) -> None:
    """E5: the default image is not there before `jupyter sandbox build`."""
    with pytest.raises(SandboxImageMissingError, match="jupyter sandbox build"):
        await engine.create_container(None, {**container_body, "Image": "sbx-nothing:1"})


async def test_an_invalid_request_keeps_its_status(
    engine: Engine, container_body: dict[str, Any]
) -> None:
    """E4: a failure without a class of its own keeps status and translated text."""
    with pytest.raises(SandboxEngineError) as caught:
        await engine.create_container("not a name", container_body)
    assert caught.value.status in {400, 500}


async def test_volumes_are_made_found_and_removed(
    engine: Engine, run_labels: dict[str, str], make_container: MakeContainer
) -> None:
    """B6: removal is never forced; a volume in use is a conflict."""
    name = f"sbx-test-{uuid.uuid4().hex[:12]}"
    assert await engine.inspect_volume(name) is None
    await engine.create_volume(name, {**run_labels, "io.sandbox-kernel.v": name})
    try:
        found = await engine.inspect_volume(name)
        assert found is not None
        assert found["Labels"]["io.sandbox-kernel.v"] == name
        assert [v["Name"] for v in await engine.list_volumes({"io.sandbox-kernel.v": name})] == [
            name
        ]
        mount = {"Type": "volume", "Source": name, "Target": "/workspace"}
        user = await make_container(start=False, HostConfig={"Mounts": [mount]})
        with pytest.raises(SandboxConflictError, match="in use"):
            await engine.remove_volume(name)
        await engine.remove_container(user)
    finally:
        await engine.remove_volume(name)
    assert await engine.inspect_volume(name) is None
    await engine.remove_volume(name)


async def test_more_streams_than_aiohttp_allows_by_default(engine: Engine, container: str) -> None:
    """E2: with aiohttp's limit of 100 connections the 101st stream would wait for ever."""
    streams = []
    try:
        for _ in range(4):  # a few at a time, or starting them would take the engine's all
            streams += [await engine.attach_container(container) for _ in range(30)]
        async with asyncio.timeout(10):
            await engine.ping()
    finally:
        for stream in streams:
            await stream.close()


async def test_a_silent_engine_ends_a_call_at_its_bound(
    proxy: FaultProxy,
) -> None:
    """E4: no call waits for ever."""
    async with Engine(proxy.endpoint, timeout=0.3) as engine:
        proxy.freeze()
        with pytest.raises(SandboxEngineTimeoutError, match=r"within 0\.3 s"):
            await engine.info()
        proxy.thaw()
        await engine.info()


async def test_a_lost_engine_is_told_from_one_that_is_gone(proxy: FaultProxy) -> None:
    """E4: a cut line is `lost`, a vanished socket `no-socket`, a closed client `lost`."""
    engine = Engine(proxy.endpoint)
    await engine.open()
    proxy.freeze()
    # Not a question: those are asked again on a new connection.
    call = asyncio.create_task(engine.pause_container("0" * 64))
    await asyncio.sleep(0.1)
    proxy.cut()
    with pytest.raises(SandboxUnavailableError) as lost:
        await call
    assert lost.value.kind == "lost"
    await proxy.stop()
    with pytest.raises(SandboxUnavailableError) as vanished:
        await engine.info()
    assert vanished.value.kind == "no-socket"
    await engine.close()
    await engine.close()
    with pytest.raises(SandboxUnavailableError) as closed:
        await engine.info()
    assert closed.value.kind == "lost"


async def test_proxies_of_the_environment_are_not_used(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEC-07: the engine is dialled directly, whatever the environment says."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    async with Engine(endpoint) as engine:
        await engine.ping()


async def test_nothing_of_the_key_shows_in_texts_of_the_engine(engine_tls: Endpoint) -> None:
    """SEC-04: reprs show paths, never content."""
    async with Engine(engine_tls) as engine:
        assert engine_tls.tls is not None
        body = "".join(engine_tls.tls.key.read_text().splitlines()[1:3])
        shown = repr(engine) + repr(engine.endpoint) + repr(vars(engine))
        assert body not in shown


def test_waiting_helper_is_bounded() -> None:
    """The tests' own poll ends."""
    with pytest.raises(AssertionError):
        wait_until(lambda: False, within=0.05)
