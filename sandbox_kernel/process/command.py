"""One command from its start to its end (contract W2-W23): `start` and `Process`.

What the command is travels over stdin only; the argv of the exec, which the engine shows to
everybody who watches its events, is the same for all. Tasks that belong to a `Process`: one
drains the engine's stream whatever the reader does, one listens to the engine's events, one
waits for each timeout; and it listens to the engine's `Heartbeat`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, Self, TypeVar

from sandbox_kernel.engine.client import Engine, ExecStream
from sandbox_kernel.errors import (
    SandboxError,
    SandboxGoneError,
    SandboxPausedError,
    SandboxSpecRejectedError,
    SandboxUnavailableError,
)
from sandbox_kernel.process.heartbeat import Heartbeat
from sandbox_kernel.process.intake import Intake
from sandbox_kernel.process.output import Sink, Spool
from sandbox_kernel.process.preamble import preamble
from sandbox_kernel.process.result import (
    Chunk,
    CommandError,
    CommandGoneError,
    CommandOutputError,
    CommandStartError,
    CommandTimeoutError,
    CommandUnknownError,
    Exit,
    Reason,
)
from sandbox_kernel.process.starting import Starts
from sandbox_kernel.process.stop import (
    STOP_TIMEOUT,
    Identity,
    Kind,
    StopReport,
    end_anyhow,
    stop,
    sweep,
)
from sandbox_kernel.process.verdict import CUT, KILLED, agree, verdict
from sandbox_kernel.process.wrapper import NoInitError, failure, remember, wrapper_argv

__all__ = ["Process", "start"]

log = logging.getLogger(__name__)

START_TIMEOUT: Final = 60.0
"""Seconds for a start from its turn on."""

OUTPUT_LIMIT: Final = 1024**3
_LARGEST_TERMINAL: Final = 10_000
_LARGEST_SIGNAL: Final = 64
_AFTER_STOP: Final = 4.0
_STATUS_PATIENCE: Final = 2.0
_BACK_PATIENCE: Final = 1.0
_ENGINE_TIMEOUT: Final = 5.0
_RECORD_PATIENCE: Final = 1.5
_FIRST_POLL, _LAST_POLL = 0.02, 0.3
_END_OF_TERMINAL_INPUT: Final = b"\x04"
_T = TypeVar("_T")


async def start(
    engine: Engine,
    container_id: str,
    argv: Sequence[str],
    *,
    user: str,
    env: Mapping[str, str] | None = None,
    cwd: str = "/",
    timeout: float | None = None,
    idle_timeout: float | None = None,
    tty: tuple[int, int] | None = None,
    output_limit: int = OUTPUT_LIMIT,
) -> Process:
    """Start a command; when this fails or is cancelled, the command has been stopped (W21).

    Parameters
    ----------
    engine, container_id
        Where; the full id.
    argv
        The command, without a shell; for shell text, ``["sh", "-c", text]``.
    user
        ``uid:gid`` that it runs as.
    env, cwd
        What is added to the container's environment, and the working directory.
    timeout
        Seconds after which the command is stopped and its output ends with
        `CommandTimeoutError`.
    idle_timeout
        The same, after so many seconds without any output.
    tty
        Rows and columns of a terminal to run it on; `None` for pipes. On a terminal all output is
        one stream, 1; the terminal echoes the input, puts a carriage return before
        each line end, and ends with the command, whoever else may hold it.
    output_limit
        Bytes of output after which it is stopped.

    Raises
    ------
    CommandStartError
        When nothing ran.
    CommandUnknownError
        When the engine was lost meanwhile.
    SandboxImageUnsuitableError
        When the image lacks a program that the wrapper needs.
    """
    return await launch(
        engine,
        container_id,
        argv,
        Spool(),
        user=user,
        env=env,
        cwd=cwd,
        timeout=timeout,
        idle_timeout=idle_timeout,
        tty=tty,
        output_limit=output_limit,
    )


async def launch(
    engine: Engine,
    container_id: str,
    argv: Sequence[str],
    sink: Sink,
    *,
    user: str,
    env: Mapping[str, str] | None,
    cwd: str,
    timeout: float | None,
    idle_timeout: float | None,
    tty: tuple[int, int] | None,
    output_limit: int,
    heartbeat: bool = True,
    stay: bool = False,
) -> Process:
    """Start a command whose output goes to a sink; otherwise as `start`.

    Parameters
    ----------
    heartbeat
        Whether the command counts as lost as soon as the engine is silent (W23); else the caller
        has a way of its own to notice that.
    stay
        Whether what the command leaves at its end is kept in reach of a stop, all of it. Then
        `over` tells of the command's end, and it is a `kill` that brings the output to its own.
    """
    for setting, seconds in (("timeout", timeout), ("idle_timeout", idle_timeout)):
        if seconds is not None and not seconds > 0:
            raise SandboxSpecRejectedError(
                setting, seconds, "it leaves the command no time", "Give a positive number."
            )
    if tty is not None:
        _check_size(tty)
    nonce, marker = secrets.token_hex(16), secrets.token_hex(8)
    sent = preamble(nonce, marker, argv, env or {}, cwd, stay=stay)
    kind: Kind = "pipes" if tty is None else "terminal"
    while True:
        process = Process(engine, container_id, user, kind, nonce, marker, sink, output_limit)
        try:
            await process._start(sent, tty)
        except BaseException as error:
            await _finish(process._abandon(error))
            if isinstance(error, NoInitError):
                remember(engine, container_id)
                continue
            sink.close()
            if isinstance(error, TimeoutError) and not isinstance(error, SandboxError):
                raise process._late_start() from error
            raise
        process._watch_time(timeout, idle_timeout)
        process._stays = stay
        if not heartbeat:
            await process._heartbeat.leave(process._lose)
        return process


class Process:
    """A command that runs; made by `start`, and an async context manager that stops it.

    Iterating gives each `Chunk` in order and last an `Exit`, or raises what ended it.
    """

    def __init__(
        self,
        engine: Engine,
        container_id: str,
        user: str,
        kind: Kind,
        nonce: str,
        marker: str,
        sink: Sink,
        output_limit: int,
    ) -> None:
        self._engine = engine
        self._container_id = container_id
        self._user = user
        self._kind: Kind = kind
        self._sink = sink
        self._intake = Intake(kind, nonce, marker, sink, output_limit, self._overflow)
        self._heartbeat = Heartbeat.of(engine)
        self._stream: ExecStream | None = None
        self._exec_id = ""
        self._input_ended = False
        # What has begun to end it; whoever sets it finishes the output too.
        self._ending: Literal["timeout", "idle-timeout", "output-limit"] | None = None
        self._code: int | None = None
        self._drained = asyncio.Event()
        self._ended = asyncio.Event()
        self._over = asyncio.Event()
        self._error: SandboxError | None = None
        self._held = False
        self._given = False
        self._killed = False
        self._interrupted = False
        self._out_of_memory = False
        self._swept = False
        self._silent = ""
        self._stays = False
        self._starting: asyncio.Timeout | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping: asyncio.Task[StopReport] | None = None

    @classmethod
    def of_another(
        cls, engine: Engine, container_id: str, identity: Identity, exec_id: str, *, user: str
    ) -> Process:
        """Return a command that a process started which is gone.

        It is like one of which the connection was lost: it can be signalled, killed and waited
        for with `reattach`, and nothing of its output is known.

        Parameters
        ----------
        engine, container_id
            Where; the full id.
        identity, exec_id
            What `identity` and `exec_id` were there.
        user
            ``uid:gid`` that it runs as.
        """
        sink = Spool()
        process = cls(engine, container_id, user, identity.kind, "", identity.marker, sink, 0)
        process._exec_id = exec_id
        process._intake.ready.set_result(identity)
        process._stays = True
        process._end(_lost("Whoever started the command has gone"))
        return process

    @property
    def exec_id(self) -> str:
        """What the engine calls its exec."""
        return self._exec_id

    @property
    def _is_lost(self) -> bool:
        return isinstance(self._error, CommandUnknownError) and self._error.reason == "engine-lost"

    @property
    def identity(self) -> Identity | None:
        """Its processes in the sandbox; `None` before they are known."""
        return self._intake.identity

    @property
    def pid(self) -> int:
        """The command's pid in the sandbox, known before its first byte of output."""
        if self.identity is None:
            raise RuntimeError("the command has not been started")
        return self.identity.pid

    @property
    def counts(self) -> dict[int, int]:
        """Bytes of output by stream, whether read or not."""
        return self._intake.counts

    # -- start --------------------------------------------------------------------------------

    async def _start(self, sent: bytes, tty: tuple[int, int] | None) -> None:
        self._heartbeat.join(self._lose)
        try:
            async with (
                asyncio.timeout(None) as self._starting,
                Starts.of(self._engine).turn(self._container_id),
            ):
                if not self._silent:
                    now = asyncio.get_running_loop().time()
                    self._starting.reschedule(now + START_TIMEOUT)
                await self._begin(sent, tty)
        finally:
            self._starting = None

    async def _begin(self, sent: bytes, tty: tuple[int, int] | None) -> None:
        self._stream = await self._engine.exec(
            self._container_id,
            wrapper_argv(self._engine, self._container_id, self._kind),
            user=self._user,
            tty=tty is not None,
        )
        self._exec_id = self._stream.id
        self._own(self._drain(self._stream))
        if tty is not None:
            await self._intake.hello
            await self._engine.resize_exec(self._stream.id, *tty)
        await self._stream.write(sent)
        watching: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._own(self._watch_events(watching))
        await asyncio.gather(watching, self._intake.ready)
        await self._stream.write(b"go\n")
        if tty is not None:
            await self._intake.running

    def _late_start(self) -> CommandError:
        if self._silent:
            return _lost(f"The engine was lost while the command started: {self._silent}")
        return CommandStartError(f"The command did not start within {START_TIMEOUT:g} s")

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="process-watch")
        self._tasks.add(task)
        task.add_done_callback(self._heed)

    def _heed(self, task: asyncio.Task[None]) -> None:
        """See to it that nobody waits for ever for what a task of ours should have done."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("watching a command in %s failed", self._container_id[:12], exc_info=error)
        unknown = _lost(f"Watching the command failed: {type(error).__name__}: {error}", error)
        self._intake.refuse(unknown)
        self._end(unknown)

    async def _can_stop(self) -> bool:
        """Whether a stop has anybody to ask: the engine, if it was silent, answers again."""
        if not self._silent:
            return True
        try:
            async with asyncio.timeout(_BACK_PATIENCE):
                await self._engine.ping()
        except (SandboxError, TimeoutError):
            return False
        return True

    async def _abandon(self, error: BaseException) -> None:
        """End what a failed start has left; without "go" nothing of the command can run."""
        if self._stream is not None and not self._drained.is_set():
            if self.identity is not None and await self._can_stop():
                await self._stop_noting(error, "all")
            elif self._kind == "terminal":
                # The end of a connection is not the end of a terminal's input.
                with contextlib.suppress(SandboxError):
                    await self._stream.write(b"\n\n")
        await self._let_go()

    # -- reading ------------------------------------------------------------------------------

    async def _drain(self, stream: ExecStream) -> None:
        """Read the engine's stream to its end, whatever becomes of the output."""
        trouble: SandboxError | None
        try:
            while (chunk := await stream.read()) is not None:
                self._intake.feed(chunk.stream, chunk.data)
            self._intake.end()
            trouble = await self._look_back(stream.id)
        except SandboxError as error:
            trouble = _lost(f"The connection to the engine broke: {error}", error)
        self._finish_output(trouble)

    async def _look_back(self, exec_id: str) -> SandboxError | None:
        """Ask the engine what the end of the stream meant; give the trouble, if any."""
        try:
            async with asyncio.timeout(_ENGINE_TIMEOUT):
                running, recorded = await self._recorded(exec_id, _RECORD_PATIENCE)
                if running:
                    return _lost("The connection to the engine broke")
                if recorded is not None and not self._intake.ready.done():
                    return failure(recorded, self._intake.early())
                if recorded is not None and agree(self._intake.code, recorded):
                    self._code = recorded
                    return None
                if self._swept:
                    return None
                if recorded == CUT and self._intake.code is None:
                    return _lost("The connection to the engine broke")
                return await self._missing_code(recorded)
        except SandboxUnavailableError as error:
            return _lost(f"The engine was lost: {error}", error)
        except (SandboxError, TimeoutError) as error:
            why = str(error) or "it gives no answer"
            return _lost(f"The engine does not tell how the command ended: {why}", error)

    async def _recorded(self, exec_id: str, patience: float) -> tuple[bool, int | None]:
        """Return whether the engine says that the wrapper runs, and else its code if it has one.

        The engine's record of an end can be a moment behind the stream's.
        """
        clock = asyncio.get_running_loop().time
        until, delay = clock() + patience, _FIRST_POLL
        while True:
            try:
                state = await self._engine.inspect_exec(exec_id)
            except SandboxGoneError:
                # Gone with its container, or with the memory of an engine that was restarted.
                return False, None
            if state.exit_code is not None and not state.running:
                return False, state.exit_code
            if clock() + delay > until:
                return True, None
            await asyncio.sleep(delay)
            delay = min(delay * 2, _LAST_POLL)

    async def _missing_code(self, recorded: int | None) -> SandboxError:
        """Tell why no code can be believed: the sandbox ended, the wrapper was killed, or worse."""
        state = await self._state_of_container(recorded)
        reason: Reason = "out-of-memory" if self._out_of_memory else "unknown"
        if state != "running":
            what = f"was {state}"
            if self._out_of_memory:
                what = "ran out of memory and ended"
            return CommandGoneError(f"The sandbox {what} while the command ran", reason)
        if recorded is None:
            return _lost("The engine was restarted and knows nothing of the command any more")
        if self._intake.code is None:
            why = "The command's wrapper was killed, so that its exit code is not known"
            if self._out_of_memory:
                why += "; the sandbox had no memory left"
            return CommandUnknownError(why, reason)
        return CommandUnknownError(
            f"The exit code is not known: {self._intake.code} was reported from the sandbox, and "
            f"the engine recorded {recorded}"
        )

    async def _state_of_container(
        self, recorded: int | None
    ) -> Literal["running", "stopped", "removed"]:
        """Ask whether the sandbox is still there.

        The processes of a container that ends are killed first, and it takes a moment until the
        engine says so of the container; therefore a 137 waits for that.
        """
        patience = _RECORD_PATIENCE if recorded == KILLED else 0.0
        clock = asyncio.get_running_loop().time
        until = clock() + patience
        while True:
            try:
                inspected = await self._engine.inspect_container(self._container_id)
            except SandboxGoneError:
                return "removed"
            if not inspected["State"].get("Running"):
                return "stopped"
            if clock() + _LAST_POLL > until:
                return "running"
            await asyncio.sleep(_LAST_POLL)

    def _finish_output(self, trouble: SandboxError | None) -> None:
        """Draw the conclusions from the end of the stream."""
        self._drained.set()
        self._intake.refuse(
            trouble or CommandStartError("The command's wrapper ended before it started it")
        )
        if self._ending is None:
            self._end(trouble)

    def _end(self, error: SandboxError | None) -> None:
        if not self._ended.is_set():
            self._error = error
            self._ended.set()
            self._over.set()
            if self.identity is not None:
                # One that did not start has no output, and its sink may get that of another try.
                self._sink.end()

    async def _watch_events(self, watching: asyncio.Future[None]) -> None:
        try:
            async with self._engine.events.watch(self._container_id) as watch:
                watching.set_result(None)
                async for event in watch:
                    if event.action == "oom":
                        self._out_of_memory = True
                    elif event.action == "exec_die" and self._is_mine(event.attributes):
                        self._over.set()
        except SandboxError as error:
            if not watching.done():
                watching.set_exception(error)

    def _is_mine(self, attributes: Mapping[str, str]) -> bool:
        return self._stream is not None and attributes.get("execID") == self._stream.id

    def _lose(self, why: str) -> None:
        """Hear from the heartbeat that the engine is silent: nothing else will end this."""
        self._silent = why
        if self._starting is not None:
            if not self._starting.expired():
                self._starting.reschedule(0)
        elif self._ending is None and not self._ended.is_set():
            self._end(_lost(f"The engine was lost: {why}"))
            self._intake.status.set()

    def __aiter__(self) -> Process:
        return self

    async def __anext__(self) -> Chunk | Exit:
        if isinstance(self._sink, Spool):
            chunk = await self._sink.get()
            if chunk is not None:
                return chunk
        if self._error is not None:
            raise self._error
        if self._given:
            raise StopAsyncIteration
        self._given = True
        return self.exit

    @property
    def output(self) -> Process:
        """The output, to iterate over."""
        return self

    @property
    def exit(self) -> Exit:
        """How it ended, as far as that is known now."""
        evidence = self._intake.evidence
        reason, shown = verdict(
            self._code,
            evidence,
            killed=self._killed,
            interrupted=self._interrupted,
            out_of_memory=self._out_of_memory,
        )
        if isinstance(self._error, CommandError):
            reason = self._error.reason
        return Exit(
            self._code,
            reason,
            self._held,
            shown,
            evidence.peak_memory,
            evidence.left,
            evidence.cpu_seconds,
        )

    # -- writing ------------------------------------------------------------------------------

    async def write(self, data: bytes) -> None:
        """Send input; after its end a `SandboxError` (W8)."""
        if self._input_ended or self._stream is None or self._stream.closed:
            raise SandboxError("The command's input has been ended")
        await self._stream.write(data)

    async def end_input(self) -> None:
        """End the command's stdin; its output goes on. On a terminal this types Ctrl-D."""
        if self._input_ended or self._stream is None or self._stream.closed:
            return
        # Before it is done: whoever gives up waiting for that has ended it all the same.
        self._input_ended = True
        if self._kind == "terminal":
            await self._stream.write(_END_OF_TERMINAL_INPUT)
        else:
            await self._stream.end_input()

    async def resize(self, rows: int, cols: int) -> None:
        """Give the command's terminal another size, of which the command is told."""
        _check_size((rows, cols))
        if self._kind != "terminal" or self._stream is None:
            raise SandboxError("The command has no terminal. Start it with tty=(rows, columns)")
        await self._engine.resize_exec(self._stream.id, rows, cols)

    # -- ending -------------------------------------------------------------------------------

    async def interrupt(self) -> None:
        """Send SIGINT to the command's group; what that leads to is the command's affair."""
        await self.signal(signal.SIGINT)

    async def signal(self, signum: int) -> None:
        """Send a signal to the command's group; nothing happens once the command has ended.

        Parameters
        ----------
        signum
            Its number on Linux.

        Raises
        ------
        SandboxPausedError
            The sandbox is paused.
        SandboxError
            It could not be sent.
        """
        if not 1 <= signum <= _LARGEST_SIGNAL:
            raise SandboxSpecRejectedError(
                "signum", signum, "Linux has no such signal", "Use one of 1 to 64."
            )
        identity = self.identity
        over = self._ended.is_set() and not self._is_lost
        if identity is None or over or self._intake.code is not None:
            return
        before = self._killed, self._interrupted
        # Set before: the command's end can be heard sooner than the report.
        self._killed |= signum == signal.SIGKILL
        self._interrupted |= signum == signal.SIGINT
        sent = False
        try:
            report = await stop(
                self._engine,
                self._container_id,
                identity,
                user=self._user,
                mode=f"signal:{int(signum)}",
            )
            sent = report.found == "sent"
        finally:
            if not sent:
                self._killed, self._interrupted = before

    async def kill(self, everything: bool = False) -> StopReport:
        """End the command and everything that it started; idempotent (W11-W18).

        The output then still gives what was received before, and the reported status. A command
        that keeps a stop from starting, as a fork bomb does, takes everything of its user along,
        and as the last resort its sandbox: the report says so.

        Parameters
        ----------
        everything
            End every process of the user in the sandbox, other commands included. When that
            leaves nobody to report the command's exit code, it is `None`, with reason ``killed``.

        Raises
        ------
        SandboxPausedError
            The sandbox is paused, so that nothing in it can be ended.
        SandboxError
            It failed, or the command's status did not become known.
        """
        if self._ended.is_set() and self._error is None and not everything:
            return StopReport("nothing")
        report = await self._stop("everything" if everything else "command")
        await self._settle(report)
        return report

    async def kill_leftovers(self) -> StopReport:
        """End what the command has left behind when it ended: processes that it detached.

        A command that still runs is ended with it.

        Raises
        ------
        SandboxPausedError
            The sandbox is paused, so that nothing in it can be ended.
        SandboxError
            It failed.
        """
        if not self._ended.is_set():
            return await self.kill()
        return await self._stop("all")

    async def _stop(self, mode: Literal["command", "all", "everything"]) -> StopReport:
        """Run one stop, shared by all who ask for it; a cancelled caller does not cut it (W15)."""
        while self._stopping is not None and not self._stopping.done():
            if self._stopping.get_name() == mode:
                return await _finish_task(self._stopping)
            with contextlib.suppress(SandboxError):
                await _finish_task(self._stopping)
        self._stopping = asyncio.create_task(self._do_stop(mode), name=mode)
        return await _finish_task(self._stopping)

    async def _do_stop(self, mode: Literal["command", "all", "everything"]) -> StopReport:
        identity, killed = self.identity, self._killed
        report = StopReport("nothing")
        # Set before: the command's end can be heard sooner than the report.
        self._killed |= self._intake.code is None and not self._ended.is_set()
        try:
            if identity is not None:
                report = await stop(
                    self._engine,
                    self._container_id,
                    identity,
                    user=self._user,
                    mode="all" if mode == "all" else "command",
                )
                if self._stays:
                    # Nobody is left who could miss the input, nor anybody to be stopped.
                    with contextlib.suppress(SandboxError):
                        await self.end_input()
            if mode == "everything":
                # The wrapper gets the time to report what it has just lost.
                await self._patiently(self._ended)
                self._swept = True
                report = await sweep(self._engine, self._container_id, user=self._user)
        except (SandboxPausedError, SandboxUnavailableError):
            self._killed = killed
            raise
        except SandboxError as error:
            report = await self._end_anyhow(error)
        if report.found == "nothing":
            self._killed = killed
        return report

    async def _end_anyhow(self, because: SandboxError) -> StopReport:
        before, self._swept = self._swept, True
        try:
            return await end_anyhow(
                self._engine, self._container_id, user=self._user, because=because
            )
        except BaseException:
            self._swept = before
            raise

    async def _patiently(self, event: asyncio.Event) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STATUS_PATIENCE):
                await event.wait()

    async def _settle(self, report: StopReport) -> None:
        """Bring the output to its end after a stop."""
        await self._patiently(self._intake.status if report.held else self._ended)
        if self._ended.is_set():
            return
        if self._intake.code is None and not self._swept:
            self._fail("The command was stopped, but its exit code did not become known", report)
        if report.left and not report.held:
            self._fail("It cannot be told whether a process still holds the output", report)
        self._code = self._intake.code
        self._held = report.held
        self._end(None)

    def _fail(self, why: str, report: StopReport) -> NoReturn:
        error = CommandUnknownError(why)
        for line in report.left:
            error.add_note(f"the stop reported: {line}")
        self._end(error)
        raise error

    async def _stop_noting(
        self, error: BaseException, mode: Literal["command", "all"] = "command"
    ) -> SandboxError | None:
        """Stop because of another error, which stays the error (W20); return why that failed."""
        try:
            report = await self._stop(mode)
        except SandboxError as failure:
            log.warning("the stop of a command in %s failed: %s", self._container_id[:12], failure)
            error.add_note(f"the stop failed: {failure}")
            for note in getattr(failure, "__notes__", ()):
                error.add_note(note)
            return failure
        if report.found in ("swept", "container"):
            what = "the sandbox" if report.found == "container" else "everything of its user"
            error.add_note(f"the command could not be stopped alone: {what} was ended")
        for line in report.left:
            error.add_note(f"the stop reported: {line}")
        return None

    # -- timeouts and limits ------------------------------------------------------------------

    def _watch_time(self, timeout: float | None, idle_timeout: float | None) -> None:
        if timeout is not None:
            self._own(self._time_out(timeout))
        if idle_timeout is not None:
            self._own(self._idle_out(idle_timeout))

    async def _time_out(self, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._ended.wait()
        await self._end_late("timeout", timeout)

    async def _idle_out(self, timeout: float) -> None:
        clock = asyncio.get_running_loop().time
        started = clock()
        while (left := max(self._intake.heard_at, started) + timeout - clock()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._ended.wait()
                    return
        await self._end_late("idle-timeout", timeout)

    async def _end_late(self, reason: Literal["timeout", "idle-timeout"], seconds: float) -> None:
        if self._ended.is_set() or self._ending is not None:
            return
        self._ending = reason
        failure, notes = await self._end_because()
        error = CommandTimeoutError(
            seconds, self.counts[1], self.counts[2], reason, stopped=failure is None
        )
        for note in notes:
            error.add_note(note)
        self._end(error)
        # A reader sees the timeout next, however much it has not read.
        self._sink.close()

    def _overflow(self, why: str) -> None:
        if self._ending is None and not self._ended.is_set():
            self._ending = "output-limit"
            self._own(self._end_full(why))

    async def _end_full(self, why: str) -> None:
        failure, notes = await self._end_because()
        what = "was stopped" if failure is None else "could not be stopped"
        error = CommandOutputError(f"The command {what}: {why}")
        for note in notes:
            error.add_note(note)
        self._end(error)

    async def _end_because(self) -> tuple[SandboxError | None, list[str]]:
        """Stop the command and let the output come to its end.

        Returns
        -------
        tuple
            Why the stop failed, if it did, and what is to be noted.
        """
        noted = SandboxError()
        failure = await self._stop_noting(noted)
        try:
            async with asyncio.timeout(_AFTER_STOP):
                await self._drained.wait()
        except TimeoutError:
            noted.add_note("the output had not ended: the counts may miss some")
        return failure, list(getattr(noted, "__notes__", ()))

    # -- its end ------------------------------------------------------------------------------

    async def wait(self) -> Exit:
        """Wait for the end, without reading; the output stays to be read."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error
        return self.exit

    async def over(self) -> int | None:
        """Wait until the command's own process has ended, or nothing more is heard of it.

        Sooner than `wait`: who holds the output is not waited for, and the code that is returned
        is what the wrapper said, `None` when it said none, and not proved by anything else yet.
        """
        heard = [asyncio.ensure_future(e.wait()) for e in (self._intake.status, self._over)]
        try:
            await asyncio.wait(heard, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in heard:
                waiting.cancel()
            await asyncio.gather(*heard, return_exceptions=True)
        return self._intake.code

    async def reattach(self, timeout: float = 0.0) -> Exit | None:
        """Find out, after the connection was lost, what has become of the command.

        Its output and input are lost with the connection. Its exit code is what the engine
        recorded, where that can be believed: an engine that could not pass on the wrapper's last
        words records 126, a killed wrapper leaves 137, and one that was restarted knows nothing.
        Then the sandbox itself is asked, which still knows the code of a command that is running
        when this is called; of one that has ended before, the code stays `None`.

        Parameters
        ----------
        timeout
            Seconds to wait for the end of a command that still runs.

        Returns
        -------
        Exit | None
            `None` while it still runs.

        Raises
        ------
        SandboxGoneError
            The sandbox has ended, and the command with it.
        SandboxUnavailableError
            The engine is still away.
        """
        if not self._is_lost or not self._exec_id or self.identity is None:
            return self.exit if self._ended.is_set() else None
        with contextlib.suppress(SandboxGoneError):
            state = await self._engine.inspect_exec(self._exec_id)
            if not state.running and state.exit_code not in (None, CUT, KILLED):
                return Exit(state.exit_code, "finished")
        report = await stop(
            self._engine,
            self._container_id,
            self.identity,
            user=self._user,
            mode=f"wait:{round(timeout * 10)}",
            timeout=STOP_TIMEOUT + timeout,
        )
        if report.found == "running":
            return None
        if report.found == "ended":
            return Exit(report.code, "finished")
        if (state_now := await self._state_of_container(None)) != "running":
            raise CommandGoneError(f"The sandbox was {state_now} meanwhile")
        return Exit(None, "unknown")

    async def close(self) -> None:
        """Let go of the stream and the tasks; a command that runs is not stopped by this."""
        await _finish(self._let_go())
        self._sink.close()

    async def _let_go(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._stream is not None:
            await self._stream.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._heartbeat.leave(self._lose)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await _finish(self._leave(error))

    async def _leave(self, error: BaseException | None) -> None:
        unknown, failure = isinstance(self._error, CommandUnknownError), None
        try:
            if (unknown or not self._ended.is_set()) and await self._can_stop():
                failure = await self._stop_noting(error or SandboxError(), "all")
        finally:
            await self._let_go()
            self._sink.close()
        if error is None and isinstance(failure, SandboxPausedError):
            # Nothing else tells that the program will go on.
            raise failure


def _check_size(size: tuple[int, int]) -> None:
    if not all(1 <= number <= _LARGEST_TERMINAL for number in size):
        raise SandboxSpecRejectedError(
            "tty", size, "that is no size of a terminal", "Give rows and columns, as (24, 80)."
        )


def _lost(what: str, cause: BaseException | None = None) -> CommandUnknownError:
    error = CommandUnknownError(f"{what}. The command may still be running", "engine-lost")
    error.__cause__ = cause
    return error


async def _finish(work: Coroutine[Any, Any, None]) -> None:
    """Await cleaning up; being cancelled (again) does not cut it short (W15)."""
    await _finish_task(asyncio.create_task(work))


async def _finish_task(task: asyncio.Task[_T]) -> _T:
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except BaseException:  # noqa: S110 # raised below
            pass
    if cancelled is not None:
        if not task.cancelled():
            task.exception()
        raise cancelled
    return task.result()
