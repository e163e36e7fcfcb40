"""Sandboxes found again, paused and touched, and workspaces, by the public API (B6-B9, F4)."""

from __future__ import annotations

import asyncio
import json
import os
import tarfile
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel import (
    EngineSettings,
    Sandbox,
    SandboxConflictError,
    SandboxExecTimeoutError,
    SandboxFileNotFoundError,
    SandboxGoneError,
    SandboxRunError,
    SandboxSpec,
    SandboxSpecRejectedError,
    SandboxWorkspaces,
    connect_sandbox,
    find_sandboxes,
)
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.sandbox import labels
from sandbox_kernel.sandbox.quota import owned
from tests.engines import Engines, leftovers
from tests.sandbox.conftest import Create


@pytest.fixture
def settings(engines: Engines) -> EngineSettings:
    """One way to the engine: here it makes no difference."""
    return EngineSettings(host=engines.unix)


@pytest.fixture
def place(settings: EngineSettings, owner: str) -> dict[str, Any]:
    return {"engine": settings, "owner": owner}


async def test_a_sandbox_that_was_left_is_found_with_its_labels_and_held_again(
    create: Create, place: dict[str, Any]
) -> None:
    """B9: by id, by name; the caller's labels come back exactly; others do not find it."""
    labels = {"a": "b", "ünï": '"{}"'}
    sandbox = await create(spec={"resumable": 60, "labels": labels})
    await sandbox.shell("echo kept > /tmp/file", check=True)
    await sandbox.detach()
    await sandbox.detach()
    [info] = await Sandbox.find_all(**place)
    assert (info.id, info.state, dict(info.labels)) == (sandbox.id, "running", labels)
    assert await Sandbox.find_all(engine=place["engine"], owner=uuid.uuid4().hex) == []
    with pytest.raises(SandboxGoneError):
        await Sandbox.connect(sandbox.id, engine=place["engine"], owner=uuid.uuid4().hex)
    again = await Sandbox.connect(sandbox.id, environment={"V": "x"}, max_timeout=30, **place)
    assert (await again.shell("cat /tmp/file; echo $V")).stdout_text == "kept\nx\n"
    assert again.timeouts.most == 30
    await again.detach()
    [found] = await asyncio.to_thread(find_sandboxes, **place)
    blocking = await asyncio.to_thread(connect_sandbox, found.name, **place)
    text = await asyncio.to_thread(blocking.shell, "cat /tmp/file")
    assert text.stdout_text == "kept\n"
    await asyncio.to_thread(blocking.destroy)
    with pytest.raises(SandboxGoneError):
        await Sandbox.connect(sandbox.id, **place)


async def test_sandboxes_made_within_one_second_are_listed_in_their_order(
    create: Create, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B9: the engine's list counts whole seconds."""
    held = [await create() for _ in range(3)]
    made = [sandbox.id for sandbox in held]
    assert [info.id for info in await Sandbox.find_all(**place)] == made
    listed = Engine.list_containers

    async def in_one_second(self: Engine, labels: dict[str, str | None]) -> list[dict[str, Any]]:
        entries = await listed(self, labels)
        return [{**entry, "Created": entries[0]["Created"]} for entry in reversed(entries)]

    monkeypatch.setattr(Engine, "list_containers", in_one_second)
    assert [info.id for info in await Sandbox.find_all(**place)] == made
    await asyncio.gather(*(sandbox.destroy() for sandbox in held))


@pytest.mark.parametrize("end", ["success", "failure", "timeout", "cancelled"])
async def test_a_run_of_its_own_leaves_nothing_however_it_ends(
    create: Create, engines: Engines, owner: str, end: str
) -> None:
    """C2: no container and no volume, by the time that the caller goes on."""

    async def run() -> None:
        async with create() as sandbox:
            text = {"success": "true", "failure": "exit 3"}.get(end, "sleep 1000")
            running.set()
            await sandbox.shell(text, check=True, timeout=0.5 if end == "timeout" else 60)

    running = asyncio.Event()
    task = asyncio.create_task(run())
    if end == "cancelled":
        await running.wait()
        task.cancel()
    [outcome] = await asyncio.gather(task, return_exceptions=True)
    kinds: dict[str, type] = {"failure": SandboxRunError, "timeout": SandboxExecTimeoutError}
    kinds["cancelled"] = asyncio.CancelledError
    assert isinstance(outcome, kinds.get(end, type(None)))
    assert leftovers(engines, f"{labels.OWNER}={owner}") == []


async def test_one_that_ends_with_its_owner_cannot_be_left_or_held(
    create: Create, place: dict[str, Any]
) -> None:
    """B9."""
    async with create() as sandbox:
        with pytest.raises(SandboxSpecRejectedError, match="resumable"):
            await sandbox.detach()
        with pytest.raises(SandboxConflictError, match="resumable"):
            await Sandbox.connect(sandbox.id, **place)
        assert (await sandbox.run(["true"])).returncode == 0


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"images": ["other:1"]}, "image"),
        ({"caps": {"mem_limit": {"max": "128M"}}}, "mem_limit"),
        ({"caps": {"max_lifetime": {"max": 60}}}, "max_lifetime"),
        ({"isolation": "vm"}, "isolation"),
        ({"runtimes": ["runsc"]}, "runtime"),
        ({"caps": {"resumable": {"max": 10}}}, "resumable"),
        ({"caps": {"disk_soft_limit": {"max": "1M"}}}, "disk_soft_limit"),
    ],
)
async def test_a_policy_that_has_closed_since_keeps_from_a_sandbox_that_runs(
    create: Create, place: dict[str, Any], config_folder: Path, policy: dict[str, Any], said: str
) -> None:
    """A1, B9: by what the sandbox got, whatever its maker had asked for."""
    sandbox = await create(spec={"resumable": 30})
    await sandbox.detach()
    file = config_folder / "jupyter_sandbox_policy.json"
    file.write_text(json.dumps(policy))
    with pytest.raises(SandboxSpecRejectedError, match=said):
        await Sandbox.connect(sandbox.id, **place)
    caps = {"pids_limit": {"max": 1000}, "template_limit": {"max": "1M"}}
    file.write_text(json.dumps({"caps": caps, "network": "none"}))
    async with Sandbox.connect(sandbox.id, **place) as again:
        assert again.id == sandbox.id


