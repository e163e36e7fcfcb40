"""Files against hostile code in the sandbox, and against everything that can break off (TAR)."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import (
    SandboxEngineTimeoutError,
    SandboxError,
    SandboxGoneError,
    SandboxImageUnsuitableError,
    SandboxPausedError,
    SandboxProtocolError,
    SandboxSpecRejectedError,
    SandboxStartError,
    SandboxUnavailableError,
    SandboxUnknownOutcomeError,
)
from sandbox_kernel.process.files import Files, TransferLimits
from sandbox_kernel.process.files.folder import STAGE_PREFIX
from sandbox_kernel.process.files.landing import Landing
from sandbox_kernel.sandbox.live import CODE_USER, LiveSandbox
from tests.engines import Engines, FaultProxy, busybox_archive
from tests.process.conftest import PATIENCE, MakeSandbox, sh, shell, until_up
from tests.process.test_files import SlowReader, content, everything_in

LARGE = 60_000_000
LIST = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline | head -c 10; echo; done 2>/dev/null"


@pytest.fixture
def files(sandbox: LiveSandbox) -> Files:
    return Files(sandbox.engine, sandbox.id, user=CODE_USER)


async def fill(sandbox: LiveSandbox, name: str = "large", size: int = LARGE) -> None:
    """Make a file in the sandbox that takes a while to carry."""
    made = await sh(sandbox, 'head -c "$1" /dev/urandom >"$2"', str(size), name, cwd="/workspace")
    assert made.returncode == 0


async def begun(work: Callable[[Any], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
    """Start a transfer and return when its first bytes have moved."""
    moved = asyncio.Event()

    def progress(size: int, total: int | None) -> None:
        if size:
            moved.set()

    task = asyncio.create_task(work(progress))
    waiting = asyncio.create_task(moved.wait())
    await asyncio.wait({task, waiting}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    assert moved.is_set()
    return task


async def until_nothing_in(sandbox: LiveSandbox, *but: str) -> None:
    """Wait until the workspace holds nothing else: a courier needs a moment to clear up."""
    async with asyncio.timeout(PATIENCE):
        while await everything_in(sandbox) != sorted(but):
            pass


# -- what is planted --------------------------------------------------------------------------


async def test_no_link_leads_out_of_the_sandboxs_files(
    sandbox: LiveSandbox, files: Files, tmp_path: Path
) -> None:
    """TAR-01, TAR-16, peers 19: links alone, on the way, to themselves and in a tree."""
    text = (
        "mkdir t; ln -s /etc/passwd t/a; ln -s ../../../../etc/shadow t/b; ln -s / t/r;"
        "ln -s loop loop; echo mine >t/mine; ln -s /etc etc"
    )
    await sh(sandbox, text, cwd="/workspace")
    for path in ("t/a", "t/r", "t/r/etc/hostname", "loop", "loop/x", "etc/passwd"):
        with pytest.raises(SandboxSpecRejectedError, match="symbolic link") as caught:
            await files.get(path, tmp_path / "x")
        assert "overlay2" not in str(caught.value)
        with pytest.raises(SandboxSpecRejectedError, match="symbolic link"):
            await files.read(path)
    assert [(one.name, one.kind) for one in await files.list("etc")] == [("etc", "link")]
    with pytest.raises(SandboxSpecRejectedError, match="symbolic link"):
        await files.list("etc/apt")
    got = await files.get("t", tmp_path / "t")
    assert content(tmp_path) == {"t": None, "t/mine": b"mine\n"}
    assert {one.path: one.reason for one in got.skipped} == {"a": "link", "b": "link", "r": "link"}


async def test_nothing_is_put_through_a_planted_link_or_waits_at_a_planted_fifo(
    sandbox: LiveSandbox, files: Files, tmp_path: Path
) -> None:
    """F2, F4 of the findings: what the engine's own way followed as root."""
    text = (
        "mkdir q /tmp/elsewhere; ln -s /tmp/elsewhere q/e; mkfifo q/fifo; echo kept >/tmp/victim;"
        "ln -s /tmp/victim q/v; mkdir .sbx-part-planted; ln -s /tmp/elsewhere .sbx-part-link"
    )
    await sh(sandbox, text, cwd="/workspace")
    with pytest.raises(SandboxSpecRejectedError, match=r"/workspace/q/e.*symbolic link"):
        await files.put(b"x", "q/e/planted")
    (tmp_path / "planted").write_text("x")
    with pytest.raises(SandboxSpecRejectedError):
        await files.put(tmp_path, "q/e")
    with pytest.raises(SandboxSpecRejectedError, match="not a folder"):
        await files.put(b"x", "q/fifo/x")
    # In the place itself it is replaced, and what it led to is not touched.
    await files.put(b"new", "q/v")
    await files.put(b"new", "q/fifo")
    shown = await sh(sandbox, "cat /tmp/victim q/v q/fifo; ls -A /tmp/elsewhere", cwd="/workspace")
    assert shown.stdout_text == "kept\nnewnew"


