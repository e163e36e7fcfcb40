"""Workspaces, and sandboxes that may outlive a connection, when the engine or the line breaks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import SandboxError
from sandbox_kernel.sandbox import labels
from sandbox_kernel.sandbox.hold import Hold
from sandbox_kernel.sandbox.live import LiveSandbox
from sandbox_kernel.sandbox.plan import other_settings
from sandbox_kernel.sandbox.spec import SandboxSpec
from sandbox_kernel.sandbox.workspace import FORMAT, workspace_name
from tests.engines import Engines, FaultProxy, provide_busybox, wait_until
from tests.process.private import PrivateEngine, private_engine
from tests.sandbox.conftest import marks, sh

OWNER = "tester"


@pytest.fixture
def private() -> Iterator[PrivateEngine]:
    with private_engine() as made:
        yield made


def spec_on(engines: Engines, **settings: Any) -> SandboxSpec:
    plain = {"durability": "persistent", "workspace": "a", "lease_ttl": 5}
    return SandboxSpec(image=provide_busybox(engines), **{**plain, **settings})


@pytest.mark.parametrize(
    ("number", "options"),
    [(signal.SIGKILL, ()), (signal.SIGTERM, ()), (signal.SIGKILL, ("--live-restore",))],
)
async def test_a_workspace_survives_a_restart_of_the_engine(
    private: PrivateEngine, number: signal.Signals, options: tuple[str, ...]
) -> None:
    """B6, ENG-01, ENG-02: its sandbox does not, its owner is told, and the key is free at once.

    With live-restore too: at its start an engine removes every container that is to be removed
    when it ends, those that still run included (seen on Docker 20.10).
    """
    if options:
        private.end(signal.SIGTERM)
        private.start(*options)
    async with Engine(private.engines.unix_endpoint) as engine:
        spec = spec_on(private.engines)
        first = await LiveSandbox.create(engine, spec, owner=OWNER)
        assert (await sh(first, "echo kept > /workspace/f; sync")).code == 0
        private.end(number)
        private.start(*options)
        reason = await asyncio.wait_for(asyncio.shield(first.ended), 60)
        assert reason.kind in {"removed", "exited", "engine-lost"}
        second = await LiveSandbox.create(engine, spec, owner=OWNER)
        assert second.id != first.id
        assert (await sh(second, "cat /workspace/f")).out == "kept\n"
        with contextlib.suppress(SandboxError):
            await first.destroy()
        assert (await sh(second, "echo alive")).out == "alive\n"
        await second.destroy()
        assert private.engines.api.containers() == []


async def test_a_line_that_was_cut_does_not_end_a_sandbox_that_may_outlive_it(
    engines: Engines, workspace: str, run_labels: dict[str, str], tmp_path: Path
) -> None:
    """Decision 7: it is attached to again within its ttl."""
    proxy = FaultProxy(engines, tmp_path / "p.sock")
    await proxy.start()
    try:
        async with Engine(proxy.endpoint) as engine:
            sandbox = await LiveSandbox.create(
                engine,
                spec_on(engines, workspace=workspace),
                owner=OWNER,
                extra_labels=marks(run_labels),
            )
            await proxy.stop()
            await asyncio.sleep(1)
            await proxy.start()
            done, _ = await asyncio.wait({sandbox.ended}, timeout=12)
            assert [ended.result() for ended in done] == []
            assert (await sh(sandbox, "echo alive")).out == "alive\n"
            await sandbox.close()
        assert engines.api.inspect(sandbox.id) is None
    finally:
        await proxy.stop()


async def test_why_it_ended_is_heard_while_a_line_is_made_anew(
    engines: Engines,
    workspace: str,
    run_labels: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """K4: its lifetime is over meanwhile; that it is gone is not all that is told."""
    attach = Hold._attach

    async def slow(self: Hold) -> None:
        if self._lease is not None:
            await asyncio.sleep(5)
        await attach(self)

    monkeypatch.setattr(Hold, "_attach", slow)
    async with Engine(engines.unix_endpoint) as engine:
        spec = spec_on(engines, workspace=workspace, max_lifetime=4)
        sandbox = await LiveSandbox.create(
            engine, spec, owner=OWNER, extra_labels=marks(run_labels)
        )
        await sandbox._hold.lease._stream.close()
        reason = await asyncio.wait_for(asyncio.shield(sandbox.ended), 30)
        await sandbox.destroy()
    assert reason.kind == "lifetime"


async def test_a_line_that_stays_cut_is_told_and_the_sandbox_ends_by_itself(
    engines: Engines,
    workspace: str,
    run_labels: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """K4, B13."""
    monkeypatch.setattr("sandbox_kernel.sandbox.hold.START_TIMEOUT", 2.0)
    proxy = FaultProxy(engines, tmp_path / "p.sock")
    await proxy.start()
    try:
        async with Engine(proxy.endpoint) as engine:
            spec = spec_on(engines, workspace=workspace, lease_ttl=2)
            sandbox = await LiveSandbox.create(
                engine, spec, owner=OWNER, extra_labels=marks(run_labels)
            )
            await proxy.stop()
            reason = await asyncio.wait_for(asyncio.shield(sandbox.ended), 30)
            assert reason.kind == "engine-lost"
            await asyncio.to_thread(wait_until, lambda: engines.api.inspect(sandbox.id) is None, 15)
            with contextlib.suppress(SandboxError):
                await sandbox.close()
    finally:
        await proxy.stop()


def test_a_setting_that_an_older_version_did_not_know_keeps_nobody_from_its_sandbox() -> None:
    """B7: a sandbox that ran through an upgrade is shared, unless one asks for the new thing."""

    def told(**spec: Any) -> dict[str, str]:
        return {labels.LIMITS: json.dumps({"limits": {"pids": 1}, "spec": {"prefix": "a", **spec}})}

    assert other_settings(told(mounts={}, new=False), told()) == []
    [why] = other_settings(told(mounts={"x": "/srv"}), told())
    assert "mounts" in why
    [why] = other_settings(told(), told(mounts={"x": "/srv"}))
    assert "mounts" in why


async def test_a_workspace_that_another_version_has_made_is_found(
    engine: Engine, engines: Engines, workspace: str, run_labels: dict[str, str]
) -> None:
    """B6: what counts is the format of names and labels."""
    name = workspace_name("sbx-", OWNER, workspace)
    made = {
        **run_labels,
        labels.VERSION: "0.0.7",
        labels.OWNER: OWNER,
        labels.DURABILITY: "persistent",
        labels.WORKSPACE: labels.key_text(workspace),
        labels.FORMAT: FORMAT,
    }
    engines.api.request("POST", "/volumes/create", body={"Name": name, "Labels": made})
    spec = spec_on(engines, workspace=workspace)
    sandbox = await LiveSandbox.create(engine, spec, owner=OWNER, extra_labels=marks(run_labels))
    try:
        assert sandbox.volume == name
        assert (await sh(sandbox, "touch /workspace/f")).code == 0
    finally:
        await sandbox.destroy()
