"""The engine thread: one daemon thread with one event loop per process (decision 5).

A blocking kernel manager runs no event loop between calls, and a busy notebook server must
not stall a kernel; so every connection to an engine lives in the loop of this thread, and
callers hop onto it. A hop takes cancellation along in both directions and ends only when
what it started has ended.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ClassVar, Generic, TypeVar

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.endpoint import Endpoint, TlsFiles
from sandbox_kernel.errors import SandboxError

__all__ = ["EngineThread"]

log = logging.getLogger(__name__)

FilesState = tuple[tuple[int, ...], ...]
T = TypeVar("T")
Work = Callable[..., Coroutine[Any, Any, T]]
Discard = Callable[[T], Awaitable[object]]

EXIT_BOUND = 5.0
"""How long the end of the process may take for the sake of sandboxes, in seconds."""

_UNWIND_BOUND = 30.0


class EngineThread:
    """The thread that owns every engine of this process; `current` gives it.

    After a fork the child makes a thread of its own on first use and leaves the parent's
    connections alone.
    """

    _current: ClassVar[EngineThread | None] = None
    _guard: ClassVar[threading.Lock] = threading.Lock()
    # Threads of a parent process; collecting their loops in the child would touch an epoll
    # instance that the parent still uses.
    _inherited: ClassVar[list[EngineThread]] = []

    def __init__(self) -> None:
        self._pid = os.getpid()
        # Not the policy's choice: the half close of TLS streams relies on asyncio's own loop.
        self.loop: asyncio.AbstractEventLoop = asyncio.SelectorEventLoop()
        self._engines: dict[Endpoint, Engine] = {}
        self._certificates: dict[Endpoint, FilesState] = {}
        self._retired: list[Engine] = []
        self._opening: dict[Endpoint, asyncio.Lock] = {}
        self._at_exit: dict[object, Callable[[], Awaitable[object]]] = {}
        self._jobs: set[_Job[Any]] = set()
        self._submitting = threading.Lock()
        self._closed = False
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, args=(started,), name="sandbox-engine", daemon=True
        )
        self._thread.start()
        started.wait()

    @classmethod
    def current(cls) -> EngineThread:
        """Return this process's engine thread, started on first use."""
        with cls._guard:
            thread = cls._current
            if thread is not None and thread._pid != os.getpid():
                cls._inherited.append(thread)
                thread = None
            if thread is None or thread._closed:
                thread = cls._current = cls()
            return thread

    def _serve(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(started.set)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    # -- hopping ------------------------------------------------------------------------------

    def run(
        self,
        work: Work[T],
        *args: Any,
        timeout: float | None = None,
        discard: Discard[T] | None = None,
    ) -> T:
        """Run a coroutine function in the engine's loop and block until it has ended.

        An interrupt of the waiting (``KeyboardInterrupt``, the timeout) cancels the work and
        waits until it has unwound.

        Parameters
        ----------
        work, args
            What to call in the engine's loop.
        timeout
            Seconds after which the work is cancelled and `TimeoutError` raised.
        discard
            Called with the result, in the engine's loop, when the work succeeded after all
            but nobody will take its result; for results that hold resources.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("the engine thread must not wait for itself")
        job = self._submit(work, args, discard)
        try:
            return job.outcome.result(timeout)
        except BaseException:
            concurrent.futures.wait([job.abandon()], _UNWIND_BOUND)
            raise

    async def call(self, work: Work[T], *args: Any, discard: Discard[T] | None = None) -> T:
        """Run a coroutine function in the engine's loop and await it in this one.

        Cancelling the caller cancels the work and waits until that has unwound.

        Parameters
        ----------
        work, args
            What to call in the engine's loop.
        discard
            As in `run`.
        """
        here = asyncio.get_running_loop()
        if here is self.loop:
            return await work(*args)
        job = self._submit(work, args, discard)
        ended = here.create_future()

        def tell(_: object) -> None:
            # RuntimeError: the caller's loop was closed, nobody is waiting any more.
            with contextlib.suppress(RuntimeError):
                here.call_soon_threadsafe(_set, ended)

        job.outcome.add_done_callback(tell)
        try:
            await asyncio.shield(ended)
        except GeneratorExit:
            # The caller is destroyed without a loop to run in; nothing can be awaited.
            job.abandon()
            raise
        except BaseException:
            await _until(asyncio.wrap_future(job.abandon()))
            raise
        if job.outcome.cancelled():
            raise asyncio.CancelledError
        return job.outcome.result()

    def _submit(self, work: Work[T], args: tuple[Any, ...], discard: Discard[T] | None) -> _Job[T]:
        with self._submitting:
            if self._closed or self._pid != os.getpid():
                raise RuntimeError("this engine thread has ended; use EngineThread.current()")
            return _Job(self.loop, self._jobs, work, args, discard)

    # -- engines ------------------------------------------------------------------------------

    async def engine(self, endpoint: Endpoint) -> Engine:
        """Return the open engine of an endpoint, from any loop.

        It is opened once and then kept, until its certificate files are renewed: what runs on
        the old connections goes on, and whoever asks gets the new ones.
        """
        return await self.call(self._engine, endpoint)

    async def _engine(self, endpoint: Endpoint) -> Engine:
        async with self._opening.setdefault(endpoint, asyncio.Lock()):
            engine = self._engines.get(endpoint)
            certificates = _state_of(endpoint.tls)
            if engine is not None and certificates == self._certificates[endpoint]:
                return engine
            made = Engine(endpoint)
            try:
                await made.open()
            except SandboxError as error:
                if engine is None:
                    raise
                # They may be half renewed; the next one who asks looks again.
                log.warning("renewed certificate files cannot be used yet: %s", error)
                return engine
            if engine is not None:
                self._retired.append(engine)
            self._engines[endpoint], self._certificates[endpoint] = made, certificates
            return made

    # -- the end ------------------------------------------------------------------------------

    def at_exit(self, work: Callable[[], Awaitable[object]]) -> Callable[[], None]:
        """Have a coroutine function called in this loop when the process ends.

        All of them together get `EXIT_BOUND` seconds. Returns a function that withdraws it.
        """
        registration = object()
        self._at_exit[registration] = work

        def withdraw() -> None:
            self._at_exit.pop(registration, None)

        return withdraw

    def close(self, timeout: float = EXIT_BOUND) -> None:
        """Run what was registered, close the engines and end the thread. Idempotent.

        Parameters
        ----------
        timeout
            Bound for all of it, in seconds; what is not done by then is dropped.
        """
        if self._closed or self._pid != os.getpid():
            return
        if threading.current_thread() is self._thread:
            raise RuntimeError("the engine thread cannot end itself")
        try:
            self.run(self._wind_down, timeout, timeout=timeout + 1)
        except (Exception, asyncio.CancelledError, concurrent.futures.CancelledError) as error:
            log.warning("the engine thread did not end cleanly: %s", error)
        finally:
            with self._submitting:
                self._closed = True
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(1.0)
            for job in tuple(self._jobs):
                job.drop()

    async def _wind_down(self, timeout: float) -> None:
        registered, self._at_exit = list(self._at_exit.values()), {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                done = await asyncio.gather(*(w() for w in registered), return_exceptions=True)
                for problem in done:
                    if isinstance(problem, BaseException):
                        log.warning("clean-up at exit failed: %s", problem)
        engines, self._engines = [*self._engines.values(), *self._retired], {}
        for engine in engines:
            with contextlib.suppress(Exception):
                await engine.close()
        mine = asyncio.current_task()
        rest = [task for task in asyncio.all_tasks() if task is not mine]
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=1.0)


def _state_of(files: TlsFiles | None) -> FilesState:
    """Return what tells files apart from what takes their place."""
    found: list[tuple[int, ...]] = []
    for path in () if files is None else (files.cert, files.key, files.ca):
        with contextlib.suppress(OSError):
            status = os.stat(path)  # noqa: PTH116
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)


class _Job(Generic[T]):
    """One piece of work in the engine's loop; `outcome` is set only when it has ended."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        jobs: set[_Job[Any]],
        work: Work[T],
        args: tuple[Any, ...],
        discard: Discard[T] | None,
    ) -> None:
        self.outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._loop = loop
        self._jobs = jobs
        self._work = work
        self._args = args
        self._discard = discard
        self._task: asyncio.Task[None] | None = None
        jobs.add(self)
        loop.call_soon_threadsafe(self._start)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        try:
            result = await self._work(*self._args)
        except asyncio.CancelledError:
            self.outcome.cancel()
            self.outcome.set_running_or_notify_cancel()
        except BaseException as error:
            # SystemExit and its like are the caller's; here they would end the thread.
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(result)
        finally:
            self._jobs.discard(self)

    def abandon(self) -> concurrent.futures.Future[None]:
        """Cancel the work, from any thread; the future is done when it has unwound."""
        if not (self.outcome.done() and self._has_no_result()):
            unwind = self._unwind()
            try:
                return asyncio.run_coroutine_threadsafe(unwind, self._loop)
            except RuntimeError:
                # The loop was closed, and everything in it ended before that.
                unwind.close()
        ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        ended.set_result(None)
        return ended

    def drop(self) -> None:
        """Release whoever waits, when the loop has ended without getting to this work."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.outcome.set_exception(RuntimeError("the engine thread has ended"))

    def _has_no_result(self) -> bool:
        return self.outcome.cancelled() or self.outcome.exception() is not None

    async def _unwind(self) -> None:
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        if self._discard is None or self._has_no_result():
            return
        # It won the race against the cancellation, and nobody is there to take the result.
        try:
            await self._discard(self.outcome.result())
        except Exception as error:
            log.warning("a result that nobody waited for could not be undone: %s", error)


def _set(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


async def _until(ended: asyncio.Future[None]) -> None:
    """Wait, bounded, for work to unwind; further cancellations do not cut that short."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _UNWIND_BOUND
    while not ended.done() and (left := deadline - loop.time()) > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([ended], timeout=left)


def _end_current() -> None:
    thread = EngineThread._current
    if thread is not None:
        thread.close()


def _forget_in_child() -> None:
    # The lock may have been held by a thread that does not exist in the child.
    EngineThread._guard = threading.Lock()


atexit.register(_end_current)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