async def test_what_is_no_file_is_refused_without_waiting(
    sandbox: LiveSandbox, files: Files, tmp_path: Path
) -> None:
    """TAR-04: FIFOs and sockets; modes lose what is dangerous."""
    text = (
        "mkfifo f; python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('s')\";"
        "mkdir t; mkfifo t/f; echo x >t/x; chmod 0777 t/x; chmod 4755 t/x; true"
    )
    await sh(sandbox, text, cwd="/workspace")
    for name in ("f", "s"):
        with pytest.raises(SandboxSpecRejectedError, match="FIFO"):
            await files.read(name)
    got = await files.get("t", tmp_path / "t")
    assert [(one.path, one.reason) for one in got.skipped] == [("f", "not-regular")]
    assert (tmp_path / "t" / "x").stat().st_mode & 0o7777 == 0o755


async def test_a_file_that_only_looks_large_is_refused_before_its_bytes(
    sandbox: LiveSandbox, files: Files, tmp_path: Path
) -> None:
    """TAR-05: the size is known first."""
    await sh(sandbox, "mkdir t; truncate -s 2147483648 t/big || true", cwd="/workspace")
    told: list[int] = []
    limits = TransferLimits(file_size=1 << 30)
    for path, asked in (("t/big", "file_size"), ("t", "file_size")):
        with pytest.raises(SandboxSpecRejectedError, match=rf"limits\.{asked}.*/workspace/t/big"):
            await files.get(
                path, tmp_path / "x", limits=limits, progress=lambda size, _: told.append(size)
            )
    with pytest.raises(SandboxSpecRejectedError, match="limit = 16777216"):
        await files.read("t/big")
    assert sum(told) == 0
    assert os.listdir(tmp_path) == []


async def test_a_tree_without_end_is_refused(
    sandbox: LiveSandbox, files: Files, tmp_path: Path
) -> None:
    """TAR-10: too many entries, too deep, and too long a time."""
    text = "mkdir many; cd many; seq 3000 | xargs touch"
    await sh(sandbox, text, cwd="/workspace")
    with pytest.raises(SandboxSpecRejectedError, match=r"limits\.entries = 2999"):
        await files.get("many", tmp_path / "x", limits=TransferLimits(entries=2999))
    deep = "import os\nfor _ in range(150):\n    os.mkdir('d'); os.chdir('d')\n"
    await sh(sandbox, 'python3 -c "$1"', deep, cwd="/workspace")
    with pytest.raises(SandboxSpecRejectedError, match="too deeply"):
        await files.get("d", tmp_path / "x")
    await fill(sandbox)

    def wait(size: int, total: int | None) -> None:
        # More than a window is still to come, so that the time is over before the file is whole,
        # however fast the machine.
        time.sleep(0.6)

    with pytest.raises(SandboxEngineTimeoutError, match=r"limits\.seconds = 0\.5"):
        await files.get("large", tmp_path / "x", limits=TransferLimits(seconds=0.5), progress=wait)
    assert os.listdir(tmp_path) == []
    await files.remove("d", recursive=True)


