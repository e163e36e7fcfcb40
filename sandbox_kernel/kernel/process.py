"""One kernel process in a sandbox: its start, its signals, and how its end is learnt.

It is a command like any other, with what `process.command` promises of one: an exit code that is
believed only when two agree on it, evidence of why it ended, and a stop that reaches its whole
tree. Its output is not the notebook's output (that travels on iopub) but what it writes before
and beside that: the last lines are kept, since they say why a kernel could not start or died.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sandbox_kernel.errors import SandboxError, SandboxGoneError, SandboxImageUnsuitableError
from sandbox_kernel.kernel.launcher import NOT_FOUND
from sandbox_kernel.kernel.program import launcher_program, start_program, unsuitable
from sandbox_kernel.process.command import Process, launch
from sandbox_kernel.process.result import Chunk, CommandNotFoundError, Exit
from sandbox_kernel.process.stop import Identity, StopReport
from sandbox_kernel.sandbox.live import CODE_USER, LiveSandbox

log = logging.getLogger(__name__)

_KEPT_OUTPUT = 1 << 14
_TAIL_PATIENCE = 0.2
_LOST_POLL = 0.2
_LOST_WAIT = 20.0
"""Seconds for which one look after a kernel lasts whose stream broke; its end is told at once."""

_REASON_PATIENCE = 0.3
_KILLED = 137


@dataclass(frozen=True)
class KernelOrder:
    """What to run as the kernel.

    Parameters
    ----------
    argv
        The kernel's command; ``{connection_file}`` in a word is replaced inside the sandbox.
    connection
        Content of the connection file, keys included.
    environment
        Variables beside those of the container.
    cwd
        Working directory in the sandbox.
    """

    argv: tuple[str, ...]
    connection: Mapping[str, object] = field(repr=False)
    environment: Mapping[str, str] = field(repr=False)
    cwd: str = "/workspace"


@dataclass(frozen=True)
class ProcessOrigin:
    """By what a kernel process can be found by a process that did not start it.

    Parameters
    ----------
    exec_id
        What the engine calls its exec.
    identity
        Its processes in the sandbox.
    """

    exec_id: str
    identity: Identity


class KernelProcess:
    """A started kernel process; made by `start`.

    Attributes
    ----------
    exit_code
        `None` while it runs; 137 also when it ended in a way that cannot be known.
    exited
        Set once it has ended, and how has been found out as far as that is possible.
    ended_unseen
        Whether it ended while nothing connected it, so that nobody knows how.
    """

    def __init__(self, sandbox: LiveSandbox, process: Process, words: LastWords) -> None:
        self.exit_code: int | None = None
        self.exited = asyncio.Event()
        self.ended_unseen = False
        self._sandbox = sandbox
        self._process = process
        self._words = words
        self._cleared = False
        self._tasks = [
            asyncio.create_task(self._follow(), name="kernel-process"),
            asyncio.create_task(self._watch_sandbox(), name="kernel-sandbox"),
        ]

    @classmethod
    async def start(cls, sandbox: LiveSandbox, order: KernelOrder) -> KernelProcess:
        """Start the launcher, which becomes the kernel; a paused sandbox is resumed first.

        Raises
        ------
        SandboxImageUnsuitableError
            The image lacks Python for the launcher, or what every command needs.
        SandboxGoneError
            The sandbox has ended, and why.
        SandboxStartError
            Nothing was started.
        """
        words = LastWords()
        begin = functools.partial(
            launch,
            sandbox.engine,
            sandbox.id,
            sink=words,
            user=CODE_USER,
            env={},
            cwd=order.cwd,
            timeout=None,
            idle_timeout=None,
            tty=None,
            output_limit=sys.maxsize,
            # The relay's pings are more patient with an engine that is silent for a moment.
            heartbeat=False,
            stay=True,
        )
        letter = {
            "argv": order.argv,
            "connection": order.connection,
            "environment": dict(order.environment),
            "runtime_dir": "/home/sbx",
        }
        program = launcher_program() + json.dumps(letter).encode() + b"\n"
        await sandbox.wake()
        try:
            process = await start_program(begin, program)
        except CommandNotFoundError as error:
            raise unsuitable(NOT_FOUND, sandbox.spec.image) or error from error
        except SandboxGoneError as error:
            # The news of why is a moment behind.
            await asyncio.wait({sandbox.ended}, timeout=_REASON_PATIENCE)
            if not sandbox.ended.done():
                raise
            raise SandboxGoneError(sandbox.ended.result().text) from error
        return cls(sandbox, process, words)

    @classmethod
    def of_another(cls, sandbox: LiveSandbox, origin: ProcessOrigin) -> KernelProcess:
        """Return a kernel process that a process started which is gone."""
        process = Process.of_another(
            sandbox.engine, sandbox.id, origin.identity, origin.exec_id, user=CODE_USER
        )
        return cls(sandbox, process, LastWords())

    @property
    def origin(self) -> ProcessOrigin:
        """What another process needs to know of it."""
        if self._process.identity is None:
            raise RuntimeError("the kernel has not been started")
        return ProcessOrigin(self._process.exec_id, self._process.identity)

    # -- its end ------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Notice the end, and find out about it."""
        process = self._process
        reported = await process.over()
        if reported == 0:
            # Nothing hangs on it. What it left is ended before the next start, or with the sandbox.
            self._exit(0)
            return
        code = None
        try:
            if reported is not None:
                await self.kill()
            async with asyncio.timeout(_TAIL_PATIENCE):
                await process.wait()
        except (TimeoutError, SandboxGoneError):
            pass  # nobody is left to tell more
        except SandboxError as error:
            log.debug("the kernel of %s is lost: %s", self._sandbox.short_id, error)
            if self.end.reason == "engine-lost":
                code = await self._find_out()
        if code is None:
            code = self.end.code
        self.ended_unseen = code is None and self.end.reason == "engine-lost"
        self._exit(_KILLED if code is None else code)

    async def _find_out(self) -> int | None:
        """Wait for the end of a kernel of which the stream broke while its engine goes on.

        Returns
        -------
        int or None
            Its exit code, where the sandbox or the engine still knew it.
        """
        while True:
            try:
                found = await self._process.reattach(_LOST_WAIT)
            except SandboxGoneError:
                return None
            except SandboxError as error:
                log.debug("no news of the kernel of %s: %s", self._sandbox.short_id, error)
            else:
                if found is not None:
                    return found.code
            await asyncio.sleep(_LOST_POLL)

    async def _watch_sandbox(self) -> None:
        reason = await asyncio.shield(self._sandbox.ended)
        self._exit(_KILLED if reason.exit_code is None else reason.exit_code or _KILLED)

    def _exit(self, code: int) -> None:
        if self.exit_code is None:
            self.exit_code = code
            self.exited.set()
            log.info("kernel in sandbox %s ended with exit code %d", self._sandbox.short_id, code)

    @property
    def end(self) -> Exit:
        """How it ended, as far as that is known now."""
        return self._process.exit

    def forget_output(self) -> None:
        """Drop what was written while it started: it would not explain a later end."""
        self._words.clear()

    def last_words(self, streams: Sequence[int] = (1, 2), lines: int = 8) -> str:
        """Return the last lines that the process wrote, with control characters escaped.

        Parameters
        ----------
        streams
            1 for stdout, 2 for stderr.
        lines
            How many.
        """
        return self._words.text(streams, lines)

    def unsuitable(self) -> SandboxImageUnsuitableError | None:
        """Return the error that its end means when the launcher could not run at all."""
        said = self._words.text((1, 2), 1)
        return None if said else unsuitable(self.exit_code, self._sandbox.spec.image)

    # -- what can be done to it ---------------------------------------------------------------

    async def send_signal(self, number: int) -> None:
        """Send a signal to the process's group; nothing happens when it has ended."""
        if self.exit_code is None:
            await self._process.signal(number)

    async def kill(self) -> StopReport:
        """End it and everything that it started, whether it still runs or not.

        Raises
        ------
        SandboxError
            As `Process.kill`.
        """
        if self._cleared:
            return StopReport("nothing")
        report = await self._process.kill_leftovers()
        # What is stopped below the engine's init has left nobody behind.
        self._cleared = not report.left
        return report

    async def forget(self) -> None:
        """Stop watching the process; it is not ended by this."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self._process.close()


class LastWords:
    """Keeps the end of each stream of a process; a sink of its output."""

    def __init__(self) -> None:
        self._kept = {1: bytearray(), 2: bytearray()}

    def put(self, chunk: Chunk) -> None:
        """Take a chunk."""
        kept = self._kept[chunk.stream]
        kept += chunk.data
        del kept[:-_KEPT_OUTPUT]

    def end(self) -> None:
        """Keep what was taken."""

    def close(self) -> None:
        """Keep what was taken."""

    def clear(self) -> None:
        """Drop it."""
        for kept in self._kept.values():
            kept.clear()

    def text(self, streams: Sequence[int], lines: int) -> str:
        """Return the last lines, with control characters escaped."""
        text = "\n".join(self._kept[s].decode(errors="replace").strip() for s in streams).strip()
        kept = text.splitlines()[-lines:]
        return "\n".join("".join(c if c.isprintable() else ascii(c)[1:-1] for c in k) for k in kept)
