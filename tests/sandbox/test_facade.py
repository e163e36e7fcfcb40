"""The public API on the real engine: what a caller does, and what can happen meanwhile."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import signal
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel import (
    Chunk,
    CommandFailedError,
    CommandTimeoutError,
    EngineSettings,
    Exit,
    Sandbox,
    SandboxError,
    SandboxExecTimeoutError,
    SandboxFileNotFoundError,
    SandboxGoneError,
    SandboxImageMissingError,
    SandboxProcess,
    SandboxRunError,
    SandboxSpec,
    SandboxSpecRejectedError,
    SandboxStartError,
    SandboxUnavailableError,
    SandboxUnknownOutcomeError,
)
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.thread import EngineThread
from sandbox_kernel.sandbox import labels
from tests.engines import Engines, FaultProxy, leftovers, wait_until
from tests.sandbox.conftest import Create

LIST = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$f 2>/dev/null; echo; done"


async def sleepers(sandbox: Sandbox) -> list[str]:
    """Return the command lines of the `sleep` s in a sandbox."""
    lines = (await sandbox.shell(LIST)).stdout_text.splitlines()
    return [line.strip() for line in lines if line.startswith("sleep ")]


async def text_of(process: SandboxProcess) -> str:
    """Read a process to its end."""
    data = b""
    async for item in process.output:
        if isinstance(item, Chunk):
            data += item.data
    return data.decode()


async def first_chunk(process: SandboxProcess) -> Chunk:
    item = await process.read()
    assert isinstance(item, Chunk)
    return item


# -- what it is for -----------------------------------------------------------------------------


async def test_the_example_of_the_issue_works(create: Create) -> None:
    """Issue 3: a program, a shell's command line, and one to talk to."""
    async with create() as sandbox:
        script = "import os, sys; print(os.getcwd(), os.environ['V'], sys.stdin.read())"
        made = await sandbox.shell("mkdir src")
        assert (made.returncode, made.reason) == (0, "finished")
        result = await sandbox.run(
            ["python3", "-c", script], timeout=120, stdin=b"in", env={"V": "a b"}, cwd="src"
        )
        assert result.stdout_text == "/workspace/src a b in\n"
        result = await sandbox.shell("pwd && exit 3", timeout=600)
        assert (result.returncode, result.stdout) == (3, b"/workspace\n")
        async with sandbox.start(["python3", "-i"], timeout=None) as process:
            await process.write(b"1+1\n")
            while (await first_chunk(process)).stream != 1:
                pass
            assert process.pid > 1
            assert process.returncode is None
            await process.end_input()
            assert (await process.wait()).code == 0
            items = [item async for item in process.output]
            assert items[-1] == Exit(0, "finished")
            assert process.returncode == 0
    assert sandbox.ended is not None
    assert sandbox.ended.kind == "removed"


async def test_a_sandbox_says_what_it_is(create: Create, engines: Engines, owner: str) -> None:
    """Issue 3, B12: id, name, spec and limits; whose it is stands in its labels."""
    spec = {"mem_limit": 256 << 20, "environment": {"TOKEN": "sEcReT"}, "prefix": "sbx-a."}
    async with create(spec=spec) as sandbox:
        inspected = engines.api.inspect(sandbox.id)
        assert inspected is not None
        assert inspected["Name"] == f"/{sandbox.name}"
        assert sandbox.name.startswith("sbx-a.")
        assert inspected["Config"]["Labels"][labels.OWNER] == owner
        assert sandbox.limits.memory == sandbox.spec.mem_limit == 256 << 20
        assert repr(sandbox) == f"<Sandbox {sandbox.name} running>"
        async with sandbox.start(["sleep", "8000"]) as process:
            assert repr(process) == f"<SandboxProcess {process.pid} in {sandbox.name}>"
    assert repr(sandbox) == f"<Sandbox {sandbox.name} removed>"


