"""Cancellation at every await of every call: nothing is left, wherever it strikes (W14, W15, W21).

An injector drives a coroutine and cancels its task while it waits for the n-th time, for n from
1 on until the coroutine ends without having waited so often.
"""

from __future__ import annotations

import asyncio
import functools
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

import pytest

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import SandboxError
from sandbox_kernel.process.command import start
from sandbox_kernel.process.run import run
from sandbox_kernel.sandbox.live import CODE_USER
from tests.engines import Engines
from tests.process.conftest import PATIENCE, MakeContainer

T = TypeVar("T")
BATCH = 6
UID = CODE_USER.partition(":")[0]


@types.coroutine
def cancelled_at(
    number: int, again: bool, work: Coroutine[Any, Any, T]
) -> Generator[Any, Any, tuple[T, int]]:
    """Await a coroutine, and cancel it as it waits for the n-th time, or then each time."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    step: Callable[[], Any] = functools.partial(work.send, None)
    count = 0
    while True:
        try:
            waited = step()
        except StopIteration as end:
            return end.value, count
        count += 1
        if count == number or (again and count > number):
            loop.call_soon(task.cancel)
        try:
            yield waited
        except BaseException as error:
            step = functools.partial(work.throw, error)
        else:
            step = functools.partial(work.send, None)


async def test_the_injector_cancels_at_the_nth_await_and_counts_them() -> None:
    """The instrument itself."""
    seen: list[str] = []

    async def work() -> int:
        for name in "abc":
            seen.append(name)
            await asyncio.sleep(0.001)
        return 7

    for number, expected in ((1, "a"), (2, "ab"), (3, "abc")):
        seen.clear()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(_driven(number, False, work()))
        assert "".join(seen) == expected
    assert await asyncio.create_task(_driven(4, False, work())) == (7, 3)


async def _driven(number: int, again: bool, work: Coroutine[Any, Any, T]) -> tuple[T, int]:
    return await cancelled_at(number, again, work)


class Leftovers:
    """What may be left of commands in one container, and here."""

    def __init__(self, engines: Engines, engine: Engine, container: str) -> None:
        self._api = engines.api
        self._id = container
        self._engine = engine
        self._tasks = asyncio.all_tasks()
        self._streams = self._open()

    def _open(self) -> int:
        connector: Any = self._engine._docker.connector  # type: ignore[union-attr]
        return len(connector._acquired)

    def here(self) -> list[object]:
        """Return the tasks and streams that are left."""
        found: list[object] = [t for t in asyncio.all_tasks() - self._tasks if not t.done()]
        if self._open() > self._streams:
            found.append(f"{self._open() - self._streams} streams")
        return found

    def there(self) -> list[object]:
        """Return the processes and execs; by other eyes than the product's."""
        top = self._api.get(f"/containers/{self._id}/top", ps_args="-eo uid,pid,args")
        found: list[object] = [row for row in top["Processes"] or () if row[0] == UID]
        inspected = self._api.inspect(self._id)
        assert inspected is not None
        for exec_id in inspected["ExecIDs"] or ():
            try:
                state = self._api.get(f"/exec/{exec_id}/json")
            except LookupError:
                continue
            if state["Running"]:
                found.append(f"exec {exec_id[:8]}")
        return found


Case = Callable[[Engine, str], Coroutine[Any, Any, object]]


async def one_shot(engine: Engine, container: str) -> object:
    argv = ["sh", "-c", "cat; (sleep 0.3; echo late) & setsid sleep 0.2; exit 3"]
    return await run(engine, container, argv, user=CODE_USER, stdin=b"in", idle_timeout=50)


async def killed(engine: Engine, container: str) -> object:
    async with await start(engine, container, ["sleep", "7601"], user=CODE_USER) as process:
        await process.interrupt()
        await process.kill()
    return process.exit


async def all_killed(engine: Engine, container: str) -> object:
    async with await start(engine, container, ["sleep", "7606"], user=CODE_USER) as process:
        await process.kill(everything=True)
    return process.exit


async def closed(engine: Engine, container: str) -> object:
    process = await start(engine, container, ["true"], user=CODE_USER)
    try:
        await process.wait()
    finally:
        await process.close()
    return process.exit


async def left_behind(engine: Engine, container: str) -> object:
    argv = ["sh", "-c", "setsid sleep 7602 & exec sleep 7603"]
    async with await start(engine, container, argv, user=CODE_USER, timeout=60) as process:
        await process.write(b"text")
        await process.end_input()
    return process.exit


async def timed_out(engine: Engine, container: str) -> object:
    try:
        return await run(engine, container, ["sleep", "7604"], user=CODE_USER, timeout=0.2)
    except SandboxError as error:
        return error


async def on_a_terminal(engine: Engine, container: str) -> object:
    async with await start(
        engine, container, ["sleep", "7605"], user=CODE_USER, tty=(24, 80)
    ) as process:
        await process.resize(30, 90)
    return process.exit


@pytest.mark.timeout(600)
@pytest.mark.parametrize("again", [False, True], ids=["once", "again-and-again"])
@pytest.mark.parametrize(
    "case", [one_shot, killed, all_killed, closed, left_behind, timed_out, on_a_terminal]
)
async def test_a_cancellation_leaves_nothing_wherever_it_strikes(
    engines: Engines,
    engine: Engine,
    make_container: MakeContainer,
    busybox_image: str,
    case: Case,
    again: bool,
) -> None:
    """W14, W15, W21, issue 3: no process, no exec, no task and no stream."""
    # Not a sandbox, which has tasks of its own that come and go.
    container = await make_container(busybox_image, ["sleep", "600"], Init=True)
    # The reader of the engine's events stays, as it is shared by all; let it be there.
    await case(engine, container)
    left = Leftovers(engines, engine, container)
    # What ends everything of the user would end the others of a batch too.
    batch = 1 if case is all_killed else BATCH
    cancelled, awaits = 0, 0
    while awaits == 0:
        numbers = range(cancelled + 1, cancelled + batch + 1)
        tasks = [
            asyncio.create_task(_driven(number, again, case(engine, container)))
            for number in numbers
        ]
        for number, outcome in zip(
            numbers, await asyncio.gather(*tasks, return_exceptions=True), strict=True
        ):
            if isinstance(outcome, tuple):
                # It ended before it had waited that often.
                awaits = outcome[1] or 1
            else:
                assert isinstance(outcome, asyncio.CancelledError), (number, outcome)
                cancelled = number
        await nothing(left, numbers)
    assert cancelled >= 4


async def nothing(left: Leftovers, numbers: range) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE
    # What is here is awaited by its owner; an exec's end may be recorded a moment later.
    assert left.here() == [], numbers
    while found := await asyncio.to_thread(left.there):
        assert asyncio.get_running_loop().time() < deadline, (numbers, found)
        await asyncio.sleep(0.05)