REWRITE = """
import os
print('up', flush=True)
generation = 0
while True:
    generation = (generation + 1) % 250
    with open('g', 'r+b' if os.path.exists('g') else 'wb') as file:
        file.write(bytes([generation]) * 3_000_000)
        file.truncate(1_000_000 + generation * 8000)
"""


async def test_a_file_that_is_rewritten_all_the_time_is_never_reported_as_whole(
    sandbox: LiveSandbox, files: Files, tmp_path: Path
) -> None:
    """TAR-07: as many bytes as were sent, and those of one moment unless it says otherwise."""
    process = await shell(sandbox, f'exec python3 -c "{REWRITE}"', cwd="/workspace")
    async with process:
        await until_up(process)
        changed = 0
        for number in range(8):
            target = tmp_path / str(number)
            got = await files.get("g", target)
            data = target.read_bytes()
            assert len(data) == got.size
            if got.changed:
                assert got.changed == ("",)
                changed += 1
            else:
                # As it was at one moment: all of one generation, or one halfway over the last.
                runs = [value for value, _ in groupby(data)]
                assert len(runs) <= 2
                assert len(runs) < 2 or (runs[1] + 1) % 250 == runs[0]
        await process.kill()
    assert changed
    got = await files.get("g", tmp_path / "still")
    assert got.changed == ()


EXCHANGE = """
import ctypes, os
libc = ctypes.CDLL(None)
os.makedirs('r/cur'); open('r/cur/hostname', 'w').write('mine'); os.symlink('/etc', 'r/l')
print('up', flush=True)
while True:
    libc.renameat2(-100, b'r/cur', -100, b'r/l', 2)
"""


async def test_a_folder_that_changes_places_with_a_link_gives_its_own_files_only(
    sandbox: LiveSandbox, files: Files, tmp_path: Path
) -> None:
    """TAR-08: through every layer; see test_files_folder.py for thousands of tries."""
    process = await shell(sandbox, f'exec python3 -c "{EXCHANGE}"', cwd="/workspace")
    async with process:
        await until_up(process)
        for number in range(10):
            target = tmp_path / str(number)
            with contextlib.suppress(SandboxSpecRejectedError):
                await files.get("r", target)
            with contextlib.suppress(SandboxSpecRejectedError):
                assert await files.read("r/cur/hostname") == b"mine"
        await process.kill()
    for name, data in content(tmp_path).items():
        assert data in {None, b"mine"}, name


# -- what hinders others, and what is hindered ------------------------------------------------