async def test_an_awaited_sandbox_lives_until_it_is_destroyed(create: Create) -> None:
    """Issue 3: `await` instead of `async with`; destroying is idempotent and ends what runs."""
    sandbox = await create()
    process = await sandbox.start(["sleep", "8001"], timeout=None)
    waiting = asyncio.create_task(sandbox.wait())
    await asyncio.gather(sandbox.destroy(), sandbox.destroy())
    await sandbox.destroy()
    assert (await waiting).kind == "removed"
    with pytest.raises(SandboxGoneError, match="removed by its owner"):
        await process.wait()
    with pytest.raises(SandboxGoneError, match="removed by its owner"):
        await process.read()
    await process.close()
    for use in (sandbox.run(["true"]), sandbox.shell(":"), sandbox.kill()):
        with pytest.raises(SandboxGoneError, match="removed by its owner"):
            await use


async def test_ten_commands_at_once_in_one_sandbox(create: Create) -> None:
    """Issue 3: results are not mixed up, and the commands do run at the same time."""
    async with create() as sandbox:
        # Each waits for all the others.
        meet = 'echo >$N; while [ $(ls | wc -l) -lt 10 ]; do sleep 0.05; done; echo "$N"; exit $N'
        results = await asyncio.gather(
            *(sandbox.shell(meet, env={"N": str(number)}, timeout=60) for number in range(10))
        )
    assert [(r.returncode, r.stdout_text) for r in results] == [(n, f"{n}\n") for n in range(10)]


async def test_two_sandboxes_at_once_share_nothing(create: Create) -> None:
    """Issue 3, B2: each has its own files and processes, and ends by itself."""
    async with create() as one, create() as other:
        assert one.id != other.id
        await one.shell("echo one >file; sleep 8002 >/dev/null 2>&1 &")
        assert (await other.shell("ls /workspace")).stdout == b""
        assert await sleepers(other) == []
        await one.destroy()
        assert (await other.shell("exit 4")).returncode == 4


async def test_a_program_that_fails_is_an_error_when_the_caller_says_so(create: Create) -> None:
    """Issue 3: the error carries the result and tells the end of stderr, and no argument."""
    async with create() as sandbox:
        assert (await sandbox.shell("exit 3")).returncode == 3
        assert (await sandbox.run(["true"], check=True)).returncode == 0
        text = "echo out; seq 9 >&2; exit 3 # sEcReT"
        with pytest.raises(SandboxRunError) as raised:
            await sandbox.shell(text, check=True)
    error = raised.value
    assert isinstance(error, CommandFailedError)
    assert error.result.stdout_text == "out\n"
    assert (error.returncode, error.stdout) == (3, b"out\n")
    assert str(error) == "sh ended with code 3; the end of its error output:\n5\n6\n7\n8\n9"
    assert "sEcReT" not in repr(error)


async def test_killing_ends_everything_of_the_user(create: Create) -> None:
    """W11, EXW-04: what left its command's group too; the sandbox goes on."""
    async with create() as sandbox:
        await sandbox.shell("(setsid sleep 8003 >/dev/null 2>&1 &); setsid sleep 8004 >&- 2>&- &")
        async with sandbox.start(["sleep", "8005"]) as process:
            assert len(await sleepers(sandbox)) == 3
            assert await sandbox.kill() == "processes"
            with pytest.raises(SandboxError):
                await process.wait()
        assert await sleepers(sandbox) == []


async def test_killing_a_process_keeps_what_it_had_written(create: Create) -> None:
    """W16, W17: its output first, then how it ended; again changes nothing."""
    async with create() as sandbox:
        async with sandbox.start(["sh", "-c", "echo up; exec sleep 8006"]) as process:
            first = await first_chunk(process)
            await process.kill()
            await process.kill()
            assert first.data == b"up\n"
            assert await process.read() == Exit(137, "killed")
            assert await process.read() is None
            assert process.returncode == 137
        assert await sleepers(sandbox) == []


async def test_signals_reach_the_program_and_a_killed_one_takes_the_others_along(
    create: Create,
) -> None:
    """W11, issue 3: SIGINT with its own reason, any other signal, and `everything`."""
    async with create() as sandbox:
        async with sandbox.start(["sleep", "8015"]) as process:
            await process.interrupt()
            ended = await process.wait()
            assert (ended.code, ended.reason) == (130, "interrupted")
        async with sandbox.start(
            ["sh", "-c", "trap 'exit 7' USR1; echo; sleep 9 & wait"]
        ) as process:
            await first_chunk(process)
            await process.signal(signal.SIGUSR1)
            await process.kill()
            assert process.returncode == 7
        async with sandbox.start(["sleep", "8016"]), sandbox.start(["sleep", "8017"]) as process:
            assert (await process.kill(everything=True)).found == "swept"
            assert await sleepers(sandbox) == []


