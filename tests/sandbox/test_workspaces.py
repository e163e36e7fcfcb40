"""Workspaces while no sandbox runs on them (B6, F4; TAR, TEN)."""

from __future__ import annotations

import asyncio
import contextlib
import io
import tarfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxEngineError,
    SandboxError,
    SandboxFileNotFoundError,
    SandboxImageMissingError,
    SandboxSpecRejectedError,
    SandboxUnknownOutcomeError,
)
from sandbox_kernel.sandbox import labels
from sandbox_kernel.sandbox.live import LiveSandbox
from sandbox_kernel.sandbox.spec import SandboxSpec
from sandbox_kernel.sandbox.workspace import workspace_name
from sandbox_kernel.sandbox.workspaces import Workspaces
from tests.engines import Engines
from tests.sandbox.conftest import marks, sh


@pytest.fixture
def owner(engines: Engines) -> Iterator[str]:
    """Somebody of whom nobody else has workspaces; at the end all of them are removed."""
    name = f"owner-{uuid.uuid4().hex}"
    yield name
    assert engines.api.containers(f"{labels.OWNER}={name}") == []
    for volume in engines.api.volumes(f"{labels.OWNER}={name}"):
        engines.api.remove_volume(volume["Name"])


@pytest.fixture
def extra(run_labels: dict[str, str]) -> dict[str, str]:
    return marks(run_labels)


@pytest.fixture
def workspaces(engine: Engine, owner: str, extra: dict[str, str], busybox_image: str) -> Workspaces:
    return Workspaces(engine, owner, image=busybox_image, extra_labels=extra)


class Maker:
    """Makes sandboxes of workspaces, and runs shell text in them."""

    def __init__(self, engine: Engine, owner: str, image: str, extra: dict[str, str]) -> None:
        self._engine, self._owner, self._image, self._extra = engine, owner, image, extra

    async def sandbox(self, key: str, **settings: Any) -> LiveSandbox:
        spec = SandboxSpec(
            **{"image": self._image, "durability": "persistent", "workspace": key, **settings}
        )
        return await LiveSandbox.create(
            self._engine, spec, owner=self._owner, extra_labels=self._extra
        )

    async def run(self, key: str, text: str, **settings: Any) -> str:
        sandbox = await self.sandbox(key, **settings)
        try:
            done = await sh(sandbox, text, cwd="/workspace")
        finally:
            await sandbox.close()
        assert done.code == 0, done
        return done.out


@pytest.fixture
def maker(engine: Engine, owner: str, busybox_image: str, extra: dict[str, str]) -> Maker:
    return Maker(engine, owner, busybox_image, extra)


async def exported(workspaces: Workspaces, key: str, **options: Any) -> tarfile.TarFile:
    data = io.BytesIO()
    async with workspaces.export(key, **options) as pieces:
        async for piece in pieces:
            data.write(piece)
    data.seek(0)
    return tarfile.open(fileobj=data)


