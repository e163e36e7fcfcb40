"""Files in and out of real sandboxes, by each way to the engine (F1, F2, F3)."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pathspec
import pytest

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxDiskFullError,
    SandboxFileNotFoundError,
    SandboxImageUnsuitableError,
    SandboxSpecRejectedError,
)
from sandbox_kernel.process.files import Files, TransferLimits
from sandbox_kernel.sandbox.live import CODE_USER, LiveSandbox
from tests.process.conftest import MakeSandbox, sh

NOBODY = Files(cast(Engine, None), "", user=CODE_USER)
"""Without an engine, so that whatever it refuses, it refuses before anything runs."""


@pytest.fixture
def files(sandbox: LiveSandbox) -> Files:
    return Files(sandbox.engine, sandbox.id, user=CODE_USER)


@pytest.fixture(scope="session")
def output_image(derived_image: Callable[[str, str], str]) -> str:
    """An image whose sandboxes have a place for artifacts."""
    return derived_image("output", "VOLUME /output")


def make(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path)
    return root


def content(root: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
    }


async def everything_in(sandbox: LiveSandbox, folder: str = "/workspace") -> list[str]:
    """Return all that is in a folder of the sandbox, hidden or not."""
    found = await sh(sandbox, 'cd "$1" && find . -mindepth 1', folder)
    return sorted(found.stdout_text.split())


async def test_a_file_goes_in_and_comes_out_as_it_was(
    sandbox: LiveSandbox, files: Files, tmp_path: Path
) -> None:
    """F1: a path, bytes and a stream; owned by the user of the code, with mode and time."""
    source = tmp_path / "script.sh"
    source.write_bytes(os.urandom(3_000_000))
    source.chmod(0o4777)
    os.utime(source, ns=(0, 1_234_567_890_123_456_789))
    put = await files.put(source, "deep/er/script.sh")
    assert (put.path, put.files, put.size) == ("/workspace/deep/er/script.sh", 1, 3_000_000)
    assert (put.skipped, put.changed) == ((), ())
    shown = await sh(sandbox, "stat -c '%u:%g %a %Y' deep/er/script.sh", cwd="/workspace")
    assert shown.stdout_text.split() == ["10001:10001", "755", "1234567890"]
    digest = await sh(sandbox, "sha256sum <deep/er/script.sh", cwd="/workspace")
    assert digest.stdout_text.split()[0] == hashlib.sha256(source.read_bytes()).hexdigest()

    await files.put(b"one", "bytes")
    await files.put(io.BytesIO(b"two"), "/tmp/stream")
    await files.put(source, "named/")
    assert await files.read("bytes") == b"one"
    assert await files.read("/tmp/stream") == b"two"
    assert await files.read("named/script.sh") == source.read_bytes()

    got = await files.get("deep/er/script.sh", tmp_path / "back")
    assert (got.path, got.files, got.size) == (str(tmp_path / "back"), 1, 3_000_000)
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    found = (tmp_path / "back").stat()
    assert stat.S_IMODE(found.st_mode) == 0o755
    assert found.st_mtime_ns == 1_234_567_890_123_456_789
    await files.get("bytes", f"{tmp_path}/")
    assert (tmp_path / "bytes").read_bytes() == b"one"
    assert sorted(os.listdir(tmp_path)) == ["back", "bytes", "script.sh"]


async def test_a_tree_goes_in_and_comes_out_as_it_was(
    sandbox: LiveSandbox, files: Files, tmp_path: Path
) -> None:
    """F1, TAR-13: with links, odd names and empty folders; without what is no file."""
    source = make(tmp_path / "tree", "a/b/c.txt", "a/x", "name with spaces", ".hidden")
    odd = os.fsdecode(b"not utf-8 \xff")
    (source / odd).write_bytes(b"odd")
    (source / "line\nbreak").write_bytes(b"lines")
    (source / "empty").mkdir()
    (source / "link").symlink_to("a/b/c.txt")
    os.mkfifo(source / "fifo")
    put = await files.put(source)
    assert put.path == "/workspace/tree"
    assert (put.files, put.folders, put.links) == (6, 4, 1)
    assert [str(one) for one in put.skipped] == ["fifo: it is a FIFO, a socket or a device"]
    shown = await sh(
        sandbox, "readlink link; cat link; ls -A; find . ! -user sandbox", cwd="/workspace/tree"
    )
    assert shown.stdout.startswith(b"a/b/c.txt\na/b/c.txt")
    assert b"not utf-8 \xff" in shown.stdout
    assert b"line\nbreak" in shown.stdout
    assert b"./" not in shown.stdout

    got = await files.get("tree", tmp_path / "back")
    expected = content(source / "a")
    assert content(tmp_path / "back" / "a") == expected
    assert (tmp_path / "back" / odd).read_bytes() == b"odd"
    assert (tmp_path / "back" / "empty").is_dir()
    assert sorted((one.path, one.reason) for one in got.skipped) == [
        ("line\nbreak", "name"),
        ("link", "link"),
    ]
    assert (got.files, got.folders) == (5, 4)


async def test_folders_are_merged_and_files_replaced_where_that_is_allowed(
    sandbox: LiveSandbox, files: Files, tmp_path: Path
) -> None:
    """F1: in both directions; a conflict leaves everything as it was."""
    old = make(tmp_path / "old", "same", "only/old")
    new = make(tmp_path / "new", "only/new")
    (new / "same").write_text("new")
    await files.put(old, "tree")
    with pytest.raises(SandboxConflictError, match="/workspace/tree/same"):
        await files.put(new, "tree", overwrite=False)
    assert await everything_in(sandbox) == [
        "./tree",
        "./tree/only",
        "./tree/only/old",
        "./tree/same",
    ]
    await files.put(new, "tree")
    assert await files.read("tree/same") == b"new"
    assert [e.path for e in await files.list("tree/only")] == [
        "/workspace/tree/only/new",
        "/workspace/tree/only/old",
    ]

    target = make(tmp_path / "target", "same", "kept")
    with pytest.raises(SandboxConflictError, match="same"):
        await files.get("tree", target)
    assert content(target) == {"same": b"same", "kept": b"kept"}
    await files.get("tree", target, overwrite=True)
    assert set(content(target)) == {"same", "kept", "only", "only/old", "only/new"}
    assert (target / "same").read_text() == "new"
    with pytest.raises(SandboxSpecRejectedError, match=r"tree/only.*folder"):
        await files.put(b"x", "tree/only")
    with pytest.raises(SandboxSpecRejectedError, match="not a folder"):
        await files.put(new, "tree/same")
    # A tree may be put into the workspace itself, and come out of it.
    await files.put(new, "/workspace")
    assert await files.read("same") == b"new"
    await files.get("", tmp_path / "whole")
    assert (tmp_path / "whole" / "tree" / "kept").exists() is False
    assert (tmp_path / "whole" / "tree" / "same").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["new", "old", "target", "whole"]


async def test_a_miss_names_the_path(files: Files, tmp_path: Path) -> None:
    """F1: in every operation."""
    await files.put(b"x", "file")
    for path in ("missing", "no/such/file", "file-"):
        for work in (
            lambda path=path: files.read(path),
            lambda path=path: files.get(path, tmp_path / "x"),
            lambda path=path: files.list(path),
            lambda path=path: files.remove(path),
        ):
            with pytest.raises(SandboxFileNotFoundError, match=f"/workspace/{path.split('/')[0]}"):
                await work()
    assert os.listdir(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        await files.read("missing")


ESCAPES = ["../x", "a/../../x", "/etc/passwd", "/proc/self/mem", "/", "/workspace/../etc", "a\0b"]


@pytest.mark.parametrize("path", ESCAPES)
async def test_an_escape_is_refused_before_anything_runs(path: str, tmp_path: Path) -> None:
    """F2: there is no engine that could run it."""
    for work in (
        NOBODY.put(b"x", path),
        NOBODY.get(path, tmp_path / "x"),
        NOBODY.read(path),
        NOBODY.list(path),
        NOBODY.remove(path),
        NOBODY.make_directory(path),
        NOBODY.collect("x", tmp_path / "x", folder=path),
    ):
        with pytest.raises(SandboxSpecRejectedError):
            await work
    assert os.listdir(tmp_path) == []


async def test_what_cannot_be_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """F1, F3: the error names the setting; there is no engine that could run it."""
    (tmp_path / "there").write_text("x")
    os.mkfifo(tmp_path / "fifo")
    for work, setting in (
        (NOBODY.put(b"x", "folder/"), "target"),
        (NOBODY.put(b"x", "/workspace"), "target"),
        (NOBODY.put(tmp_path / "missing", "x"), "source"),
        (NOBODY.put(tmp_path / "fifo", "x"), "source"),
        (NOBODY.put(cast(bytes, 7), "x"), "source"),
        (NOBODY.put(b"12345", "x", limits=TransferLimits(file_size=4)), "limits.file_size"),
        (NOBODY.get("x", tmp_path / "no" / "such"), "target"),
        (NOBODY.remove("/workspace"), "path"),
        (NOBODY.collect("../x", tmp_path / "c"), "patterns"),
        (NOBODY.collect("/output/x", tmp_path / "c"), "patterns"),
        (NOBODY.list(pattern="../*"), "pattern"),
    ):
        with pytest.raises(SandboxSpecRejectedError) as caught:
            await work
        assert caught.value.setting == setting
    with pytest.raises(SandboxConflictError, match="there"):
        await NOBODY.get("x", tmp_path / "there")


async def test_the_content_of_a_workspace_can_be_listed(
    sandbox: LiveSandbox, files: Files, tmp_path: Path
) -> None:
    """F1: all kinds, sorted, with what would be left out; by pattern and to any depth."""
    make(tmp_path, "b/two.csv", "a.csv", "c/d/three.csv")
    await files.put(tmp_path, "/workspace")
    text = "ln -s /etc/passwd link; mkfifo fifo; chmod 600 a.csv; printf x >'new\nline'"
    await sh(sandbox, text, cwd="/workspace")
    shown = {e.name: (e.kind, e.size, e.mode, e.refused) for e in await files.list()}
    assert shown == {
        "a.csv": ("file", 5, 0o600, None),
        "b": ("folder", 0, 0o755, None),
        "c": ("folder", 0, 0o755, None),
        "fifo": ("other", 0, 0o644, "not-regular"),
        "link": ("link", 0, 0o777, "link"),
        "new\nline": ("file", 1, 0o644, "name"),
    }
    deep = [e.path for e in await files.list(recursive=True)]
    assert deep == sorted(deep, key=lambda path: path.split("/"))
    assert "/workspace/c/d/three.csv" in deep
    assert [e.path for e in await files.list("c", pattern="**/*.csv")] == [
        "/workspace/c/d/three.csv"
    ]
    assert [e.name for e in await files.list(pattern="*.csv")] == ["a.csv"]
    [one] = await files.list("a.csv")
    assert (one.path, one.size) == ("/workspace/a.csv", 5)
    with pytest.raises(SandboxSpecRejectedError, match="limit = 3"):
        await files.list(recursive=True, limit=3)


async def test_folders_are_made_and_things_removed(sandbox: LiveSandbox, files: Files) -> None:
    """F1: a link is removed and not what it leads to."""
    await files.make_directory("a/b/c")
    await files.make_directory("a/b/c")
    await files.put(b"x", "a/file")
    await sh(sandbox, "ln -s /workspace/a link", cwd="/workspace")
    with pytest.raises(SandboxSpecRejectedError, match="not empty"):
        await files.remove("a")
    with pytest.raises(SandboxSpecRejectedError, match="not a folder"):
        await files.make_directory("a/file")
    with pytest.raises(SandboxSpecRejectedError, match="symbolic link"):
        await files.remove("link/file")
    await files.remove("link", recursive=True)
    await files.remove("a/b/c")
    assert await everything_in(sandbox) == ["./a", "./a/b", "./a/file"]
    await files.remove("a", recursive=True)
    assert await files.list() == ()


async def test_artifacts_are_those_that_were_asked_for(
    make_sandbox: MakeSandbox, output_image: str, tmp_path: Path
) -> None:
    """F3: named paths and globs; links out, FIFOs and unsafe names stay behind with the reason."""
    sandbox = await make_sandbox(output_image)
    files = Files(sandbox.engine, sandbox.id, user=CODE_USER)
    text = (
        "mkdir -p coverage/html plots; echo 1 >report.json; echo 2 >coverage/html/index.html;"
        "echo 3 >plots/a.png; echo 4 >plots/b.txt; ln -s /etc/passwd plots/p.png;"
        "mkfifo plots/f.png; echo 5 >'plots/bad\nname.png'; chmod 777 report.json"
    )
    assert (await sh(sandbox, text, cwd="/output")).returncode == 0
    target = tmp_path / "artifacts"
    got = await files.collect(["report.json", "coverage", "**/*.png", "*.nothing"], target)
    assert content(target) == {
        "report.json": b"1\n",
        "coverage": None,
        "coverage/html": None,
        "coverage/html/index.html": b"2\n",
        "plots": None,
        "plots/a.png": b"3\n",
    }
    assert stat.S_IMODE((target / "report.json").stat().st_mode) == 0o755
    assert {one.path: one.reason for one in got.skipped} == {
        "plots/p.png": "link",
        "plots/f.png": "not-regular",
        "plots/bad\nname.png": "name",
    }
    assert (got.files, got.size) == (3, 6)

    with pytest.raises(SandboxConflictError, match=r"report\.json"):
        await files.collect("report.json", target)
    with pytest.raises(SandboxFileNotFoundError, match=r"/output/missing\.json"):
        await files.collect(["report.json", "missing.json"], tmp_path / "other")
    for limits in (
        TransferLimits(entries=2),
        TransferLimits(total_size=3),
        TransferLimits(file_size=1),
    ):
        with pytest.raises(SandboxSpecRejectedError, match="limits"):
            await files.collect("**", tmp_path / "other", limits=limits)
    nothing = await files.collect("*.gif", tmp_path / "other")
    assert nothing.files == 0
    assert sorted(os.listdir(tmp_path)) == ["artifacts"]


async def test_where_there_is_no_output_there_are_no_artifacts(
    files: Files, tmp_path: Path
) -> None:
    """F3: which is nothing wrong, unless one was named."""
    assert (await files.collect("*", tmp_path / "x")).files == 0
    with pytest.raises(SandboxFileNotFoundError, match="/output/x"):
        await files.collect("x", tmp_path / "x")
    assert os.listdir(tmp_path) == []


async def test_progress_is_told_and_ends_with_everything(files: Files, tmp_path: Path) -> None:
    """F1: bytes so far, and how many it will be."""
    (tmp_path / "tree").mkdir()
    for name in "abc":
        (tmp_path / "tree" / name).write_bytes(bytes(4_000_000))
    told: dict[str, list[tuple[int, int | None]]] = {"in": [], "out": [], "stream": []}
    await files.put(tmp_path / "tree", progress=lambda *state: told["in"].append(state))
    await files.get("tree", tmp_path / "back", progress=lambda *state: told["out"].append(state))
    stream = io.BytesIO(bytes(1000))
    await files.put(stream, "s", progress=lambda *state: told["stream"].append(state))
    for way in ("in", "out"):
        sizes = [size for size, _ in told[way]]
        assert sizes == sorted(sizes)
        assert told[way][-1] == (12_000_000, 12_000_000)
    assert told["stream"][-1] == (1000, None)

    def fail(size: int, total: int | None) -> None:
        raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError, match="own"):
        await files.get("tree", tmp_path / "failed", progress=fail)
    assert not (tmp_path / "failed").exists()


async def test_what_is_ignored_stays_here(files: Files, tmp_path: Path) -> None:
    """F1, B11."""
    make(tmp_path / "project", "main.py", ".git/config", "data/big.bin", "data/small.csv")
    spec = pathspec.GitIgnoreSpec.from_lines([".git/", "*.bin"])
    await files.put(tmp_path / "project", ignore=spec)
    found = [e.path for e in await files.list("project", recursive=True) if e.kind == "file"]
    assert found == ["/workspace/project/data/small.csv", "/workspace/project/main.py"]


async def test_many_transfers_at_once_do_not_mix(files: Files, tmp_path: Path) -> None:
    """F1: each is an exec of its own; the last one onto a name wins, and is whole."""
    blocks = [bytes([number]) * 300_000 for number in range(8)]
    await asyncio.gather(*(files.put(block, "same") for block in blocks))
    assert await files.read("same") in blocks
    await asyncio.gather(*(files.put(block, f"own{block[0]}") for block in blocks))
    assert await asyncio.gather(*(files.read(f"own{block[0]}") for block in blocks)) == blocks
    assert len(await files.list()) == 9


async def test_a_full_sandbox_keeps_nothing_half_written(
    make_sandbox: MakeSandbox, tmp_path: Path
) -> None:
    """F1: a tmpfs is the smallest disk; what was there is still there, and there is room again."""
    sandbox = await make_sandbox(tmpfs_size=4 << 20)
    files = Files(sandbox.engine, sandbox.id, user=CODE_USER)
    await files.put(b"old", "/tmp/file")
    with pytest.raises(SandboxDiskFullError, match=r"in the sandbox.*/tmp/file"):
        await files.put(bytes(8 << 20), "/tmp/file")
    assert await files.read("/tmp/file") == b"old"
    assert await everything_in(sandbox, "/tmp") == ["./file"]
    await files.put(bytes(3 << 20), "/tmp/file")


async def test_an_image_without_python_is_named_as_the_reason(
    make_sandbox: MakeSandbox, busybox_image: str, tmp_path: Path
) -> None:
    """Decision 10: in every operation."""
    sandbox = await make_sandbox(busybox_image)
    files = Files(sandbox.engine, sandbox.id, user=CODE_USER)
    for work in (
        files.put(bytes(3_000_000), "x"),
        files.get("x", tmp_path / "x"),
        files.read("x"),
        files.list(),
    ):
        with pytest.raises(SandboxImageUnsuitableError, match="python3"):
            await work
    assert os.listdir(tmp_path) == []


class SlowReader(io.RawIOBase):
    """A stream that gives a first piece, and the rest when it is let."""

    def __init__(self, size: int) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.ended = threading.Event()
        self._first = bytes(size)

    def read(self, size: int = -1) -> bytes:
        first, self._first = self._first, b""
        if not first:
            self.reached.set()
            assert self.go_on.wait(60)
            self.ended.set()
        return first


async def test_no_path_and_no_content_stands_in_an_argv(sandbox: LiveSandbox, files: Files) -> None:
    """B12: what is carried, and where, travels over stdin."""
    reader = SlowReader(1000)
    putting = asyncio.create_task(files.put(reader, "sEcReT-name"))  # type: ignore[arg-type]
    await asyncio.to_thread(reader.reached.wait, 30)
    try:
        seen = await sh(sandbox, "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null; true")
        assert b"python3" in seen.stdout
        assert b"sEcReT" not in seen.stdout
    finally:
        reader.go_on.set()
        await putting
    assert [e.name for e in await files.list()] == ["sEcReT-name"]