async def test_a_reader_that_stands_still_delays_nobody(
    sandbox: LiveSandbox, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TAR-11: the engine's own way held up every other call on that container."""
    await fill(sandbox)
    stands, go_on = threading.Event(), threading.Event()
    write = Landing.data

    def stand_still(self: Landing, data: bytes | memoryview) -> None:
        stands.set()
        assert go_on.wait(100)
        write(self, data)

    monkeypatch.setattr(Landing, "data", stand_still)
    getting = asyncio.create_task(files.get("large", tmp_path / "x"))
    try:
        await asyncio.to_thread(stands.wait, 60)
        # Long enough for whatever has room to be full.
        await asyncio.sleep(2)
        async with asyncio.timeout(PATIENCE):
            assert (await sh(sandbox, "exit 4")).returncode == 4
            await sandbox.engine.inspect_container(sandbox.id)
            await files.put(b"x", "other")
            assert await files.read("other") == b"x"
    finally:
        go_on.set()
    got = await getting
    assert got.size == LARGE
    assert (tmp_path / "x").stat().st_size == LARGE


async def test_memory_stays_flat_while_much_is_carried(
    sandbox: LiveSandbox, files: Files, tmp_path: Path
) -> None:
    """F1, issue 4: in both directions, a fraction of what is carried."""
    page = os.sysconf("SC_PAGE_SIZE")

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    await fill(sandbox, size=200_000_000)
    before = resident()
    highest = before
    done = asyncio.Event()

    async def watch() -> None:
        nonlocal highest
        while not done.is_set():
            highest = max(highest, resident())
            await asyncio.sleep(0.005)

    watching = asyncio.create_task(watch())
    await files.get("large", tmp_path / "x")
    await files.put(tmp_path / "x", "back")
    done.set()
    await watching
    assert highest - before < 64 << 20
    same = await sh(sandbox, "cmp large back", cwd="/workspace")
    assert same.returncode == 0


# -- what breaks off --------------------------------------------------------------------------


async def test_a_cancelled_transfer_leaves_nothing_on_either_side(
    sandbox: LiveSandbox, files: Files, tmp_path: Path
) -> None:
    """F1: at any moment."""
    await fill(sandbox)
    task = await begun(lambda told: files.get("large", tmp_path / "x", progress=told))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert os.listdir(tmp_path) == []
    (tmp_path / "source").write_bytes(bytes(LARGE))
    task = await begun(lambda told: files.put(tmp_path / "source", "new", progress=told))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_nothing_in(sandbox, "./large")
    # The courier notices the end of its input and is gone, too.
    async with asyncio.timeout(PATIENCE):
        while b"python3 -I" in (await sh(sandbox, LIST)).stdout:
            pass


async def test_an_end_of_the_sandbox_leaves_nothing_here(
    make_sandbox: MakeSandbox, tmp_path: Path
) -> None:
    """F1: removed while it gives and while it takes."""
    (tmp_path / "source").write_bytes(bytes(LARGE))
    for way in ("out", "in"):
        sandbox = await make_sandbox()
        files = Files(sandbox.engine, sandbox.id, user=CODE_USER)
        await fill(sandbox)
        if way == "out":
            task = await begun(lambda told, f=files: f.get("large", tmp_path / "x", progress=told))
        else:
            task = await begun(lambda told, f=files: f.put(tmp_path / "source", progress=told))
        await sandbox.destroy()
        with pytest.raises((SandboxGoneError, SandboxUnavailableError)):
            await task
        assert os.listdir(tmp_path) == ["source"]
        with pytest.raises(SandboxGoneError):
            await files.read("large")


async def test_a_courier_that_is_killed_leaves_nothing_for_long(
    sandbox: LiveSandbox, files: Files, tmp_path: Path
) -> None:
    """F1: SIGKILL leaves what was prepared aside, and the next one clears it away."""
    reader = SlowReader(3_000_000)
    putting = asyncio.create_task(files.put(reader, "new"))  # type: ignore[arg-type]
    await asyncio.to_thread(reader.reached.wait, 60)
    async with asyncio.timeout(PATIENCE):
        while not any(STAGE_PREFIX in name for name in await everything_in(sandbox)):
            pass
    with contextlib.suppress(SandboxError):
        await sh(sandbox, "kill -9 -1")
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    reader.go_on.set()
    with pytest.raises(SandboxError, match="killed"):
        await putting
    left = await everything_in(sandbox)
    assert left
    assert all(STAGE_PREFIX in name for name in left)
    assert await files.list() == ()
    await files.put(b"x", "next")
    assert await everything_in(sandbox) == ["./next"]
    await fill(sandbox)
    task = await begun(lambda told: files.get("large", tmp_path / "x", progress=told))
    with contextlib.suppress(SandboxError):
        await sh(sandbox, "kill -9 -1")
    with pytest.raises(SandboxError, match="killed"):
        await task
    assert os.listdir(tmp_path) == []


async def test_a_paused_sandbox_is_said_to_be_and_a_transfer_in_it_ends(
    sandbox: LiveSandbox, files: Files, tmp_path: Path
) -> None:
    """F1: every wait has a bound."""
    await fill(sandbox)
    limits = TransferLimits(seconds=4)
    task = await begun(
        lambda told: files.get("large", tmp_path / "x", limits=limits, progress=told)
    )
    await sandbox.engine.pause_container(sandbox.id)
    try:
        with pytest.raises(SandboxEngineTimeoutError):
            await task
        with pytest.raises(SandboxPausedError):
            await files.read("large")
    finally:
        await sandbox.engine.unpause_container(sandbox.id)
    assert os.listdir(tmp_path) == []
    await files.put(b"x", "after")
    assert await files.read("after") == b"x"


@pytest.fixture
async def cut_line(
    engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[FaultProxy]:
    """A line to the real engine that can break: the engine itself has other work to do."""
    proxy = FaultProxy(engines, tmp_path_factory.mktemp("l") / "s")
    await proxy.start()
    yield proxy
    proxy.thaw()
    await proxy.stop()


async def test_a_line_that_breaks_leaves_nothing_and_says_what_is_known(
    sandbox: LiveSandbox, cut_line: FaultProxy, tmp_path: Path
) -> None:
    """F1: nothing was put while bytes were on their way; at the last step that is not known."""
    await fill(sandbox)
    (tmp_path / "source").write_bytes(bytes(LARGE))
    async with Engine(cut_line.endpoint) as engine:
        files = Files(engine, sandbox.id, user=CODE_USER)
        for work in (
            lambda told: files.get("large", tmp_path / "x", progress=told),
            lambda told: files.put(tmp_path / "source", "new", progress=told),
        ):
            task = await begun(work)
            cut_line.cut()
            with pytest.raises(SandboxUnavailableError, match="broke"):
                await task
        assert os.listdir(tmp_path) == ["source"]
        await until_nothing_in(sandbox, "./large")

        reader = SlowReader(1000)
        putting = asyncio.create_task(files.put(reader, "new"))  # type: ignore[arg-type]
        await asyncio.to_thread(reader.reached.wait, 60)
        async with asyncio.timeout(PATIENCE):
            while not any(STAGE_PREFIX in name for name in await everything_in(sandbox)):
                pass
        # The answer to the last step is what does not come through.
        cut_line.freeze()
        reader.go_on.set()
        await asyncio.to_thread(reader.ended.wait, 60)
        await asyncio.sleep(0.5)
        cut_line.cut()
        cut_line.thaw()
        with pytest.raises(SandboxUnknownOutcomeError, match="whole"):
            await putting


# -- couriers that are none -------------------------------------------------------------------

FAKES = {
    "words": ("echo 'OCI runtime exec failed: no such thing'; exit 1", SandboxStartError),
    "too old": ("exit 125", SandboxImageUnsuitableError),
    "an end": ("exit 0", SandboxStartError),
    "a flood": ("exec cat /dev/zero", SandboxProtocolError),
    "a flood of errors": ("exec cat /dev/zero >&2", SandboxEngineTimeoutError),
    "silence": ("exec sleep 1000", SandboxEngineTimeoutError),
    "its own input": ("exec cat", SandboxProtocolError),
}


@pytest.fixture(scope="session")
def fake_python(engines: Engines) -> Callable[[str], str]:
    """Make an image whose python3 is a shell script, once."""

    def provide(script: str) -> str:
        archive = busybox_archive({"bin/python3": f"#!/bin/sh\n{script}\n".encode()})
        digest = hashlib.sha256(archive).hexdigest()[:12]
        ref = f"sandbox-kernel-test/fake-python:{digest}"
        if engines.api.image(ref) is None:
            engines.api.import_image(archive, ref, ["ENV PATH=/bin"])
        return ref

    return provide


@pytest.mark.parametrize(("script", "error"), FAKES.values(), ids=FAKES)
async def test_a_python_that_is_none_ends_in_an_error_with_a_bound(
    fake_python: Callable[[str], str],
    make_sandbox: MakeSandbox,
    tmp_path: Path,
    script: str,
    error: type[SandboxError],
) -> None:
    """F1, RES-13: an image may hold anything under that name; nothing lands."""
    sandbox = await make_sandbox(fake_python(script))
    files = Files(sandbox.engine, sandbox.id, user=CODE_USER, limits=TransferLimits(seconds=8))
    started = time.monotonic()
    for work in (files.get("x", tmp_path / "x"), files.put(bytes(3_000_000), "y")):
        with pytest.raises(error):
            await work
    assert time.monotonic() - started < 60
    assert os.listdir(tmp_path) == []
