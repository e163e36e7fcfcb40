"""Persistent workspaces and the sandboxes on them: one per key, whoever asks (B6, B7, B9)."""

from __future__ import annotations

import asyncio
import io
import tarfile
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxGoneError,
    SandboxSpecRejectedError,
    SandboxStartError,
)
from sandbox_kernel.sandbox import labels
from sandbox_kernel.sandbox.found import list_sandboxes
from sandbox_kernel.sandbox.hold import Hold
from sandbox_kernel.sandbox.live import CODE_USER, LiveSandbox
from sandbox_kernel.sandbox.spec import SandboxSpec, resolve_limits
from sandbox_kernel.sandbox.workspace import FORMAT, workspace_name
from tests.engines import Engines, busybox_archive, wait_until
from tests.sandbox.conftest import MakeSandbox, StartOwner, marks, sh

OWNER = "tester"


@pytest.fixture
def make(make_sandbox: MakeSandbox, busybox_image: str, workspace: str) -> MakeSandbox:
    """Make sandboxes of one workspace."""

    async def make(**settings: Any) -> LiveSandbox:
        return await make_sandbox(
            **{"image": busybox_image, "durability": "persistent", "workspace": workspace,
               "lease_ttl": 3, **settings}
        )  # fmt: skip

    return make


@pytest.fixture
async def other_engine(engine: Engine, engines: Engines) -> AsyncIterator[Engine]:
    """The same engine by the other way, as from another machine."""
    tls = engine.endpoint.tls
    async with Engine(engines.unix_endpoint if tls else engines.tls_endpoint) as opened:
        yield opened


def containers_of(engines: Engines, key: str) -> list[str]:
    return [c["Id"] for c in engines.api.containers(f"{labels.WORKSPACE}={labels.key_text(key)}")]


async def end_of(sandbox: LiveSandbox, within: float = 10.0) -> Any:
    return await asyncio.wait_for(asyncio.shield(sandbox.ended), within)


# -- it lasts -----------------------------------------------------------------------------------


async def test_a_workspace_outlives_its_sandboxes(
    make: MakeSandbox, engines: Engines, workspace: str
) -> None:
    """B6."""
    first = await make()
    assert first.volume == first.name == workspace_name("sbx-", OWNER, workspace)
    assert (await sh(first, "echo kept > /workspace/a; mkdir /workspace/d")).code == 0
    await first.destroy()
    assert engines.api.inspect(first.id) is None
    second = await make()
    assert second.id != first.id
    assert (await sh(second, "cat /workspace/a; ls /workspace")).out == "kept\na\nd\n"


async def test_keys_that_look_alike_are_other_workspaces(
    make_sandbox: MakeSandbox, busybox_image: str, workspace: str, engines: Engines
) -> None:
    """K5, TEN-01."""
    try:
        for key in (workspace, workspace.upper(), workspace + "/"):
            sandbox = await make_sandbox(
                image=busybox_image, durability="persistent", workspace=key
            )
            assert (await sh(sandbox, "ls /workspace; touch /workspace/mine")).out == ""
            await sandbox.destroy()
    finally:
        for key in (workspace.upper(), workspace + "/"):
            engines.api.remove_volume(workspace_name("sbx-", OWNER, key))


async def test_its_volume_says_what_it_is(
    make: MakeSandbox, engines: Engines, workspace: str, busybox_image: str
) -> None:
    """Decision 8."""
    sandbox = await make()
    (volume,) = engines.api.volumes(f"{labels.WORKSPACE}={labels.key_text(workspace)}")
    told = volume["Labels"]
    assert volume["Name"] == sandbox.volume
    assert told[labels.OWNER] == OWNER
    assert told[labels.IMAGE] == busybox_image
    assert told[labels.FORMAT] == FORMAT
    assert labels.workspace_key(told) == workspace


