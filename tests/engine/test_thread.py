"""The engine thread: hops from everywhere, cancellation both ways, forks, and the end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.endpoint import Endpoint, TlsFiles
from sandbox_kernel.engine.thread import EngineThread
from sandbox_kernel.errors import SandboxUnavailableError
from tests.engines import Engines, wait_until


@pytest.fixture
def thread() -> Iterator[EngineThread]:
    """A thread of this test's own."""
    made = EngineThread()
    yield made
    made.close()


async def name_of_thread() -> str:
    return threading.current_thread().name


class Unwinding:
    """Work that records how it ended and takes a moment to do so."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.ended = False

    async def forever(self) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.1)
            self.ended = True


def test_there_is_one_thread_in_a_process() -> None:
    """Decision 5: made on first use, and again after it was closed."""
    first = EngineThread.current()
    assert EngineThread.current() is first
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: EngineThread.current(), range(8))) == {first}
    first.close()
    second = EngineThread.current()
    assert second is not first
    assert second.run(name_of_thread) == "sandbox-engine"
    second.close()


def test_a_thread_without_a_loop_can_call(thread: EngineThread) -> None:
    """Decision 5: the blocking kernel manager runs no loop."""
    assert thread.run(name_of_thread) == "sandbox-engine"

    async def double(number: int) -> int:
        return number * 2

    assert thread.run(double, 21) == 42


async def test_a_thread_with_a_running_loop_can_block_on_it(thread: EngineThread) -> None:
    """Decision 5: blocking calls of the magics come from within a running loop."""
    assert thread.run(name_of_thread) == "sandbox-engine"


async def test_a_coroutine_of_another_loop_can_await_it(thread: EngineThread) -> None:
    """Decision 5: the caller's loop goes on meanwhile."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    ticking = asyncio.create_task(tick())
    await thread.call(asyncio.sleep, 0.2)
    ticking.cancel()
    assert ticks > 5
    assert await thread.call(name_of_thread) == "sandbox-engine"


async def test_a_call_from_its_own_loop_does_not_hop(thread: EngineThread) -> None:
    """Decision 5: layers above need not know where they run; blocking there is refused."""

    async def inner() -> str:
        with pytest.raises(RuntimeError, match="wait for itself"):
            thread.run(name_of_thread)
        return await thread.call(name_of_thread)

    assert await thread.call(inner) == "sandbox-engine"


async def test_an_exception_comes_across(thread: EngineThread) -> None:
    """Decision 5: the caller sees what was raised."""

    async def fail() -> None:
        raise SandboxUnavailableError("lost", "gone")

    with pytest.raises(SandboxUnavailableError):
        await thread.call(fail)
    with pytest.raises(SandboxUnavailableError):
        thread.run(fail)


async def test_cancelling_the_caller_unwinds_the_work_first(thread: EngineThread) -> None:
    """Decision 5: when the cancelled call returns, its work has ended, also if asked twice."""
    work = Unwinding()
    task = asyncio.create_task(thread.call(work.forever))
    await asyncio.to_thread(work.began.wait, 5)
    task.cancel()
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.ended


async def test_cancelling_the_work_cancels_the_caller(thread: EngineThread) -> None:
    """Decision 5: the other direction."""

    async def quit() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await thread.call(quit)
    with pytest.raises(concurrent.futures.CancelledError):
        thread.run(quit)


def test_a_timeout_unwinds_the_work(thread: EngineThread) -> None:
    """Decision 5: a blocking call is bounded."""
    work = Unwinding()
    with pytest.raises(TimeoutError):
        thread.run(work.forever, timeout=0.1)
    assert work.ended


def test_a_timeout_of_the_work_itself_is_passed_on(thread: EngineThread) -> None:
    """Decision 5: not taken for the bound of the call."""

    async def slow() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        thread.run(slow, timeout=5)