async def test_a_program_can_have_a_terminal(create: Create) -> None:
    """Issue 3: one that can be resized, and one stream of output."""
    text = "trap 'stty size; exit 3' WINCH; tty; stty size; while :; do sleep 0.05; done"
    async with create() as sandbox:
        async with sandbox.start(["sh", "-c", text], tty=(30, 100)) as process:
            said = b""
            while b"30 100" not in said:
                said += (await first_chunk(process)).data
            assert said.startswith(b"/dev/pts/")
            await process.resize(40, 90)
            assert (await text_of(process)).split() == ["40", "90"]
            assert process.returncode == 3
        async with sandbox.start(["cat"]) as process:
            with pytest.raises(SandboxError, match="no terminal"):
                await process.resize(40, 90)


async def test_leaving_the_block_stops_the_program(create: Create) -> None:
    """Issue 3, W21: after an exception in the block too."""
    async with create() as sandbox:
        with pytest.raises(ValueError, match="mine"):
            async with sandbox.start(["sleep", "8007"], timeout=None):
                raise ValueError("mine")
        assert await sleepers(sandbox) == []


async def test_files_go_in_and_come_out(create: Create, tmp_path: Path) -> None:
    """F1, F2, F3: a folder in, a program's results out; the errors are the files' own."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "numbers").write_text("3\n1\n2\n")
    async with create() as sandbox:
        told: list[int] = []
        await sandbox.files.put(tmp_path / "in", "data", progress=lambda n, _: told.append(n))
        assert told[-1] == 6
        await sandbox.shell("mkdir out; sort -n numbers >out/sorted", cwd="data", check=True)
        await sandbox.files.get("data/out", tmp_path / "out")
        assert (tmp_path / "out" / "sorted").read_text() == "1\n2\n3\n"
        entries = await sandbox.files.list("data")
        assert sorted(entry.name for entry in entries) == ["numbers", "out"]
        with pytest.raises(SandboxFileNotFoundError):
            await sandbox.files.read("data/other")
        with pytest.raises(SandboxSpecRejectedError):
            await sandbox.files.put(b"", "../etc/passwd")
        files = sandbox.files
    with pytest.raises(SandboxGoneError, match="removed by its owner"):
        await files.read("data/numbers")


# -- what is refused ----------------------------------------------------------------------------


async def test_what_cannot_be_run_is_refused_before_anything_is_started(
    create: Create, engines: Engines
) -> None:
    """Issue 3, C1, C4, F2: the error names the setting and the remedy, and shows no argument."""
    refused: list[tuple[str, dict[str, Any]]] = [
        (r"argv.*shell\(text\)", {"argv": "sEcReT -l"}),
        (r"argv.*shell\(text\)", {"argv": b"sEcReT"}),
        ("argv.*no program", {"argv": []}),
        ("argv.*no program", {"argv": ["", "sEcReT"]}),
        (r"argv\[1\].*bytes", {"argv": ["ls", b"sEcReT"]}),
        (r"argv\[1\].*NUL", {"argv": ["ls", "sEcReT\0"]}),
        ("env.*names to texts", {"env": {"N": 1}}),
        ("env.*names to texts", {"env": ["N=sEcReT"]}),
        (r"env\['N'\].*NUL", {"env": {"N": "sEcReT\0"}}),
        ("env.*export", {"env": {"a b": "sEcReT"}}),
        ("env.*export", {"env": {"": "sEcReT"}}),
        ("cwd.*leads out of /workspace", {"cwd": ".."}),
        ("cwd.*leads out of /workspace", {"cwd": "a/../../etc"}),
        ("cwd.*NUL", {"cwd": "a\0"}),
        ("cwd.*int", {"cwd": 1}),
        ("timeout = 0.*out of range", {"timeout": 0}),
        ("timeout = -1", {"timeout": -1}),
        ("timeout = 3601.*max_timeout", {"timeout": 3601}),
        ("timeout = nan", {"timeout": float("nan")}),
        ("timeout = '5'.*not a number", {"timeout": "5"}),
        ("timeout = True", {"timeout": True}),
        ("idle_timeout = -1", {"idle_timeout": -1}),
        ("output_limit = 0", {"output_limit": 0}),
    ]
    async with create() as sandbox:
        for match, options in refused:
            argv = options.pop("argv", ["true"])
            with pytest.raises(SandboxSpecRejectedError, match=match) as raised:
                await sandbox.run(argv, **options)
            assert "sEcReT" not in str(raised.value)
            with pytest.raises(SandboxSpecRejectedError, match=match):
                await sandbox.start(argv, **options)
        for match, options in (
            ("stdin.*list", {"stdin": [1]}),
            ("capture_limit = 0", {"capture_limit": 0}),
        ):
            with pytest.raises(SandboxSpecRejectedError, match=match):
                await sandbox.run(["true"], **options)
        for tty in ((24,), "24x80", (0, 80), (24, 80.0), (24, 1 << 20)):
            with pytest.raises(SandboxSpecRejectedError, match=r"tty.*terminal"):
                await sandbox.start(["true"], tty=tty)  # type: ignore[arg-type]
        with pytest.raises(SandboxSpecRejectedError, match=r"text.*list.*run\(argv\)"):
            await sandbox.shell(["ls"])  # type: ignore[arg-type]
        inspected = engines.api.inspect(sandbox.id)
        assert inspected is not None
        assert not inspected["ExecIDs"]


async def test_a_sandbox_that_cannot_be_had_is_refused_before_anything_is_created(
    create: Create, engines: Engines, owner: str
) -> None:
    """Issue 3, B5: a bad argument at once, what the machine has not when it is awaited."""
    for match, options in (
        ("engine.*int", {"engine": 1}),
        ("host = 'ftp://a'", {"engine": "ftp://a"}),
        ("pull_policy = 'often'", {"pull_policy": "often"}),
        ("max_timeout = 0", {"max_timeout": 0}),
    ):
        with pytest.raises(SandboxSpecRejectedError, match=match):
            create(**options)
    with pytest.raises(SandboxSpecRejectedError, match=r"spec.*dict.*SandboxSpec"):
        Sandbox.create({"image": "a"})  # type: ignore[arg-type]
    with pytest.raises(SandboxSpecRejectedError, match="cpu_limit = 4096"):
        await create(spec={"cpu_limit": 4096})
    with pytest.raises(SandboxImageMissingError):
        await create(spec={"image": "sandbox-kernel-test/no-such-image"})
    with pytest.raises(SandboxUnavailableError):
        await create(engine="/nonexistent/docker.sock")
    assert leftovers(engines, f"{labels.OWNER}={owner}") == []


async def test_the_longest_timeout_is_the_sandboxes(create: Create) -> None:
    """C4: 3600 s unless it was made with another one."""
    async with create(max_timeout=2) as sandbox:
        with pytest.raises(SandboxSpecRejectedError, match="at most 2"):
            await sandbox.run(["true"], timeout=3)
        assert (await sandbox.run(["true"], timeout=2)).returncode == 0
        assert (await sandbox.run(["true"], timeout=None)).returncode == 0


async def test_what_does_not_start_is_an_error(create: Create) -> None:
    """W3, B3: no such program or directory."""
    async with create() as sandbox:
        with pytest.raises(SandboxStartError, match="no such program"):
            await sandbox.run(["no-such-program"])
        with pytest.raises(SandboxStartError, match="directory"):
            await sandbox.start(["true"], cwd="no/such")


# -- timeouts and reading -----------------------------------------------------------------------


async def test_a_timeout_comes_next_for_a_reader_that_is_behind(create: Create) -> None:
    """W19: however much has been fetched and not read."""
    async with create() as sandbox:
        text = "head -c 3000000 /dev/zero; exec sleep 8008"
        async with sandbox.start(["sh", "-c", text], timeout=8) as process:
            core = process._process
            await asyncio.to_thread(wait_until, lambda: core.counts[1] == 3_000_000)
            await first_chunk(process)
            assert process._fetched
            with pytest.raises(SandboxExecTimeoutError) as raised:
                await process.wait()
            assert isinstance(raised.value, TimeoutError)
            for _ in range(2):
                with pytest.raises(SandboxExecTimeoutError, match="3000000 bytes"):
                    await process.read()
        with pytest.raises(SandboxExecTimeoutError):
            await sandbox.shell("sleep 8009", timeout=0.5)
        assert await sleepers(sandbox) == []


async def test_silence_ends_a_program_too(create: Create) -> None:
    """Issue 3: the idle timeout, by `run` and by `start`; the error carries what there was."""
    text = "for i in 1 2 3 4; do echo $i; sleep 0.4; done; exec sleep 8018"
    async with create() as sandbox:
        with pytest.raises(CommandTimeoutError) as raised:
            await sandbox.shell(text, idle_timeout=3)
        assert raised.value.reason == "idle-timeout"
        assert raised.value.result is not None
        assert raised.value.result.stdout == b"1\n2\n3\n4\n"
        async with sandbox.start(["sh", "-c", text], idle_timeout=3) as process:
            with pytest.raises(CommandTimeoutError):
                await process.wait()
        assert await sleepers(sandbox) == []


async def test_a_reader_that_gives_up_and_returns_loses_nothing(create: Create) -> None:
    """W9: `asyncio.wait_for` cancels the reading again and again."""
    text = "for i in $(seq 200); do echo $i; [ $((i % 20)) != 0 ] || sleep 0.05; done"
    async with create() as sandbox, sandbox.start(["sh", "-c", text]) as process:
        data, gave_up, item = b"", 0, None
        while not isinstance(item, Exit):
            try:
                item = await asyncio.wait_for(process.read(), 0.004)
            except TimeoutError:
                gave_up += 1
            else:
                assert item is not None
                data += item.data if isinstance(item, Chunk) else b""
        assert gave_up > 5
        assert data.split() == [b"%d" % number for number in range(1, 201)]


async def test_two_readers_share_the_output(create: Create) -> None:
    """W9: each piece goes to one of them, and both see the end."""
    async with create() as sandbox, sandbox.start(["seq", "50000"]) as process:

        async def read() -> list[Chunk | Exit]:
            return [item async for item in process.output]

        one, other = await asyncio.gather(read(), read())
        items = one + other
        assert [item for item in items if isinstance(item, Exit)] == [Exit(0, "finished")]
        size = sum(len(item.data) for item in items if isinstance(item, Chunk))
        assert size == len("".join(f"{n}\n" for n in range(1, 50001)))


async def test_much_output_arrives_whole_and_in_order(create: Create) -> None:
    """W9, W10: across the thread, in batches."""
    async with create() as sandbox, sandbox.start(["seq", "300000"]) as process:
        assert await text_of(process) == "".join(f"{n}\n" for n in range(1, 300001))


# -- loops, threads and engines -----------------------------------------------------------------


def test_a_sandbox_and_its_streams_outlive_the_loop_that_made_them(create: Create) -> None:
    """Issue 3, decision 5: made in one loop, used in others and in another thread."""

    async def make() -> tuple[Sandbox, SandboxProcess]:
        sandbox = await create()
        return sandbox, await sandbox.start(["cat"], timeout=None)

    async def write(process: SandboxProcess) -> None:
        await process.write("hello")

    async def finish(process: SandboxProcess) -> str:
        await process.end_input()
        return await text_of(process)

    async def end(sandbox: Sandbox) -> None:
        async with sandbox:
            assert (await sandbox.shell("exit 3")).returncode == 3

    sandbox, process = asyncio.run(make())
    asyncio.run(write(process))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(asyncio.run, finish(process)).result(60) == "hello"
    asyncio.run(end(sandbox))


async def test_two_loops_use_one_sandbox_at_once(create: Create) -> None:
    """Decision 5: a second loop in a second thread."""
    async with create() as sandbox:

        async def use(code: int) -> int | None:
            return (await sandbox.shell(f"exit {code}")).returncode

        there = asyncio.to_thread(asyncio.run, use(5))
        assert await asyncio.gather(use(4), there) == [4, 5]


async def test_an_open_engine_is_used_in_its_own_loop(
    engine: Engine, create: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 3: no thread is in between."""

    async def call(*_: object, **__: object) -> None:
        raise AssertionError("hopped")

    monkeypatch.setattr(EngineThread, "call", call)
    before = asyncio.all_tasks()
    async with create(engine=engine) as sandbox:
        assert (await sandbox.shell("exit 3")).returncode == 3
        async with sandbox.start(["echo", "hello"]) as process:
            assert await text_of(process) == "hello\n"
    names = {task.get_name() for task in asyncio.all_tasks() - before if not task.done()}
    assert names <= {"engine-events"}, names