async def test_whatever_is_done_in_a_paused_sandbox_resumes_it_first(
    create: Create, place: dict[str, Any]
) -> None:
    """B8: a command, a program, files; also when somebody else has paused it just now."""
    spec = {"durability": "persistent", "workspace": "paused"}
    async with create(spec=spec) as one, create(spec=spec) as other:
        assert one.id == other.id

        async def command() -> None:
            assert (await one.run(["true"])).returncode == 0

        async def files() -> None:
            await one.files.put(b"x", "file")

        async def program() -> None:
            async with one.start(["true"]) as process:
                assert (await process.wait()).code == 0

        for work in (command, files, program):
            await other.pause()
            await asyncio.wait_for(work(), 60)
            assert not one.paused
        await one.pause()
        await other.resume()
        assert (await other.run(["true"])).returncode == 0
    await SandboxWorkspaces(**place).remove("paused")


async def test_a_paused_sandbox_that_is_left_stays_paused_beyond_its_grace_time(
    create: Create, place: dict[str, Any]
) -> None:
    """B8, B9: a pause has an end of its own; with all its memory it is there for whoever asks."""
    sandbox = await create(spec={"resumable": 8, "lease_ttl": 2})
    await sandbox.shell("sleep 1000 >/dev/null 2>&1 & echo $! > /tmp/pid", check=True)
    await sandbox.pause()
    await sandbox.detach()
    # Longer than any time of the sandbox's own; nothing would tell that it has not ended.
    await asyncio.sleep(10)
    [info] = await Sandbox.find_all(**place)
    assert info.state == "paused"
    async with Sandbox.connect(sandbox.id, **place) as again:
        assert (await again.shell("kill -0 $(cat /tmp/pid)")).returncode == 0


async def test_a_program_that_runs_keeps_its_sandbox_from_being_idle(create: Create) -> None:
    """B8: use moves the end; the lifetime does not move."""
    async with create(spec={"idle_ttl": 4, "lease_ttl": 2, "max_lifetime": 600}) as sandbox:
        async with sandbox.start(["sleep", "1000"], timeout=None) as process:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(sandbox.wait(), 9)
            expires = await sandbox.expires_at()
            assert expires is not None
            assert expires < datetime.now(UTC) + timedelta(seconds=10)
            await process.kill()
        assert await sandbox.touch() is not None
        assert (await asyncio.wait_for(sandbox.wait(), 60)).kind == "idle"


async def test_a_workspace_goes_out_and_in_as_a_whole(
    create: Create, place: dict[str, Any], tmp_path: Path
) -> None:
    """B6, F4: with no sandbox running, through files of this machine."""
    workspaces = SandboxWorkspaces(**place)
    async with create(spec={"durability": "persistent", "workspace": "a"}) as sandbox:
        await sandbox.shell("mkdir d; echo one > d/1; echo two > 2", check=True)
        with pytest.raises(SandboxConflictError, match=place["owner"]):
            await workspaces.remove("a")
    archive = tmp_path / "a.tar"
    size = await workspaces.export("a", archive)
    assert (archive.stat().st_size, archive.stat().st_mode & 0o777) == (size, 0o600)
    with tarfile.open(archive) as tar:
        assert {name.removeprefix("./") for name in tar.getnames()} >= {"d/1", "2"}
    with pytest.raises(SandboxConflictError, match="overwrite"):
        await workspaces.export("a", archive)
    with pytest.raises(SandboxSpecRejectedError, match="limit"):
        await workspaces.export("a", tmp_path / "b.tar", limit=100)
    assert os.listdir(tmp_path) == ["a.tar"]
    assert (await workspaces.import_("b", archive)).entries == (await workspaces.size("a")).entries
    assert await workspaces.read("b", "d/1") == b"one\n"
    assert {entry.name for entry in await workspaces.files("b")} == {"d", "2"}
    await workspaces.get("b", "d", tmp_path / "d")
    assert (tmp_path / "d" / "1").read_text() == "one\n"
    assert [info.workspace.key for info in await workspaces.list()] == ["a", "b"]
    for key in ("a", "b"):
        assert (await workspaces.find(key)).users == ()
        await workspaces.remove(key)
    with pytest.raises(SandboxFileNotFoundError):
        await workspaces.find("a")