async def test_a_volume_that_somebody_planted_is_not_used(
    make: MakeSandbox, engines: Engines, workspace: str, run_labels: dict[str, str]
) -> None:
    """TEN-05: its name alone proves nothing, and a volume can be a folder of the machine."""
    name = workspace_name("sbx-", OWNER, workspace)
    ours = {
        labels.VERSION: "0.1.0",
        labels.OWNER: OWNER,
        labels.FORMAT: FORMAT,
        labels.DURABILITY: "persistent",
        labels.WORKSPACE: labels.key_text(workspace),
    }
    bind = {"type": "none", "o": "bind", "device": "/etc"}
    for planted in (
        {"Labels": run_labels},
        {"Labels": {**ours, labels.OWNER: "mallory"}},
        {"Labels": ours, "DriverOpts": bind},
    ):
        engines.api.request("POST", "/volumes/create", body={"Name": name, **planted})
        try:
            with pytest.raises(SandboxConflictError, match=name):
                await make()
            assert containers_of(engines, workspace) == []
        finally:
            engines.api.remove_volume(name)


async def test_a_container_that_somebody_planted_is_not_shared(
    make: MakeSandbox,
    engines: Engines,
    engine: Engine,
    workspace: str,
    busybox_image: str,
    run_labels: dict[str, str],
) -> None:
    """TEN-13: neither one without our labels, nor one that has them and is weaker."""
    name = workspace_name("sbx-", OWNER, workspace)
    body = {"Image": busybox_image, "Cmd": ["sleep", "60"], "Labels": run_labels}
    created = await engine.create_container(name, body)
    try:
        with pytest.raises(SandboxConflictError, match=name):
            await make()
    finally:
        engines.api.remove(created.id)
    real = await make()
    inspected = await engine.inspect_container(real.id)
    await real.destroy()
    weaker = {**inspected["Config"], "HostConfig": {**inspected["HostConfig"], "CapDrop": []}}
    created = await engine.create_container(name, weaker)
    try:
        await engine.start_container(created.id)
        with pytest.raises(Exception, match="CapDrop"):
            await make()
        assert engines.api.inspect(created.id) is not None
    finally:
        engines.api.remove(created.id)


# -- one for all --------------------------------------------------------------------------------


async def test_creators_of_one_key_get_one_sandbox(
    make: MakeSandbox, engines: Engines, workspace: str
) -> None:
    """B7: at once, and one after the other."""
    sandboxes = await asyncio.gather(*(make() for _ in range(6)))
    assert len({sandbox.id for sandbox in sandboxes}) == 1
    sandboxes.append(await make())
    assert containers_of(engines, workspace) == [sandboxes[0].id]
    for number, sandbox in enumerate(sandboxes):
        assert (await sh(sandbox, f"echo {number} >> /workspace/log")).code == 0
    assert (await sh(sandboxes[3], "wc -l < /workspace/log")).out == "7\n"


async def test_creators_on_two_machines_get_one_sandbox(
    make: MakeSandbox,
    other_engine: Engine,
    workspace: str,
    busybox_image: str,
    run_labels: dict[str, str],
) -> None:
    """B7: by two ways to the engine, and with other variables and labels."""
    spec = SandboxSpec(
        image=busybox_image,
        durability="persistent",
        workspace=workspace,
        lease_ttl=3,
        labels={"from": "there"},
        environment={"A": "there"},
    )
    here, there = await asyncio.gather(
        make(labels={"from": "here"}, environment={"A": "here"}),
        LiveSandbox.create(other_engine, spec, owner=OWNER, extra_labels=marks(run_labels)),
    )
    try:
        assert here.id == there.id
        assert (await sh(here, "echo $A")).out == "here\n"
        assert (await sh(there, "echo $A")).out == "there\n"
    finally:
        await there.close()
    assert (await sh(here, "echo alive")).out == "alive\n"


async def test_creators_in_two_processes_get_one_sandbox(
    start_owner: StartOwner, engines: Engines, workspace: str, busybox_image: str
) -> None:
    """B7, TEN-07: and it lives until the last of them is gone, however that goes."""
    settings = {"image": busybox_image, "durability": "persistent", "workspace": workspace,
                "lease_ttl": 3}  # fmt: skip
    one, other = await asyncio.gather(start_owner(**settings), start_owner(**settings))
    assert one.id == other.id
    await one.gone()
    with pytest.raises(AssertionError):
        await asyncio.to_thread(wait_until, lambda: containers_of(engines, workspace) == [], 6)
    await other.gone()
    await asyncio.to_thread(wait_until, lambda: containers_of(engines, workspace) == [], 15)


