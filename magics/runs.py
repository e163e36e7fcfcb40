"""`Run`: one command in a sandbox from its start to its result, and `Runs`, all of a process.

A run is awaited in the worker's loop, whether a cell waits for it or not. Its output is recorded
and made ready to be shown here; showing it is the affair of whoever watches.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sandbox_magics import view
from sandbox_magics.capture import STDERR, STDOUT, Record
from sandbox_magics.outlet import Outlet, PaceKeeper, Piece
from sandbox_magics.request import Request
from sandbox_magics.result import Reason, SandboxResult
from sandbox_magics.sandboxes import Place
from sandbox_magics.text import Cleaner, Decoder, Masker
from sandbox_magics.worker import Job, Worker

from sandbox_kernel.amounts import memory_text

if TYPE_CHECKING:
    from sandbox_kernel.errors import SandboxError
    from sandbox_kernel.process.result import Exit
    from sandbox_kernel.sandbox.facade import Sandbox
    from sandbox_kernel.sandbox.program import SandboxProcess

__all__ = ["GRACE", "Run", "Runs"]

log = logging.getLogger(__name__)

GRACE: Final = 2.0
"""Seconds between the interrupt of a run and its kill."""

KEPT_RUNS: Final = 20
"""How many runs that have ended are remembered, with what they wrote."""

_TERMINAL: Final = (24, 80)
_FEED: Final = 1 << 20
_AFTER: Final = 20.0


class Run:
    """One run; made by `Runs.add`.

    Attributes
    ----------
    id
        For people and for ``%sandbox_kill``, for example ``r12``.
    news
        Set when there is something new to show, and when it has ended.
    ended
        Set when it has ended, however it did.
    waiting_for
        What it is doing, for people.
    notes
        What else is to be said, by whoever shows it.
    """

    def __init__(
        self, number: int, request: Request, place: Place, pace: PaceKeeper | None = None
    ) -> None:
        self.id = f"r{number}"
        self.request = request
        self.started = datetime.now().astimezone()
        self.news = threading.Event()
        self.ended = threading.Event()
        self.waiting_for = "connecting to the engine"
        self.notes: deque[str] = deque()
        self._place = place
        self._worker = Worker.current()
        self._record = Record(request.capture_limit)
        self._begun = time.monotonic()
        self._over = 0.0
        self._lock = threading.Lock()
        self._outlet = Outlet(time.monotonic, request.display_limit, pace)
        self._channels = {s: _Channel(request.secrets) for s in (STDOUT, STDERR)}
        self._limit_told = False
        self._process: SandboxProcess | None = None
        self._sandbox: Sandbox | None = None
        self._stopped: Reason | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._stopped_at = 0.0
        self._stop_failure = ""
        self._lost: SandboxError | None = None
        self._afterwards: Exception | None = None
        self._hurry = asyncio.Event()
        self._done = asyncio.Event()
        self._job: Job[None] | None = None
        self._result: SandboxResult | None = None
        self._error: Exception | None = None

    # -- for the person -----------------------------------------------------------------------

    @property
    def name(self) -> str:
        """What it is called."""
        return self.request.name

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return not self.ended.is_set()

    @property
    def duration(self) -> float:
        """Seconds since it was asked for, until its end."""
        return (self._over or time.monotonic()) - self._begun

    @property
    def result(self) -> SandboxResult | None:
        """What it gave; `None` while it runs, and when nothing was started."""
        return self._result

    @property
    def error(self) -> Exception | None:
        """What kept it from giving a result."""
        return self._error

    @property
    def afterwards(self) -> Exception | None:
        """What failed after the program had ended: copying something out."""
        return self._afterwards

    @property
    def lost(self) -> Exception | None:
        """What broke the connection to it, when its outcome is not known for that."""
        return self._lost

    @property
    def network(self) -> str:
        """The tier of its network."""
        return self._place.network

    def reattach(self, timeout: float = 10.0) -> SandboxResult:
        """Look again how it ended, after the connection was lost; see `SandboxUnknownOutcome`."""
        return self._worker.run(self._look_again(timeout), timeout + _AFTER)

    async def _look_again(self, timeout: float) -> SandboxResult:
        from sandbox_kernel.errors import SandboxUnknownOutcomeError

        process, sandbox = self._process, self._sandbox
        if self._lost is None or process is None or sandbox is None:
            assert self._result is not None
            return self._result
        ended = await process.reattach(timeout)
        if ended is None:
            raise SandboxUnknownOutcomeError(f"{self.id} still runs")
        told = self._ending(ended, sandbox)
        del told["artifacts"]
        self._result = self._make_result(sandbox, told)
        self._lost = None
        await process.close()
        return self._result

    def wait(self, timeout: float | None = None) -> SandboxResult:
        """Wait for the end.

        Parameters
        ----------
        timeout
            Seconds to wait; by default until it ends.

        Returns
        -------
        SandboxResult
            Also when it failed: ask its `ok`.

        Raises
        ------
        TimeoutError
            It still runs.
        SandboxError
            It could not be started, or its outcome is not known.
        """
        if not self.ended.wait(timeout):
            raise TimeoutError(f"{self.id} still runs")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def kill(self, signal: str = "KILL") -> None:
        """Stop it; nothing happens when it has ended.

        Parameters
        ----------
        signal
            ``KILL`` ends it with everything that it started, and waits for that. ``TERM`` and
            ``INT`` only tell the program.
        """
        if not self.running:
            return
        if signal == "KILL":
            self.stop("killed", grace=0)
            self.ended.wait(_AFTER)
        else:
            self._worker.run(self._tell(signal), _AFTER)

    def tail(self, lines: int = 10) -> str:
        """Return the last lines of what it has written so far."""
        text = self._record.interleaved().decode("utf-8", "replace")
        return "\n".join(text.splitlines()[-lines:])

    def __repr__(self) -> str:
        if self._result is not None:
            return f"<SandboxRun {self.id} {view.footer_text(self._result)}>"
        if self._error is not None:
            return f"<SandboxRun {self.id} {type(self._error).__name__}>"
        return f"<SandboxRun {self.id} running · {view.seconds(self.duration)}>"

    def _repr_html_(self) -> str:
        return view.run_html(self)

    # -- for whoever shows it -------------------------------------------------------------------

    def due(self, everything: bool = False) -> list[Piece]:
        """Return the messages that are to be shown now; see `Outlet.due`."""
        with self._lock:
            return self._outlet.due(everything)

    def delay(self) -> float | None:
        """Return the seconds until something is to be shown; `None` when nothing waits."""
        with self._lock:
            return self._outlet.delay()

    @property
    def wrote(self) -> bool:
        """Whether it has written anything."""
        return bool(self._record.total(STDOUT) or self._record.total(STDERR))

    @property
    def hidden(self) -> int:
        """How many characters were not shown for the limit of the display."""
        return self._outlet.hidden

    # -- stopping -------------------------------------------------------------------------------

    def stop(self, reason: Reason, grace: float = GRACE) -> None:
        """Begin to end it; again, it is ended without grace. A signal handler may call this.

        Parameters
        ----------
        reason
            ``interrupted`` or ``killed``.
        grace
            Seconds that it has after an interrupt; 0 for none.
        """

        def begin() -> None:
            if self._stopping is not None or grace == 0:
                self._hurry.set()
            if self._stopping is None and not self._done.is_set():
                self._stopped = reason
                self._stopped_at = time.monotonic()
                self._stopping = asyncio.create_task(self._stop(grace))

        self._worker.call(begin)

    @property
    def stopping(self) -> float:
        """Seconds since it was told to end; 0 when it was not."""
        return time.monotonic() - self._stopped_at if self._stopped_at else 0.0

    @property
    def interrupted(self) -> bool:
        """Whether the Stop button was pressed."""
        return self._stopped == "interrupted"

    async def _stop(self, grace: float) -> None:
        from sandbox_kernel.errors import SandboxError

        process = self._process
        if process is None or self._result is not None:
            # Before the start of the work, that itself looks whether it is still wanted.
            if self._job is not None:
                self._job.cancel()
            return
        try:
            if grace > 0:
                with contextlib.suppress(SandboxError):
                    await self._reach(process.interrupt)
                    await self._wait_for_end(grace)
            # Also when the program has ended: what it left behind is of the run too.
            await self._reach(process.kill_leftovers)
        except SandboxError as error:
            log.warning("run %s could not be stopped: %s", self.id, error)
            self._stop_failure = str(error)

    async def _wait_for_end(self, seconds: float) -> None:
        waiting = [asyncio.create_task(e.wait()) for e in (self._hurry, self._done)]
        try:
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    async def _tell(self, signal: str) -> None:
        if self._process is not None:
            number = {"INT": 2, "TERM": 15}[signal]
            await self._reach(functools.partial(self._process.signal, number))

    async def _reach(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Do something to the program; in a sandbox that somebody has paused, resume it first."""
        from sandbox_kernel.errors import SandboxPausedError

        try:
            await work()
        except SandboxPausedError:
            if self._sandbox is None:
                raise
            await self._sandbox.resume()
            await work()

    # -- the run itself -------------------------------------------------------------------------

    def begin(self) -> None:
        """Start it; called once."""
        self._job = self._worker.submit(self._work())

    async def _work(self) -> None:
        try:
            await self._outcome()
        finally:
            self._over = time.monotonic()
            self._done.set()
            if self._stopping is not None:
                await asyncio.wait({self._stopping})
            if self._result is not None and (self._stop_failure or self._lost is not None):
                detail = self._result.detail or self._stop_failure
                self._result = replace(self._result, survivors=True, detail=detail)
            self.ended.set()
            self.news.set()

    async def _outcome(self) -> None:
        from sandbox_kernel.errors import SandboxError

        try:
            if self._stopped is not None:
                raise asyncio.CancelledError
            async with self._place.use(self) as sandbox:
                self._sandbox = sandbox
                if self.request.before is not None:
                    self.phase("copying into the sandbox")
                    await self.request.before(sandbox)
                self.phase("starting")
                ended = await self._run(sandbox)
                self._end_channels()
                self._over = time.monotonic()
                left = ended.pop("artifacts", True)
                self._result = self._make_result(sandbox, ended)
                if self._lost is None and sandbox.ended is None:
                    await self._look_after(sandbox, left)
        except asyncio.CancelledError:
            if self._result is None:
                self._result = self._make_result(self._sandbox, {"reason": "interrupted"})
        except (SandboxError, OSError, ValueError) as error:
            self._error = error

    async def _look_after(self, sandbox: Sandbox, left: bool) -> None:
        """Find what it left, and bring out what was asked for; the result is there already."""
        from sandbox_magics.artifacts import FOLDER, find

        from sandbox_kernel.errors import SandboxError

        assert self._result is not None
        try:
            if left:
                self.phase("looking for artifacts")
                artifacts = await find(sandbox, self._place.seen)
                self._result = replace(self._result, artifacts=artifacts)
            if self.request.copied:
                self.phase("copying artifacts")
                await sandbox.files.collect(self.request.copied, Path.cwd(), folder=FOLDER)
            if self.request.after is not None:
                self.phase("copying out of the sandbox")
                await self.request.after(sandbox)
        except (SandboxError, OSError, ValueError) as error:
            self._afterwards = error

    async def _run(self, sandbox: Sandbox) -> dict[str, Any]:
        """Run the command to its end, and return how it ended: fields of the result."""
        from sandbox_kernel.process.result import Chunk, CommandError, CommandTimeoutError

        request = self.request
        feeder: asyncio.Task[None] | None = None
        try:
            process = self._process = await sandbox.start(
                request.argv,
                timeout=self._timeout(sandbox),
                idle_timeout=request.idle_timeout,
                env=request.env,
                cwd=request.cwd,
                tty=_TERMINAL if request.tty else None,
            )
            self.phase("running")
            feeder = asyncio.create_task(_feed(process, request.stdin))
            async for item in process.output:
                if isinstance(item, Chunk):
                    self._took(item.stream, item.data)
                else:
                    return self._ending(item, sandbox)
        except CommandTimeoutError as error:
            for stream, count in ((STDOUT, error.stdout_bytes), (STDERR, error.stderr_bytes)):
                self._record.miss(stream, count - self._record.total(stream))
            left = any("the stop reported" in note for note in getattr(error, "__notes__", ()))
            what = "" if error.reason == "timeout" else " without output"
            detail = f"after {view.seconds(error.timeout)}{what}"
            return {"reason": error.reason, "detail": detail, "survivors": left}
        except CommandError as error:
            if error.reason == "engine-lost":
                self._lost = error
            return {"reason": error.reason, "detail": str(error)}
        finally:
            if feeder is not None:
                feeder.cancel()
                await asyncio.gather(feeder, return_exceptions=True)
            # What was lost sight of is not stopped: it can be found again.
            if self._process is not None and self._lost is None:
                await self._process.close()
        return {"reason": "unknown"}

    def _timeout(self, sandbox: Sandbox) -> float:
        asked, allowed = self.request.timeout, sandbox.timeouts
        if asked is None:
            return allowed.default
        return asked or allowed.most

    def _ending(self, ended: Exit, sandbox: Sandbox) -> dict[str, Any]:
        limits = {
            "out-of-memory": f"limit {memory_text(sandbox.limits.memory)}",
            "pids-limit": f"limit {sandbox.limits.pids}",
        }
        return {
            "returncode": ended.code,
            "reason": ended.reason,
            "detail": limits.get(ended.reason, ended.evidence),
            "peak_memory": ended.peak_memory,
            "cpu_seconds": ended.cpu_seconds,
            "survivors": ended.held,
            "artifacts": ended.artifacts,
        }

    def _make_result(self, sandbox: Sandbox | None, ended: dict[str, Any]) -> SandboxResult:
        if self._stopped is not None:
            # Whatever the program made of its interrupt.
            ended = {**ended, "reason": self._stopped, "detail": ""}
        return SandboxResult(
            run_id=self.id,
            name=self.name,
            argv=self.request.shown,
            record=self._record,
            started=self.started,
            duration=self.duration,
            image="" if sandbox is None else sandbox.spec.image,
            image_digest="" if sandbox is None else sandbox.image_id,
            network=self._place.network,
            consent=self.request.consent,
            **{"returncode": None, **ended},
        )

    # -- output ---------------------------------------------------------------------------------

    def phase(self, text: str) -> None:
        """Say what is being waited for."""
        self.waiting_for = text
        self.news.set()

    def note(self, text: str) -> None:
        """Say something that is worth to be kept."""
        self.notes.append(text)
        self.news.set()

    def _took(self, stream: int, data: bytes) -> None:
        channel = self._channels[stream]
        data = channel.masker.feed(data)
        self._record.add(stream, data)
        self._show(stream, channel, data)

    def _show(self, stream: int, channel: _Channel, data: bytes) -> None:
        if stream not in self.request.show:
            return
        with self._lock:
            if self._outlet.full:
                self._outlet.hidden += len(data)
                return
            self._outlet.add(stream, channel.cleaner.feed(channel.decoder.feed(data)))
        self.news.set()

    def _end_channels(self) -> None:
        for stream, channel in self._channels.items():
            data = channel.masker.rest()
            self._record.add(stream, data)
            self._show(stream, channel, data)
            if stream in self.request.show:
                text = channel.cleaner.feed(channel.decoder.rest()) + channel.cleaner.rest()
                with self._lock:
                    self._outlet.add(stream, text)