async def pieces_of(data: bytes, size: int = 65536) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def archive(*entries: tuple[str, dict[str, Any], bytes]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, fields, content in entries:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            for field, value in fields.items():
                setattr(entry, field, value)
            tar.addfile(entry, io.BytesIO(content))
    return data.getvalue()


# -- list, size, remove -------------------------------------------------------------------------


async def test_workspaces_are_listed_with_who_uses_them(
    workspaces: Workspaces, maker: Maker, engine: Engine
) -> None:
    """B6, TEN-14."""
    assert await workspaces.list() == []
    await maker.run("b ☢", "touch x")
    using = await maker.sandbox("a")
    try:
        a, b = await workspaces.list()
        assert (a.workspace.key, b.workspace.key) == ("a", "b ☢")
        assert b.users == ()
        assert [user.container_id for user in a.users] == [using.id]
        assert await Workspaces(engine, "somebody else").list() == []
        with pytest.raises(SandboxFileNotFoundError):
            await Workspaces(engine, "somebody else").find("a")
    finally:
        await using.destroy()


async def test_a_workspace_in_use_is_not_removed_and_the_user_is_named(
    workspaces: Workspaces, maker: Maker, engines: Engines, owner: str
) -> None:
    """B6, ENG-11: also when it is no sandbox of ours that uses it, and when it is stopped."""
    using = await maker.sandbox("a")
    try:
        assert (await sh(using, "echo kept > /workspace/f")).code == 0
        with pytest.raises(SandboxConflictError, match=f"{using.name} .*{owner}"):
            await workspaces.remove("a")
    finally:
        await using.destroy()
    body = {"Image": using.spec.image, "Cmd": ["true"],
            "HostConfig": {"Mounts": [
                {"Type": "volume", "Source": using.volume, "Target": "/w"}]}}  # fmt: skip
    foreign = f"foreign-{uuid.uuid4().hex}"
    engines.api.request("POST", "/containers/create", {"name": foreign}, body)
    try:
        with pytest.raises(SandboxConflictError, match=foreign):
            await workspaces.remove("a")
    finally:
        engines.api.remove(foreign)
    assert await maker.run("a", "cat f") == "kept\n"
    await workspaces.remove("a")
    assert using.volume not in {v["Name"] for v in engines.api.volumes()}
    with pytest.raises(SandboxFileNotFoundError, match="'a'"):
        await workspaces.remove("a")
    assert await maker.run("a", "ls") == ""


async def test_a_volume_that_is_something_else_is_not_removed(
    workspaces: Workspaces, engines: Engines, owner: str, run_labels: dict[str, str]
) -> None:
    """TEN-05."""
    name = workspace_name("sbx-", owner, "a")
    engines.api.request("POST", "/volumes/create", body={"Name": name, "Labels": run_labels})
    try:
        with pytest.raises(SandboxConflictError, match=name):
            await workspaces.remove("a")
        assert name in {v["Name"] for v in engines.api.volumes()}
        assert await workspaces.list() == []
    finally:
        engines.api.remove_volume(name)


async def test_the_size_of_a_workspace_is_told_also_while_it_is_in_use(
    workspaces: Workspaces, maker: Maker
) -> None:
    using = await maker.sandbox("a")
    try:
        before = await workspaces.size("a")
        text = "cd /workspace; head -c 3000000 /dev/zero > 'a\nb'; mkdir -p d/e; ln -s /etc l"
        assert (await sh(using, text)).code == 0
        after = await workspaces.size("a")
    finally:
        await using.destroy()
    assert before.entries == 0
    assert after.entries == 4
    assert 3_000_000 <= after.size - before.size < 3_200_000


@pytest.mark.parametrize("key", ["", "a" * 5000, "\udc80"])
async def test_what_can_be_no_key_is_refused(workspaces: Workspaces, key: str) -> None:
    for asking in (workspaces.remove(key), workspaces.size(key), workspaces.clone(key, "b")):
        with pytest.raises(SandboxSpecRejectedError, match="workspace"):
            await asking


async def test_an_image_that_is_gone_is_named_with_what_to_do(
    engine: Engine, owner: str, maker: Maker
) -> None:
    await maker.run("a", "true")
    with pytest.raises(SandboxImageMissingError, match="look into it"):
        await Workspaces(engine, owner, image="sandbox-kernel-test/none:none").size("a")


# -- export, import, clone ----------------------------------------------------------------------

FILL = """
echo one > one; mkdir -p d/e; echo two > 'd/e/two ☢'; ln -s one link; ln -s /etc/passwd out
ln one hard; head -c 5000000 /dev/urandom > big; mkfifo pipe; chmod 600 one
"""


async def test_what_was_exported_can_be_imported_elsewhere(
    workspaces: Workspaces, maker: Maker
) -> None:
    """F4: everything in it, and byte for byte."""
    check = "find . | sort; cat one 'd/e/two ☢'; readlink link out; md5sum big hard; ls -l one"
    await maker.run("a", FILL)
    before = await maker.run("a", check)
    data = io.BytesIO()
    async with workspaces.export("a") as pieces:
        async for piece in pieces:
            data.write(piece)
    size = await workspaces.import_("b", pieces_of(data.getvalue()))
    assert size.entries == 9
    after = await maker.run("b", check)
    assert [line.split()[:1] for line in after.splitlines()] == [
        line.split()[:1] for line in before.splitlines()
    ]
    assert after.count("one") == before.count("one")


async def test_an_archive_is_whole_for_a_reader_that_takes_its_time(
    workspaces: Workspaces, maker: Maker
) -> None:
    """Engines drop the last of the output of a process that has ended, when nobody reads."""
    await maker.run("a", "head -c 3000000 /dev/urandom > big; md5sum big > sum; sync")
    data = bytearray()
    async with workspaces.export("a") as pieces:
        async for piece in pieces:
            if not data:
                await asyncio.sleep(4)
            data += piece
    with tarfile.open(fileobj=io.BytesIO(bytes(data))) as tar:
        assert {entry.name for entry in tar} == {".", "./big", "./sum"}
    assert bytes(data[-1024:]) == bytes(1024)


async def test_an_export_can_be_given_up(workspaces: Workspaces, maker: Maker) -> None:
    """Nothing is left running; and a file with holes does not fill the disk of who exports."""
    await maker.run("a", "head -c 2000000 /dev/urandom > big; truncate -s 1G holes")
    async with workspaces.export("a") as pieces:
        async for _ in pieces:
            break
    with pytest.raises(SandboxSpecRejectedError, match="limit"):
        await exported(workspaces, "a", limit=1_000_000)


async def test_an_export_whose_sandbox_goes_away_says_that_it_is_not_whole(
    workspaces: Workspaces, maker: Maker, engines: Engines, owner: str
) -> None:
    await maker.run("a", "head -c 20000000 /dev/urandom > big")

    async def read() -> None:
        async with workspaces.export("a") as pieces:
            removed = False
            async for _ in pieces:
                if not removed:
                    removed = True
                    (helper,) = engines.api.containers(f"{labels.OWNER}={owner}")
                    await asyncio.to_thread(engines.api.remove, helper["Id"])

    with pytest.raises(SandboxUnknownOutcomeError):
        await read()


async def test_an_import_takes_nothing_over_that_is_there(
    workspaces: Workspaces, maker: Maker
) -> None:
    await maker.run("a", "echo mine > .hidden")
    data = archive(("f", {}, b"x"))
    with pytest.raises(SandboxConflictError, match="something in it"):
        await workspaces.import_("a", pieces_of(data))
    using = await maker.sandbox("b")
    try:
        with pytest.raises(SandboxConflictError, match=using.name):
            await workspaces.import_("b", pieces_of(data))
    finally:
        await using.destroy()
    assert await maker.run("a", "cat .hidden; ls") == "mine\n"


async def test_a_hostile_archive_reaches_nothing_but_the_workspace(
    workspaces: Workspaces, maker: Maker, engines: Engines, owner: str
) -> None:
    """TAR: links and absolute names lead to what the code's uid could write to anyway."""
    hostile = archive(
        ("d", {"type": tarfile.SYMTYPE, "linkname": "/etc"}, b""),
        ("d/planted", {}, b"x"),
    )
    with pytest.raises(SandboxError):
        await workspaces.import_("a", pieces_of(hostile))
    for name in ("../../etc/planted", "/etc/planted"):
        try:
            await workspaces.import_("b", pieces_of(archive((name, {}, b"x"))))
        except SandboxEngineError:
            continue
        assert "planted" in await maker.run("b", "find .")
        await workspaces.remove("b")
    device = ("null", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}, b"")
    # Some tars fail, others leave it out.
    with contextlib.suppress(SandboxEngineError):
        await workspaces.import_("b", pieces_of(archive(device)))
        assert await maker.run("b", "find . -type c -o -type b") == ""
    # Of what failed nothing is left, not even the workspace.
    assert {info.workspace.key for info in await workspaces.list()} <= {"b"}


