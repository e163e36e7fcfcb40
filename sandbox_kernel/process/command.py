"""One command from its start to its end (contract W2-W23): `start` and `Process`.

What the command is travels over stdin only; the argv of the exec, which the engine shows to
everybody who watches its events, is the same for all. The wrapper's reports, which carry a
nonce, are taken out of stderr here. Three tasks belong to a `Process`: one drains the engine's
stream whatever the reader does, one listens for lack of memory, and one waits for the timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from importlib import resources
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from sandbox_kernel.engine.client import Engine, ExecStream
from sandbox_kernel.errors import (
    SandboxError,
    SandboxImageUnsuitableError,
    SandboxSpecRejectedError,
    SandboxStartError,
    SandboxUnknownOutcomeError,
)
from sandbox_kernel.process.output import Reports, Spool
from sandbox_kernel.process.result import Chunk, CommandTimeoutError, Exit, Reason
from sandbox_kernel.process.stop import Identity, StopReport, stop

__all__ = ["Process", "start"]

log = logging.getLogger(__name__)

START_TIMEOUT: Final = 20.0
OUTPUT_LIMIT: Final = 1024**3
_AFTER_STOP: Final = 4.0
_STATUS_PATIENCE: Final = 2.0
_EARLY_LIMIT: Final = 64 * 1024
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SHELLS_OWN = frozenset({"PPID", "UID", "EUID", "BASHOPTS", "SHELLOPTS", "BASH_VERSINFO"})
_KILLED = 137
_T = TypeVar("_T")


@functools.cache
def _wrapper() -> str:
    return resources.files(__package__).joinpath("wrapper.sh").read_text(encoding="utf-8")


def preamble(nonce: str, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> bytes:
    """Return what the wrapper reads before it reports; refuse what cannot be passed on."""
    if not argv or not argv[0]:
        raise SandboxSpecRejectedError("argv", list(argv), "it names no program", "Name one.")
    for name in env:
        if not _NAME.match(name) or name in _SHELLS_OWN:
            raise SandboxSpecRejectedError(
                "env", name, "a shell cannot export this name", "Use another name."
            )
    values = [nonce, cwd, str(len(env)), *(f"{name}={value}" for name, value in env.items())]
    values += [str(len(argv)), *argv]
    framed = bytearray()
    for value in values:
        if "\0" in value:
            raise SandboxSpecRejectedError(
                "argv, env or cwd", None, "it holds a NUL character", "Remove it."
            )
        framed += b"%d\n%s\n" % (value.count("\n") + 1, value.encode("utf-8", "surrogateescape"))
    return bytes(framed)


async def start(
    engine: Engine,
    container_id: str,
    argv: Sequence[str],
    *,
    user: str,
    env: Mapping[str, str] | None = None,
    cwd: str = "/",
    timeout: float | None = None,
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
    output_limit
        Bytes of output after which it is stopped.

    Raises
    ------
    SandboxStartError
        When nothing ran.
    SandboxImageUnsuitableError
        When the image lacks a program that the wrapper needs.
    """
    nonce = secrets.token_hex(16)
    sent = preamble(nonce, argv, env or {}, cwd)
    text = _wrapper()
    stream = await engine.exec(
        container_id, ["sh", "-c", text, "wrapper", text], user=user, stdin=True
    )
    process = Process(engine, container_id, user, stream, nonce, output_limit)
    try:
        async with asyncio.timeout(START_TIMEOUT):
            await process._begin(sent, timeout)
    except BaseException as error:
        await _finish(process._abandon(error))
        if isinstance(error, TimeoutError) and not isinstance(error, SandboxError):
            raise SandboxStartError(
                f"The command did not start within {START_TIMEOUT:g} s"
            ) from error
        raise
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
        stream: ExecStream,
        nonce: str,
        output_limit: int,
    ) -> None:
        self.counts = {1: 0, 2: 0}
        self.identity: Identity | None = None
        self._engine = engine
        self._container_id = container_id
        self._user = user
        self._stream = stream
        self._reports = Reports(nonce)
        self._output_limit = output_limit
        self._spool = Spool()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pipes = ("", "")
        self._early = bytearray()
        self._code: int | None = None
        self._status = asyncio.Event()
        self._drained = asyncio.Event()
        self._ended = asyncio.Event()
        self._reason: Reason = "finished"
        self._held = False
        self._given = False
        self._killed = False
        self._out_of_memory = False
        self._error: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._drainer: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[StopReport] | None = None

    @property
    def pid(self) -> int:
        """The command's pid in the sandbox, known before its first byte of output."""
        if self.identity is None:
            raise RuntimeError("the command has not been started")
        return self.identity.pid

    # -- start --------------------------------------------------------------------------------

    async def _begin(self, sent: bytes, timeout: float | None) -> None:
        self._drainer = asyncio.create_task(self._drain(), name="process-drain")
        await self._stream.write(sent)
        watching: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._own(self._watch_memory(watching))
        await asyncio.gather(watching, self._ready)
        await self._stream.write(b"go\n")
        if timeout is not None:
            self._own(self._time_out(timeout))

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.create_task(work, name="process-watch"))

    async def _abandon(self, error: BaseException) -> None:
        """End what a failed start has left; without "go" nothing of the command can run."""
        if self.identity is not None and not self._ended.is_set():
            await self._stop_noting(error, everything=True)
        await self.close()

    # -- reading ------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Read the engine's stream to its end, whatever becomes of the output."""
        trouble: SandboxError | None = None
        try:
            while (chunk := await self._stream.read()) is not None:
                data, reports = chunk.data, list[list[str]]()
                if chunk.stream == 2:
                    data, reports = self._reports.feed(data)
                if data:
                    self._take(chunk.stream, data)
                for words in reports:
                    self._heard(words)
            if rest := self._reports.rest():
                self._take(2, rest)
            state = await self._engine.inspect_exec(self._stream.id)
            if state.running or state.exit_code is None:
                trouble = SandboxUnknownOutcomeError(
                    "The connection to the engine broke; the command may still be running"
                )
            elif not self._ready.done():
                trouble = self._not_started(state.exit_code)
            elif self._code is None:
                trouble = SandboxUnknownOutcomeError(
                    "The command's wrapper was killed, so that its exit code is not known"
                )
        except SandboxError as error:
            trouble = error
        self._finish_output(trouble)

    def _finish_output(self, trouble: BaseException | None) -> None:
        if self._ended.is_set():
            return
        if self._error is None:
            self._error = trouble
        if not self._ready.done():
            self._ready.set_exception(
                trouble or SandboxStartError("The command's wrapper ended before it started it")
            )
            self._ready.exception()
        self._status.set()
        self._drained.set()
        # What a timeout ends, it says itself, with the counts that are final now.
        if self._reason != "timeout":
            self._ended.set()
            self._spool.end()

    def _take(self, stream: int, data: bytes) -> None:
        if self._ended.is_set():
            return
        if not self._ready.done():
            self._early += data[: _EARLY_LIMIT - len(self._early)]
            return
        self.counts[stream] += len(data)
        if self._reason in ("timeout", "output-limit"):
            return
        self._spool.put(Chunk(stream, data))
        if sum(self.counts.values()) > self._output_limit:
            self._reason = "output-limit"
            self._own(self._end_for_limit())

    def _heard(self, words: list[str]) -> None:
        match words:
            case ["failed", *what] if not self._ready.done():
                self._ready.set_exception(_refusal(" ".join(what)))
                self._ready.exception()
            case ["holds", out, err]:
                self._pipes = (out, err)
            case ["ready", root, started, pid] if not self._ready.done():
                self.identity = Identity(int(root), int(started), int(pid), *self._pipes)
                self._ready.set_result(None)
            case ["exit", code] if self._ready.done() and self._code is None:
                self._code = int(code)
                self._status.set()

    def _not_started(self, code: int) -> SandboxError:
        said = self._early.decode("utf-8", "replace").strip()[-500:]
        if code in (126, 127) and "executable file not found" in said:
            return SandboxImageUnsuitableError(
                "The image has no program sh, without which no command can be run"
            )
        return SandboxStartError(f"The command could not be started: {said or f'code {code}'}")

    async def _watch_memory(self, watching: asyncio.Future[None]) -> None:
        try:
            async with self._engine.events.watch(self._container_id) as watch:
                watching.set_result(None)
                async for event in watch:
                    if event.action == "oom":
                        self._out_of_memory = True
                    elif event.action in ("die", "destroy"):
                        break
        except SandboxError as error:
            if not watching.done():
                watching.set_exception(error)

    def __aiter__(self) -> Process:
        return self

    async def __anext__(self) -> Chunk | Exit:
        chunk = await self._spool.get()
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
        reason = self._reason
        if self._code == _KILLED and self._out_of_memory and reason == "finished":
            reason = "out-of-memory"
        elif self._code == _KILLED and self._killed and reason == "finished":
            reason = "killed"
        return Exit(self._code, reason, self._held)

    # -- writing ------------------------------------------------------------------------------

    async def write(self, data: bytes) -> None:
        """Send input; after its end a `SandboxError` (W8)."""
        try:
            await self._stream.write(data)
        except RuntimeError as error:
            raise SandboxError("The command's input has been ended") from error

    async def end_input(self) -> None:
        """End the command's stdin; its output goes on."""
        await self._stream.end_input()

    # -- ending -------------------------------------------------------------------------------

    async def kill(self) -> None:
        """End the command and everything that it started; idempotent (W11-W18).

        The output then still gives what was received before, and the reported status.
        """
        if self._ended.is_set() and self._error is None:
            return
        was_running = self._code is None
        report = await self._stop()
        self._killed |= was_running and report.found == "killed"
        await self._settle(report)

    async def _stop(self, everything: bool = False) -> StopReport:
        """Run one stop, shared by all who ask for it; a cancelled caller does not cut it."""
        identity = self.identity
        if identity is None:
            return StopReport("nothing")
        if self._stopping is None or self._stopping.done():
            self._stopping = asyncio.create_task(
                stop(
                    self._engine,
                    self._container_id,
                    identity,
                    user=self._user,
                    everything=everything,
                )
            )
        return await _finish_task(self._stopping)

    async def _settle(self, report: StopReport) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STATUS_PATIENCE):
                await self._status.wait()
                if not report.left:
                    await self._ended.wait()
        if self._ended.is_set():
            return
        if self._code is None:
            error = SandboxUnknownOutcomeError(
                "The command was stopped, but its exit code did not become known"
            )
            for line in report.left:
                error.add_note(f"the stop reported: {line}")
            self._finish_output(error)
            raise error
        self._held = bool(report.left)
        self._finish_output(None)

    async def _stop_noting(self, error: BaseException, everything: bool = False) -> None:
        """Stop because of another error, which stays the error (W20)."""
        try:
            report = await self._stop(everything)
        except SandboxError as failure:
            log.warning("the stop of a command in %s failed: %s", self._container_id[:12], failure)
            error.add_note(f"the stop failed: {failure}")
            return
        for line in report.left:
            error.add_note(f"the stop reported: {line}")

    async def _time_out(self, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._ended.wait()
        if self._ended.is_set():
            return
        self._reason = "timeout"
        notes = SandboxError()
        await self._stop_noting(notes)
        try:
            async with asyncio.timeout(_AFTER_STOP):
                await self._drained.wait()
        except TimeoutError:
            notes.add_note("the output had not ended: the counts may miss some")
        error = CommandTimeoutError(timeout, self.counts[1], self.counts[2])
        for note in getattr(notes, "__notes__", []):
            error.add_note(note)
        self._error = error
        self._ended.set()
        self._status.set()
        # A reader sees the timeout next, however much it has not read.
        self._spool.close()

    async def _end_for_limit(self) -> None:
        error = SandboxError(
            f"The command was stopped: it had written more than {self._output_limit} bytes"
        )
        self._error = error
        await self._stop_noting(error)
        self._spool.end()

    async def wait(self) -> Exit:
        """Wait for the end, without reading; the output stays to be read."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error
        return self.exit

    async def close(self) -> None:
        """Let go of the stream and the tasks; a command that runs is not stopped by this."""
        tasks = {*self._tasks, *((self._drainer,) if self._drainer else ())}
        for task in tasks:
            task.cancel()
        await self._stream.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._spool.close()

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
        if not self._ended.is_set() or isinstance(self._error, SandboxUnknownOutcomeError):
            await self._stop_noting(error or SandboxError(), everything=True)
        await self.close()


def _refusal(what: str) -> SandboxError:
    if what.startswith("missing"):
        return SandboxImageUnsuitableError(
            f"The image lacks {what.removeprefix('missing ')}, without which no command can be run"
        )
    reasons = {
        "not-found": "there is no such program in the sandbox",
        "directory": "its working directory cannot be entered",
        "environment": "its environment cannot be set",
    }
    return SandboxStartError(f"The command was not started: {reasons.get(what, what)}")


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