class _Channel:
    """What stands between the bytes of one stream and its text."""

    def __init__(self, secrets: tuple[str, ...]) -> None:
        self.masker = Masker(secret.encode() for secret in secrets)
        self.decoder = Decoder()
        self.cleaner = Cleaner()


async def _feed(process: SandboxProcess, data: bytes) -> None:
    from sandbox_kernel.errors import SandboxError

    # A program need not read its input; how it ends is told by its output.
    with contextlib.suppress(SandboxError):
        for start in range(0, len(data), _FEED):
            await process.write(data[start : start + _FEED])
        await process.end_input()


class Runs:
    """The runs of this process; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._running: dict[str, Run] = {}
        self._ended: deque[Run] = deque(maxlen=KEPT_RUNS)

    def add(self, request: Request, place: Place, pace: PaceKeeper | None = None) -> Run:
        """Return a run that can be started, and be stopped before that."""
        with self._lock:
            self._number += 1
            run = Run(self._number, request, place, pace)
            self._running[run.id] = run
        return run

    def find(self, name: str) -> Run | None:
        """Return the run with an id, or the newest one of a name."""
        return next((run for run in self if name in (run.id, run.name)), None)

    @property
    def running(self) -> list[Run]:
        """Those that run, the newest first."""
        return [run for run in self if run.running]

    def __iter__(self) -> Iterator[Run]:
        """Go through all that are remembered, the newest first."""
        with self._lock:
            for key in [key for key, run in self._running.items() if not run.running]:
                self._ended.append(self._running.pop(key))
            known = [*self._ended, *self._running.values()]
        return iter(sorted(known, key=lambda run: int(run.id[1:]), reverse=True))