async def test_what_looks_into_a_workspace_is_none_of_its_owners_sandboxes(
    create: Create, place: dict[str, Any], config_folder: Path, engines: Engines, tmp_path: Path
) -> None:
    """A1: an owner with as many as are allowed can still look, and looking takes no place."""
    policy = config_folder / "jupyter_sandbox_policy.json"
    policy.write_text(json.dumps({"max_sandboxes": 1}))
    workspaces = SandboxWorkspaces(**place)
    async with Engine(engines.unix_endpoint) as engine:
        async with create(spec={"durability": "persistent", "workspace": "w"}) as sandbox:
            assert (await workspaces.size("w")).entries >= 0
            assert len(await owned(engine, place["owner"])) == 1
            await sandbox.shell("head -c 3000000 /dev/urandom > f", check=True)
        counted: list[int] = []

        async def count() -> None:
            while True:
                listed = await Sandbox.find_all(**place)
                if listed:
                    counted.append(len(await owned(engine, place["owner"])))
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        try:
            await workspaces.export("w", tmp_path / "w.tar")
        finally:
            counting.cancel()
            await asyncio.gather(counting, return_exceptions=True)
        # The one that looked was seen, and was not counted.
        assert counted
        assert set(counted) == {0}
    policy.write_text(json.dumps({"images": ["other:1"]}))
    with pytest.raises(SandboxSpecRejectedError, match="image"):
        await SandboxWorkspaces(image="another:1", **place).size("w")
    await workspaces.remove("w")


def test_a_spec_has_nothing_that_the_policy_could_not_judge_again() -> None:
    """A1: a new field has to be thought of in `judge_found`."""
    known = {
        *("image", "network", "dns", "require_egress_firewall", "cpu_limit", "mem_limit"),
        *("pids_limit", "tmpfs_size", "shm_size", "environment", "runtime", "isolation"),
        *("disk_limit", "durability", "workspace", "template", "project", "project_limit"),
        *("data_sets", "mounts", "devices", "lease_ttl", "resumable", "idle_ttl"),
        *("max_lifetime", "labels", "prefix", "disk_soft_limit", "template_limit"),
        "template_ignore",
    }
    assert set(SandboxSpec.__dataclass_fields__) == known


async def test_an_archive_that_cannot_be_written_is_refused_before_anything_is_read(
    create: Create, place: dict[str, Any], tmp_path: Path
) -> None:
    """F4: with an error of ours, and nothing half written."""
    async with create(spec={"durability": "persistent", "workspace": "out"}) as sandbox:
        await sandbox.shell("echo x > f", check=True)
    workspaces = SandboxWorkspaces(**place)
    (tmp_path / "folder").mkdir()
    for overwrite in (False, True):
        with pytest.raises(SandboxSpecRejectedError, match="folder"):
            await workspaces.export("out", tmp_path / "folder", overwrite=overwrite)
    with pytest.raises(SandboxSpecRejectedError, match="No such file"):
        await workspaces.export("out", tmp_path / "nowhere" / "a.tar")
    assert set(os.listdir(tmp_path)) <= {"folder", "jupyter-config"}
    await workspaces.remove("out")


async def test_an_image_that_the_policy_has_withdrawn_looks_into_no_workspace(
    create: Create, place: dict[str, Any], config_folder: Path
) -> None:
    """A1: also one that nobody named but the workspace itself."""
    async with create(spec={"durability": "persistent", "workspace": "old"}) as sandbox:
        await sandbox.shell("echo x > f", check=True)
    workspaces = SandboxWorkspaces(**place)
    file = config_folder / "jupyter_sandbox_policy.json"
    file.write_text(json.dumps({"images": ["other:1"]}))
    for work in (workspaces.size("old"), workspaces.read("old", "f"), workspaces.clone("old", "b")):
        with pytest.raises(SandboxSpecRejectedError, match="image"):
            await work
    file.unlink()
    assert [info.workspace.key for info in await workspaces.list()] == ["old"]
    await workspaces.remove("old")