async def test_the_engine_is_the_one_of_the_configuration(
    engines: Engines, owner: str, python_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 3, E3: SANDBOX_DOCKER_HOST, in its place an address, and the TLS files with it."""
    spec = SandboxSpec(image=python_image)
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("SANDBOX_DOCKER_HOST", engines.unix)
    async with Sandbox.create(spec, owner=owner) as sandbox:
        assert engines.api.inspect(sandbox.id) is not None
    monkeypatch.setenv("SANDBOX_DOCKER_HOST", "/nonexistent/docker.sock")
    for name in ("cert", "key", "ca"):
        path = str(engines.certs / f"{name}.pem")
        monkeypatch.setenv(f"SANDBOX_DOCKER_TLS_{name.upper()}_PATH", path)
    async with Sandbox.create(spec, owner=owner, engine=engines.tls) as sandbox:
        assert engines.api.inspect(sandbox.id) is not None
    monkeypatch.setenv("SANDBOX_DOCKER_HOTS", "a")
    with pytest.raises(SandboxSpecRejectedError, match="SANDBOX_DOCKER_HOTS"):
        Sandbox.create(spec)


# -- nothing is left ----------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5])
async def test_a_creation_that_is_cancelled_leaves_nothing(
    create: Create, engines: Engines, owner: str, after: float
) -> None:
    """Issue 3, W21: at whatever moment; the fixture `owner` looks again at the end."""
    entered = asyncio.Event()

    async def use() -> None:
        async with create():
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(use())
    await asyncio.sleep(after)  # the moment is the case
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert leftovers(engines, f"{labels.OWNER}={owner}") == []


async def test_an_exception_in_the_block_leaves_nothing(
    create: Create, engines: Engines, owner: str
) -> None:
    """Issue 3: the exception is the caller's, and the sandbox has gone."""

    async def use() -> None:
        async with create() as sandbox:
            await sandbox.shell("setsid sleep 8010 >/dev/null 2>&1 &")
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as raised:
        await use()
    assert not getattr(raised.value, "__notes__", [])
    assert leftovers(engines, f"{labels.OWNER}={owner}") == []


async def test_a_cancelled_run_stops_its_program(create: Create) -> None:
    """W21: and only that one."""
    async with create() as sandbox, sandbox.start(["sleep", "8011"]):
        task = asyncio.create_task(sandbox.shell("sleep 8012", timeout=None))
        while "sleep 8012" not in await sleepers(sandbox):
            pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await sleepers(sandbox) == ["sleep 8011"]


async def test_an_engine_that_is_cut_off_does_not_hide_the_callers_exception(
    engines: Engines, create: Create, tmp_path: Path
) -> None:
    """W20, B13: the failed clearing up is a note, and the lease does the rest."""
    proxy = FaultProxy(engines, tmp_path / "engine.sock")

    async def use() -> None:
        async with create(engine=str(tmp_path / "engine.sock")):
            await proxy.stop()
            raise ValueError("mine")

    await proxy.start()
    try:
        with pytest.raises(ValueError, match="mine") as raised:
            await use()
    finally:
        await proxy.stop()
    assert "Clearing up after it failed too" in raised.value.__notes__[0]


async def test_a_connection_that_breaks_is_an_error_and_never_a_code(
    engines: Engines, create: Create, tmp_path: Path
) -> None:
    """W22, W23, B13: the lease breaks with it, so that nothing is left."""
    proxy = FaultProxy(engines, tmp_path / "engine.sock")
    await proxy.start()
    try:
        async with create(engine=str(tmp_path / "engine.sock")) as sandbox:
            running = asyncio.create_task(sandbox.run(["sleep", "8019"], timeout=None))
            while "sleep 8019" not in await sleepers(sandbox):
                pass
            proxy.cut()
            async with asyncio.timeout(30):
                with pytest.raises((SandboxGoneError, SandboxUnknownOutcomeError)):
                    await running
                assert (await sandbox.wait()).kind in {"engine-lost", "removed"}
            gone = lambda: engines.api.inspect(sandbox.id) is None  # noqa: E731
            await asyncio.to_thread(wait_until, gone, 20, "the end of the sandbox")
    finally:
        await proxy.stop()


async def test_a_command_learns_why_its_sandbox_ended(create: Create, engines: Engines) -> None:
    """W23: the reason, and not just that a stream broke."""
    async with create(spec={"max_lifetime": 3}) as sandbox:
        with pytest.raises(SandboxGoneError, match="lifetime of 3 s is over"):
            await sandbox.run(["sleep", "8013"])
        assert sandbox.ended is not None
        assert sandbox.ended.kind == "lifetime"
        with pytest.raises(SandboxGoneError, match="lifetime of 3 s is over"):
            await sandbox.run(["true"])
    async with create() as sandbox, sandbox.start(["cat"], timeout=None) as process:
        reading = asyncio.create_task(process.read())
        engines.api.remove(sandbox.id)
        with pytest.raises(SandboxGoneError, match=r"(killed|removed) on the engine"):
            await reading


@pytest.mark.filterwarnings("always::ResourceWarning")
async def test_a_sandbox_that_is_dropped_is_destroyed(
    create: Create, engines: Engines, recwarn: pytest.WarningsRecorder
) -> None:
    """B13: as happens when a notebook's cell is run again."""
    sandbox: Sandbox | None = await create()
    assert sandbox is not None
    container, name = sandbox.id, sandbox.name
    del sandbox

    def gone() -> bool:
        gc.collect()
        return engines.api.inspect(container) is None

    wait_until(gone, 20, "the end of the sandbox")
    warned = {str(warning.message) for warning in recwarn}
    assert f"the sandbox {name} was not destroyed" in warned


async def test_secrets_show_nowhere(
    create: Create, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    """B12: not on the engine, in logs, reprs or errors; in the program they are."""
    caplog.set_level(logging.DEBUG)
    spec = {"environment": {"ONE": "sEcReT-1"}}
    async with create(spec=spec) as sandbox:
        result = await sandbox.run(["sh", "-c", 'printf %s "$ONE$TWO"'], env={"TWO": "sEcReT-2"})
        assert result.stdout == b"sEcReT-1sEcReT-2"
        env = {"TWO": "sEcReT-2"}
        async with sandbox.start(["sh", "-c", "cat; : sEcReT-3"], env=env) as process:
            await process.write("sEcReT-4")
            await first_chunk(process)
            inspected = engines.api.inspect(sandbox.id)
            assert inspected is not None
            [running] = inspected["ExecIDs"]
            told = [inspected, engines.api.get(f"/exec/{running}/json"), sandbox, sandbox.spec]
            told += [process, sandbox.limits, result, caplog.text]
        with pytest.raises(SandboxExecTimeoutError) as late:
            await sandbox.shell("sleep 8014 # sEcReT-5", env={"TWO": "sEcReT-2"}, timeout=0.5)
        with pytest.raises(SandboxRunError) as failed:
            await sandbox.shell("exit 1 # sEcReT-6", env={"TWO": "sEcReT-2"}, check=True)
        told += [repr(late.value), repr(failed.value), late.value, failed.value, caplog.text]
    for each in told:
        assert "sEcReT" not in f"{each!r} {each}".replace(repr(result.stdout), "")


async def test_settings_of_a_caller_take_the_place_of_the_environments(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch, owner: str, python_image: str
) -> None:
    """E1: of the engine, nothing that is configured is mixed into them."""
    monkeypatch.setenv("SANDBOX_DOCKER_HOST", "unix:///nonexistent/engine.sock")
    spec = SandboxSpec(image=python_image)
    async with Sandbox.create(spec, engine=settings, owner=owner) as sandbox:
        assert (await sandbox.run(["true"])).returncode == 0
