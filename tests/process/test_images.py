"""Images and engines that lack something: a shell, a program, the engine's init."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace

import pytest

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.images import DEFAULT_IMAGE
from sandbox_kernel.errors import SandboxImageUnsuitableError
from sandbox_kernel.process.command import Process, start
from sandbox_kernel.process.result import RunResult
from sandbox_kernel.process.run import run
from sandbox_kernel.process.stop import stop
from tests.engines import Engines, busybox_archive
from tests.process.conftest import MakeContainer, until_up

USER = "10001:10001"
IDLE = ["sleep", "600"]


def without(*names: str) -> bytes:
    """Make the busybox image's archive again, less some programs."""
    archive = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(busybox_archive())) as whole,
        tarfile.open(fileobj=archive, mode="w") as part,
    ):
        for entry in whole:
            if entry.name not in {f"bin/{name}" for name in names}:
                part.addfile(entry, whole.extractfile(entry) if entry.isreg() else None)
    return archive.getvalue()


@pytest.fixture
def lacking(request: pytest.FixtureRequest, engines: Engines) -> str:
    """An image that lacks the program that the test is parametrized with."""
    ref = f"sandbox-kernel-test/lacks-{request.param}:latest"
    if engines.api.image(ref) is None:
        engines.api.import_image(without(request.param), ref, ["ENV PATH=/bin"])
    return ref


async def text(engine: Engine, container: str, command: str) -> RunResult:
    return await run(engine, container, ["sh", "-c", command], user=USER, timeout=60)


@pytest.mark.parametrize("lacking", ["sh", "setsid", "cat", "ls", "readlink"], indirect=True)
async def test_a_program_that_an_image_lacks_is_named_and_nothing_runs(
    engine: Engine, make_container: MakeContainer, lacking: str
) -> None:
    """W1, W3."""
    container = await make_container(lacking, IDLE)
    name = lacking.partition("lacks-")[2].partition(":")[0]
    with pytest.raises(SandboxImageUnsuitableError, match=rf"\b{name}\b") as raised:
        await run(engine, container, ["touch", "/workspace/ran"], user=USER)
    assert "/bin" not in str(raised.value)
    if name != "sh":
        async with await engine.exec(container, ["test", "-e", "/workspace/ran"], user=USER) as it:
            while await it.read() is not None:
                pass
        assert (await engine.inspect_exec(it.id)).exit_code == 1


@pytest.mark.parametrize("lacking", ["stty"], indirect=True)
async def test_only_a_terminal_needs_what_sets_terminals(
    engine: Engine, make_container: MakeContainer, lacking: str
) -> None:
    """W1."""
    container = await make_container(lacking, IDLE)
    assert (await text(engine, container, "exit 4")).returncode == 4
    with pytest.raises(SandboxImageUnsuitableError, match="stty"):
        await start(engine, container, ["true"], user=USER, tty=(24, 80))


ESCAPES = """
setsid sleep 7401 &
(setsid sh -c 'sleep 7402 & exit 0' &)
(setsid sleep 7403 >/dev/null 2>&1 </dev/null &)
(env -i setsid sleep 7404 &)
sleep 0.2
echo up
exec sleep 7405
"""


@pytest.mark.parametrize("shell", ["dash", "ash", "bash"])
async def test_without_an_init_a_kill_finds_those_that_left_the_tree(
    engine: Engine,
    make_container: MakeContainer,
    request: pytest.FixtureRequest,
    shell: str,
) -> None:
    """W4, W11: by marker and output; another run lives, and the code is kept."""
    image = DEFAULT_IMAGE if shell == "dash" else None
    if image is None:
        image = request.getfixturevalue("busybox_image" if shell == "ash" else "bash_image")
    container = await make_container(image, IDLE, Init=False)

    async def begin(command: str) -> Process:
        return await start(engine, container, ["sh", "-c", command], user=USER)

    async def sleepers() -> list[bytes]:
        command = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$f 2>/dev/null; echo; done"
        lines = (await text(engine, container, command)).stdout.splitlines()
        return [line for line in lines if line.startswith(b"sleep 7")]

    async with await begin("echo up; exec sleep 7400") as other:
        await until_up(other)
        assert other.identity is not None
        assert other.identity.root == other.identity.waiter
        async with await begin(ESCAPES) as process:
            await until_up(process)
            await process.kill()
            assert (process.exit.code, process.exit.reason) == (137, "killed")
            assert await sleepers() == [b"sleep 7400 "]
    assert await sleepers() == []
    assert (await text(engine, container, "exit 7")).returncode == 7


async def test_a_stop_does_not_touch_a_stranger_with_a_number_of_the_command(
    engine: Engine, make_container: MakeContainer
) -> None:
    """W4: a number that by now means another process, known by its start time, is nobody's."""
    container = await make_container(DEFAULT_IMAGE, IDLE, Init=False)
    async with await start(
        engine, container, ["sh", "-c", "echo up; exec sleep 7410"], user=USER
    ) as stranger:
        await until_up(stranger)
        here = stranger.identity
        assert here is not None
        async with await start(
            engine, container, ["sh", "-c", "echo up; exec sleep 7411"], user=USER
        ) as process:
            await until_up(process)
            there = process.identity
            assert there is not None
            for mode in ("command", "all", "signal:9"):
                # As if all numbers of `process` had been given to `stranger`.
                reused = replace(
                    there,
                    root=here.root,
                    session=here.session,
                    waiter=here.waiter,
                    pid=here.pid,
                    stdout="pipe:[0]",
                    stderr="pipe:[0]",
                    marker="0" * 16,
                )
                report = await stop(engine, container, reused, user=USER, mode=mode)
                assert report.found in ("nothing", "gone")
        await stranger.kill()
        # It was there to be killed.
        assert (stranger.exit.code, stranger.exit.reason) == (137, "killed")