async def test_what_is_no_archive_is_refused_and_nothing_is_left(
    workspaces: Workspaces, maker: Maker
) -> None:
    whole = archive(("f", {}, b"x" * 100_000))
    for data in (b"no archive at all" * 1000, whole[:50_000]):
        with pytest.raises(SandboxEngineError, match="filled"):
            await workspaces.import_("a", pieces_of(data))
        assert await workspaces.list() == []
    await maker.run("old", "true")
    with pytest.raises(SandboxEngineError):
        await workspaces.import_("old", pieces_of(whole[:50_000]))
    assert await maker.run("old", "ls -A") == ""


async def test_a_workspace_that_another_import_was_quicker_to_fill_stays(
    workspaces: Workspaces, maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B6, B7: whose volume it is says the volume, not what was seen a moment before."""
    data = archive(("mine", {}, b"first"))
    create = Engine.create_volume

    async def late(self: Engine, *given: Any) -> dict[str, Any]:
        monkeypatch.undo()
        await workspaces.import_("raced", pieces_of(data))
        return await create(self, *given)

    monkeypatch.setattr(Engine, "create_volume", late)
    with pytest.raises(SandboxConflictError, match="something in it"):
        await workspaces.import_("raced", pieces_of(data))
    assert await maker.run("raced", "cat mine") == "first"


async def test_an_import_that_fails_on_this_side_leaves_nothing(
    workspaces: Workspaces, engines: Engines, owner: str
) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield archive(("f", {}, b"x" * 100_000))[:4096]
        raise OSError("the disk that it is read from has failed")

    with pytest.raises(OSError, match="has failed"):
        await workspaces.import_("a", broken())
    assert await workspaces.list() == []


async def test_a_clone_is_a_workspace_of_its_own(workspaces: Workspaces, maker: Maker) -> None:
    """Also of one in use."""
    await maker.run("a", FILL)
    using = await maker.sandbox("a")
    try:
        size = await workspaces.clone("a", "b")
    finally:
        await using.destroy()
    assert size.entries == 9
    assert await maker.run("b", "cat one; echo changed > one; readlink out") == "one\n/etc/passwd\n"
    assert await maker.run("a", "cat one") == "one\n"
    with pytest.raises(SandboxConflictError, match="something in it"):
        await workspaces.clone("a", "b")
    with pytest.raises(SandboxFileNotFoundError):
        await workspaces.clone("none", "c")
    with pytest.raises(SandboxSpecRejectedError):
        await workspaces.clone("a", "a")


async def test_files_are_listed_and_fetched_while_no_sandbox_runs(
    engine: Engine,
    owner: str,
    extra: dict[str, str],
    python_image: str,
    tmp_path: Path,
) -> None:
    """F4."""
    maker = Maker(engine, owner, python_image, extra)
    await maker.run("a", "mkdir d; echo two > d/two; echo one > one")
    async with Workspaces(engine, owner, extra_labels=extra).files("a") as files:
        listed = await files.list("", recursive=True)
        assert {entry.path for entry in listed} == {
            "/data/workspace/d", "/data/workspace/d/two", "/data/workspace/one"
        }  # fmt: skip
        await files.get("d", tmp_path / "d")
        assert (tmp_path / "d" / "two").read_text() == "two\n"
        with pytest.raises(SandboxError):
            await files.put(b"x", "new")
    assert await maker.run("a", "ls") == "d\none\n"
