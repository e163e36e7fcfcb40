"""The thread in whose loop runs are awaited, so that a cell can wait, show and be interrupted.

There is one in a process, started on first use. It only awaits: what it awaits happens in the
engine's own thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Final, Generic, TypeVar

__all__ = ["Job", "Worker"]

T = TypeVar("T")

_UNWIND_BOUND: Final = 30.0


class Worker:
    """A daemon thread with an event loop; `current` gives the one of this process."""

    _current: ClassVar[Worker | None] = None
    _guard: ClassVar[threading.Lock] = threading.Lock()
    # Of a parent process; collecting their loops would touch what the parent still uses.
    _inherited: ClassVar[list[Worker]] = []

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="sandbox-magics", daemon=True
        )
        self._thread.start()

    @classmethod
    def current(cls) -> Worker:
        """Return the worker of this process."""
        with cls._guard:
            worker = cls._current
            if worker is not None and worker._pid != os.getpid():
                cls._inherited.append(worker)
                worker = None
            if worker is None:
                worker = cls._current = cls()
            return worker

    def submit(self, work: Coroutine[Any, Any, T]) -> Job[T]:
        """Start work in the loop."""
        job = Job[T](self.loop)
        self.loop.call_soon_threadsafe(job._start, work)
        return job

    def call(self, work: Callable[[], object]) -> None:
        """Have a plain function called in the loop, soon."""
        self.loop.call_soon_threadsafe(work)

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Wait for work; an interrupt of the waiting cancels it and waits until it has unwound.

        Parameters
        ----------
        work
            What to await.
        timeout
            Seconds after which it is cancelled and `TimeoutError` raised.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("the worker cannot wait for itself")
        job = self.submit(work)
        try:
            return job.result(timeout)
        except BaseException:
            job.cancel()
            job.ended.wait(_UNWIND_BOUND)
            raise


class Job(Generic[T]):
    """Work in the loop of a `Worker`; made by `Worker.submit`.

    Attributes
    ----------
    ended
        Set when it has ended, however it did.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ended = threading.Event()
        self._loop = loop
        self._task: asyncio.Task[T] | None = None

    def _start(self, work: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(lambda _: self.ended.set())

    def cancel(self) -> None:
        """Cancel it, from any thread; it may take a while to unwind."""
        self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())

    def result(self, timeout: float | None = None) -> T:
        """Wait for it, from any other thread, and return what it returns.

        Raises
        ------
        TimeoutError
            It has not ended in time, and goes on.
        """
        if not self.ended.wait(timeout):
            raise TimeoutError
        assert self._task is not None
        if self._task.cancelled():
            raise concurrent.futures.CancelledError
        return self._task.result()


def _forget_in_child() -> None:
    # The lock may have been held by a thread that does not exist in the child.
    Worker._guard = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