async def test_who_closes_it_leaves_it_to_the_others(make: MakeSandbox, engines: Engines) -> None:
    """B7: the last one ends it."""
    one, other = await make(), await make()
    await one.close()
    assert (await one.ended).kind == "removed"
    await one.destroy()  # it is no longer this one's to destroy
    assert (await sh(other, "echo alive")).out == "alive\n"
    await other.close()
    assert engines.api.inspect(other.id) is None


async def test_who_destroys_it_ends_it_for_all(make: MakeSandbox) -> None:
    one, other = await make(), await make()
    await one.destroy()
    assert (await end_of(other)).kind == "removed"
    with pytest.raises(SandboxGoneError):
        await other.exec(["true"], user=CODE_USER)


async def test_asking_for_other_settings_than_those_in_use_is_refused_by_name(
    make: MakeSandbox, engines: Engines, workspace: str
) -> None:
    """B7: never silently something else than what was asked for."""
    first = await make(pids_limit=64)
    for setting, value in (("pids_limit", 65), ("lease_ttl", 4), ("idle_ttl", 60)):
        with pytest.raises(SandboxConflictError, match=setting):
            await make(**{"pids_limit": 64, setting: value})
    assert containers_of(engines, workspace) == [first.id]
    assert (await sh(first, "echo alive")).out == "alive\n"