def test_an_interrupt_unwinds_the_work(thread: EngineThread) -> None:
    """Decision 5: Ctrl-C in a console ends what was started, then raises."""
    work = Unwinding()
    interrupt = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        thread.run(work.forever)
    interrupt.join()
    assert work.ended


async def test_a_result_that_nobody_takes_is_discarded(thread: EngineThread) -> None:
    """B13: work that won the race against its cancellation does not leak what it made."""
    discarded: list[str] = []
    reached = threading.Event()

    async def make() -> str:
        reached.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "made after all"
        raise AssertionError

    async def discard(result: str) -> None:
        await asyncio.sleep(0.05)
        discarded.append(result)

    task = asyncio.create_task(thread.call(make, discard=discard))
    await asyncio.to_thread(reached.wait, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert discarded == ["made after all"]
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(thread.run, make, timeout=0.05, discard=discard)
    assert discarded == ["made after all"] * 2
    assert await thread.call(name_of_thread, discard=discard) == "sandbox-engine"
    assert len(discarded) == 2


def test_work_outlives_a_loop_that_is_closed(thread: EngineThread) -> None:
    """Decision 5: a manager's loop ends between two calls; what it began goes on."""
    done = threading.Event()

    async def work() -> None:
        await asyncio.sleep(0.2)
        done.set()

    loop = asyncio.new_event_loop()
    task = loop.create_task(thread.call(work))
    loop.run_until_complete(asyncio.sleep(0.05))
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    assert done.wait(5)
    assert thread.run(name_of_thread) == "sandbox-engine"


def test_a_caller_that_is_destroyed_cancels_its_work(thread: EngineThread) -> None:
    """B13: nobody will take the result, and there is no loop to wait in."""
    work = Unwinding()
    loop = asyncio.new_event_loop()
    caller = thread.call(work.forever)
    task = loop.create_task(caller)
    loop.run_until_complete(asyncio.sleep(0.05))
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    assert work.began.wait(5)
    caller.close()
    wait_until(lambda: work.ended, what="the work to be cancelled")


async def test_an_engine_is_opened_once_and_kept(thread: EngineThread, endpoint: Endpoint) -> None:
    """Decision 5: all callers share the connections of an endpoint."""
    first, second = await asyncio.gather(thread.engine(endpoint), thread.engine(endpoint))
    assert first is second
    assert (await thread.call(first.version))["Version"]
    assert thread.run(thread.engine, endpoint) is first


async def test_renewed_certificates_are_used_by_whoever_asks_next(
    thread: EngineThread, engines: Engines, tmp_path: Path
) -> None:
    """E2: what runs on the old connection goes on; files that cannot be used change nothing."""
    for name in ("cert", "key", "ca"):
        shutil.copy2(engines.certs / f"{name}.pem", tmp_path)
    endpoint = dataclasses.replace(engines.tls_endpoint, tls=TlsFiles.in_directory(tmp_path))
    first = await thread.engine(endpoint)
    assert await thread.engine(endpoint) is first
    good = (tmp_path / "cert.pem").read_bytes()
    (tmp_path / "cert.pem").write_bytes(b"half of it")
    assert await thread.engine(endpoint) is first
    (tmp_path / "new.pem").write_bytes(good)
    (tmp_path / "new.pem").chmod(0o600)
    (tmp_path / "new.pem").replace(tmp_path / "cert.pem")
    second = await thread.engine(endpoint)
    assert second is not first
    assert await thread.engine(endpoint) is second
    for engine in (first, second):
        await thread.call(engine.ping)
    await asyncio.to_thread(thread.close)
    for engine in (first, second):
        assert engine._docker is None


async def test_an_engine_that_failed_to_open_is_tried_again(thread: EngineThread) -> None:
    """E4: a failure is not kept."""
    gone = Endpoint("unix:///no/such.sock")
    for _ in range(2):
        with pytest.raises(SandboxUnavailableError):
            await thread.engine(gone)


def test_closing_runs_what_was_registered_and_ends_everything(engine_unix: Endpoint) -> None:
    """B13: clean-up happens in the engine's loop, with the engines still open."""
    thread = EngineThread()
    seen: list[str] = []
    engine = thread.run(thread.engine, engine_unix)

    async def clean() -> None:
        seen.append((await engine.version())["Version"])

    async def fail() -> None:
        raise ValueError

    thread.at_exit(fail)
    thread.at_exit(clean)
    withdraw = thread.at_exit(clean)
    withdraw()
    withdraw()
    background = Unwinding()
    pool = concurrent.futures.ThreadPoolExecutor(1)
    waiting = pool.submit(thread.run, background.forever)
    assert background.began.wait(5)
    thread.close()
    thread.close()
    assert len(seen) == 1
    assert background.ended
    assert isinstance(waiting.exception(5), concurrent.futures.CancelledError)
    pool.shutdown()
    assert thread.loop.is_closed()
    with pytest.raises(RuntimeError, match="has ended"):
        thread.run(name_of_thread)


def test_closing_is_bounded() -> None:
    """B13: clean-up that hangs does not hang the process."""
    thread = EngineThread()

    async def hang() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                break

    thread.at_exit(hang)
    began = time.monotonic()
    thread.close(0.3)
    assert time.monotonic() - began < 3


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_child_after_a_fork_has_a_thread_of_its_own(engine_unix: Endpoint) -> None:
    """Decision 5: the parent's connections are left alone and go on working."""
    code = """
        import os, sys, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        from sandbox_kernel.engine.endpoint import Endpoint, TlsFiles
        from sandbox_kernel.engine.thread import EngineThread
        endpoint = Endpoint(sys.argv[1])
        def use():
            thread = EngineThread.current()
            engine = thread.run(thread.engine, endpoint, timeout=10)
            return thread, thread.run(engine.version, timeout=10)["Version"]
        parent, version = use()
        pid = os.fork()
        if pid == 0:
            child, same = use()
            assert child is not parent and same == version
            parent.close()  # without effect
            child.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert use() == (parent, version)
        print("fine")
    """
    result = run_python(code, engine_unix.url)
    assert (result.returncode, result.stdout, result.stderr) == (0, "fine\n", "")


def test_the_end_of_the_process_cleans_up_and_is_bounded(engine_unix: Endpoint) -> None:
    """B13: at exit what was registered runs, also when the main thread raised."""
    code = """
        import sys, asyncio
        from sandbox_kernel.engine.endpoint import Endpoint, TlsFiles
        from sandbox_kernel.engine.thread import EngineThread
        thread = EngineThread.current()
        engine = thread.run(thread.engine, Endpoint(sys.argv[1]))
        async def clean():
            print("cleaned with", bool(await engine.version()), flush=True)
        thread.at_exit(clean)
        thread.at_exit(asyncio.Event().wait)
        sys.exit(3)
    """
    began = time.monotonic()
    result = run_python(code, engine_unix.url)
    assert (result.returncode, result.stdout) == (3, "cleaned with True\n")
    assert "Error" not in result.stderr
    assert time.monotonic() - began < 12


def test_many_threads_hop_at_once(thread: EngineThread) -> None:
    """Decision 5: results are not mixed up."""

    async def echo(number: int) -> int:
        await asyncio.sleep(0)
        return number

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: thread.run(echo, n), range(400)))
    assert results == list(range(400))
    wait_until(lambda: not thread._jobs, what="the set of jobs to be empty")


async def test_reading_a_stream_across_threads_works(
    thread: EngineThread, engine: Engine, container: str
) -> None:
    """Decision 5: a whole exchange runs in the engine's loop."""
    other = await thread.engine(engine.endpoint)

    async def exchange() -> bytes:
        async with await other.exec(container, ["cat"], user="10001") as stream:
            await stream.write(b"hello")
            chunk = await stream.read()
            return b"" if chunk is None else chunk.data

    assert await thread.call(exchange) == b"hello"