async def test_a_creator_that_was_killed_midway_does_not_block_the_key(
    make: MakeSandbox,
    engine: Engine,
    engines: Engines,
    workspace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B7: a container that was made and never started is waited for, and then removed."""
    first = await make()
    inspected = await engine.inspect_container(first.id)
    await first.destroy()
    body = {**inspected["Config"], "HostConfig": inspected["HostConfig"]}
    created = await engine.create_container(first.name, body)
    monkeypatch.setattr("sandbox_kernel.sandbox.live._ABANDONED", 1.0)
    second = await make()
    assert second.id not in {first.id, created.id}
    assert containers_of(engines, workspace) == [second.id]


async def test_creators_and_removers_at_the_same_time_end_in_one_state(
    make: MakeSandbox, engines: Engines, workspace: str
) -> None:
    """B7, CON-04: whoever gets a sandbox gets one that works, or it was removed by another."""

    async def cycle(number: int) -> None:
        for turn in range(3):
            sandbox = await make()
            try:
                works = (await sh(sandbox, "touch /workspace/x; echo up")).out == "up\n"
            except SandboxGoneError:
                works = False
            assert works or (await end_of(sandbox)).kind == "removed"
            await (sandbox.destroy() if (number + turn) % 3 == 0 else sandbox.close())

    await asyncio.gather(*(cycle(number) for number in range(4)))
    await asyncio.to_thread(wait_until, lambda: containers_of(engines, workspace) == [], 15)


@pytest.mark.parametrize("ended", [True, False])
async def test_what_ends_just_before_or_while_it_is_joined_is_gone_at_once(
    engine: Engine, engines: Engines, busybox_image: str, run_labels: dict[str, str], ended: bool
) -> None:
    """B7: an engine attaches to what has ended too, and then waits for it to be started.

    Containers that do not remove themselves stand for the moment in which one is not removed yet.
    """
    body = {
        "Image": busybox_image,
        "Cmd": ["sleep", "0" if ended else "2"],
        "OpenStdin": True,
        "Labels": run_labels,
    }
    created = await engine.create_container(None, body)
    try:
        await engine.start_container(created.id)

        def over() -> bool:
            return not (engines.api.inspect(created.id) or {})["State"]["Running"]

        if ended:
            await asyncio.to_thread(wait_until, over)
        spec = SandboxSpec(image=busybox_image)
        limits = resolve_limits(spec, await engine.info())
        hold = Hold(engine, created.id, spec, limits, lambda: False)
        try:
            with pytest.raises(SandboxGoneError):
                await asyncio.wait_for(hold.begin(start=False, alone=False), 12)
        finally:
            await hold.release()
    finally:
        await engine.remove_container(created.id)


@pytest.mark.parametrize("share", range(8))
async def test_a_creation_that_is_cancelled_at_any_time_leaves_no_container(
    make: MakeSandbox,
    engine: Engine,
    engines: Engines,
    workspace: str,
    busybox_image: str,
    run_labels: dict[str, str],
    share: int,
) -> None:
    """K8, CLI-04: neither its own nor, when it is one of several, that of another one."""
    settings: dict[str, Any] = {"durability": "persistent", "workspace": workspace, "lease_ttl": 3}
    spec = SandboxSpec(image=busybox_image, **settings)
    task = asyncio.ensure_future(
        LiveSandbox.create(engine, spec, owner=OWNER, extra_labels=marks(run_labels))
    )
    await asyncio.sleep(0.05 * share)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=30)
    assert done
    if not task.cancelled():
        await task.result().close()
    assert containers_of(engines, workspace) == []
    other = await make()
    task = asyncio.ensure_future(
        LiveSandbox.create(engine, spec, owner=OWNER, extra_labels=marks(run_labels))
    )
    await asyncio.sleep(0.005 * share)
    task.cancel()
    await asyncio.wait({task}, timeout=30)
    if not task.cancelled():
        await task.result().close()
    assert containers_of(engines, workspace) == [other.id]
    assert (await sh(other, "echo alive")).out == "alive\n"


# -- found again --------------------------------------------------------------------------------


async def test_a_sandbox_outlives_its_owner_and_is_connected_to(
    start_owner: StartOwner, engine: Engine, engines: Engines, busybox_image: str
) -> None:
    """B9, decision 7, K6: memory and files are as they were."""
    caller = {"course": "physics ☢", "n": ""}
    owner = await start_owner(
        image=busybox_image, lease_ttl=3, resumable=30, labels=caller, max_lifetime=3600
    )
    await owner.gone()
    (info,) = [i for i in await list_sandboxes(engine, OWNER) if i.id == owner.id]
    assert (info.labels, info.state, info.durability) == (caller, "running", "ephemeral")
    assert info.ends is not None
    assert (info.ends - info.created).total_seconds() == 3600
    # The one before is not known to be dead until its ttl is over.
    sandbox = await LiveSandbox.connect(engine, owner.id[:12], owner=OWNER, take_over=True)
    try:
        assert dict(sandbox.spec.labels) == caller
        assert sandbox.spec.max_lifetime == 3600
        assert sandbox.expires_at is not None
        assert (await sh(sandbox, "echo alive")).out == "alive\n"
        with pytest.raises(TimeoutError):
            await end_of(sandbox, 5)
    finally:
        await sandbox.destroy()
    assert engines.api.inspect(owner.id) is None
    assert owner.volume not in {v["Name"] for v in engines.api.volumes()}


async def test_a_sandbox_that_nobody_connects_to_ends_after_its_grace_time(
    start_owner: StartOwner, engines: Engines, busybox_image: str
) -> None:
    """B13."""
    owner = await start_owner(image=busybox_image, lease_ttl=2, resumable=2)
    await owner.gone()
    assert engines.api.inspect(owner.id) is not None
    await asyncio.to_thread(wait_until, lambda: engines.api.inspect(owner.id) is None, 15)


async def test_a_sandbox_that_was_detached_from_waits_for_its_owner(
    make_sandbox: MakeSandbox, engine: Engine, engines: Engines, busybox_image: str
) -> None:
    first = await make_sandbox(image=busybox_image, lease_ttl=3, resumable=60)
    await sh(first, "echo here > /home/sbx/note")
    await first.detach()
    await first.destroy()  # let go is let go
    second = await LiveSandbox.connect(engine, first.name, owner=OWNER)
    assert (await sh(second, "cat /home/sbx/note")).out == "here\n"
    await second.close()
    assert engines.api.inspect(first.id) is None


async def test_who_takes_a_sandbox_over_has_it_alone(
    make_sandbox: MakeSandbox, engine: Engine, other_engine: Engine, busybox_image: str
) -> None:
    """Decision 7: exactly one owner at a time, and the one before is told."""
    first = await make_sandbox(image=busybox_image, lease_ttl=3, resumable=60)
    with pytest.raises(SandboxConflictError, match="alone"):
        await LiveSandbox.connect(engine, first.id, owner=OWNER)
    second = await LiveSandbox.connect(other_engine, first.id, owner=OWNER, take_over=True)
    assert (await end_of(first)).kind == "taken-over"
    await first.destroy()
    third = await LiveSandbox.connect(engine, first.id, owner=OWNER, take_over=True)
    assert (await end_of(second)).kind == "taken-over"
    await second.close()
    with pytest.raises(TimeoutError):
        await end_of(third, 4)
    assert (await sh(third, "echo alive")).out == "alive\n"
    await third.destroy()


async def test_of_many_who_take_it_over_at_once_one_has_it(
    make_sandbox: MakeSandbox, engine: Engine, busybox_image: str
) -> None:
    first = await make_sandbox(image=busybox_image, lease_ttl=3, resumable=60)
    connecting = (
        LiveSandbox.connect(engine, first.id, owner=OWNER, take_over=True) for _ in range(5)
    )
    came = await asyncio.gather(*connecting, return_exceptions=True)
    await end_of(first)
    takers = [taker for taker in came if isinstance(taker, LiveSandbox)]
    assert {type(error) for error in came if error not in takers} <= {SandboxConflictError}
    done, having = await asyncio.wait({t.ended for t in takers}, timeout=5)
    assert len(having) == 1
    assert {future.result().kind for future in done} <= {"taken-over"}
    for taker in takers:
        await taker.close()


async def test_sandboxes_of_others_are_not_found(
    make: MakeSandbox, engine: Engine, workspace: str
) -> None:
    """TEN-14, peers 5."""
    sandbox = await make()
    for which in (sandbox.id, sandbox.id[:12], sandbox.name, workspace):
        with pytest.raises(SandboxGoneError):
            await LiveSandbox.connect(engine, which, owner="mallory")
    for which in (sandbox.id[:11], "", sandbox.name[:-1], "*"):
        with pytest.raises(SandboxGoneError):
            await LiveSandbox.connect(engine, which, owner=OWNER)
    assert sandbox.id not in {info.id for info in await list_sandboxes(engine, "mallory")}
    found = await LiveSandbox.connect(engine, workspace, owner=OWNER)
    assert found.id == sandbox.id
    await found.close()


async def test_a_sandbox_that_ends_with_its_owner_cannot_be_connected_to(
    make_sandbox: MakeSandbox, engine: Engine, busybox_image: str
) -> None:
    """The stream of a second one would end it, were it dropped."""
    sandbox = await make_sandbox(image=busybox_image)
    with pytest.raises(SandboxConflictError, match="resumable"):
        await LiveSandbox.connect(engine, sandbox.id, owner=OWNER, take_over=True)
    with pytest.raises(SandboxSpecRejectedError, match="resumable"):
        await sandbox.detach()
    assert (await sh(sandbox, "echo alive")).out == "alive\n"


# -- whose files --------------------------------------------------------------------------------


@pytest.fixture
def image_with(imported_image: Callable[..., str]) -> Callable[[str, int, bool], str]:
    """An image whose /workspace is missing, or has another owner or a file."""

    def provide(name: str, owner: int, occupied: bool) -> str:
        archive = io.BytesIO()
        with (
            tarfile.open(fileobj=io.BytesIO(busybox_archive())) as source,
            tarfile.open(fileobj=archive, mode="w") as tar,
        ):
            for entry in source:
                if entry.name == "workspace" and owner < 0:
                    continue
                if entry.name == "workspace":
                    entry.uid = entry.gid = owner
                tar.addfile(entry, source.extractfile(entry) if entry.isreg() else None)
            if occupied:
                tar.addfile(tarfile.TarInfo("workspace/readme"))
        return imported_image(f"ws-{name}", archive.getvalue(), ["ENV PATH=/bin"])

    return provide


async def test_an_image_without_a_workspace_gives_one_that_the_code_can_write_to(
    make: MakeSandbox, make_sandbox: MakeSandbox, image_with: Any, engines: Engines
) -> None:
    """B6, TEN-10: persistent and ephemeral; the helper is gone."""
    for name, owner in (("missing", -1), ("roots", 0)):
        image = image_with(name, owner, False)
        sandbox = await make_sandbox(image=image)
        assert (await sh(sandbox, "echo x > /workspace/f; ls -ldn /workspace")).out.split()[
            2:4
        ] == [
            "10001",
            "10001",
        ]
    sandbox = await make(image=image)
    assert (await sh(sandbox, "touch /workspace/f")).code == 0
    await sandbox.destroy()
    again = await make(image=image)
    assert (await sh(again, "ls /workspace")).out == "f\n"


@pytest.mark.parametrize(
    ("name", "owner", "occupied"), [("others", 4711, False), ("full", 0, True)]
)
async def test_a_workspace_that_is_anothers_is_refused_and_left_as_it_is(
    make: MakeSandbox,
    make_sandbox: MakeSandbox,
    image_with: Any,
    engines: Engines,
    workspace: str,
    name: str,
    owner: int,
    occupied: bool,
) -> None:
    """TEN-10: with the uid, the path and what to do."""
    image = image_with(name, owner, occupied)
    for creating in (make(image=image), make_sandbox(image=image)):
        with pytest.raises(SandboxStartError, match=f"/workspace.*uid {owner}.*drwx") as caught:
            await creating
        assert "chown" in str(caught.value) or "Build the image" in str(caught.value)
    assert containers_of(engines, workspace) == []


# -- what the engine has to have ----------------------------------------------------------------


async def test_a_disk_limit_that_the_engine_cannot_enforce_is_refused(
    make: MakeSandbox, make_sandbox: MakeSandbox, engines: Engines, workspace: str, engine: Engine
) -> None:
    """B5: with the reason, and nothing is made; the test engine's disk has no quotas."""
    for creating in (make(disk_limit=1 << 30), make_sandbox(disk_limit=1 << 30)):
        with pytest.raises(SandboxSpecRejectedError, match=r"disk_limit.*pquota"):
            await creating
    assert containers_of(engines, workspace) == []
    assert engines.api.volumes(f"{labels.WORKSPACE}={labels.key_text(workspace)}") == []


async def test_data_sets_are_there_to_be_read_only(
    make_sandbox: MakeSandbox,
    engine: Engine,
    engines: Engines,
    busybox_image: str,
    run_labels: dict[str, str],
) -> None:
    """B16: and one that is missing is not made up by the engine."""
    name = f"data-{uuid.uuid4().hex}"
    with pytest.raises(SandboxSpecRejectedError, match=rf"data_sets.*{name}.*no volume"):
        await make_sandbox(image=busybox_image, data_sets={"iris": name})
    assert await engine.inspect_volume(name) is None
    engines.api.request("POST", "/volumes/create", body={"Name": name, "Labels": run_labels})
    try:
        body = {
            "Image": busybox_image,
            "Cmd": ["sh", "-c", "echo petal > /d/f; chmod 666 /d/f; chmod 777 /d"],
            "HostConfig": {"Mounts": [{"Type": "volume", "Source": name, "Target": "/d"}]},
        }
        created = await engine.create_container(None, body)
        await engine.start_container(created.id)
        await asyncio.to_thread(
            wait_until,
            lambda: (
                (engines.api.inspect(created.id) or {})["State"]["ExitCode"] == 0
                and not (engines.api.inspect(created.id) or {})["State"]["Running"]
            ),
        )
        engines.api.remove(created.id)
        sandbox = await make_sandbox(image=busybox_image, data_sets={"iris": name})
        assert (await sh(sandbox, "cat /data/iris/f")).out == "petal\n"
        for change in ("echo x > /data/iris/f", "rm /data/iris/f", "touch /data/iris/g"):
            done = await sh(sandbox, change)
            assert done.code != 0
            assert "Read-only" in done.err
        await sandbox.destroy()
        assert name in {v["Name"] for v in engines.api.volumes()}
    finally:
        engines.api.remove_volume(name)


async def test_devices_that_the_engine_has_not_are_refused(
    make_sandbox: MakeSandbox, busybox_image: str
) -> None:
    """B15."""
    for device in ("gpus=all", "gpus=2", "vendor.example/gpu=0"):
        with pytest.raises(SandboxSpecRejectedError, match="devices"):
            await make_sandbox(image=busybox_image, devices=[device])


async def test_an_isolation_that_the_engine_does_not_give_is_refused(
    make_sandbox: MakeSandbox, busybox_image: str
) -> None:
    """B14."""
    with pytest.raises(SandboxSpecRejectedError, match=r"isolation.*runc.*gVisor"):
        await make_sandbox(image=busybox_image, isolation="vm")
    with pytest.raises(SandboxSpecRejectedError, match=r"isolation.*runc"):
        await make_sandbox(image=busybox_image, isolation="vm", runtime="runc")
