"""One kernel process in a sandbox: its start, its signals, and how its end is learnt.

The process is an exec of its own as the code's user. Its output is not the notebook's output
(that travels on iopub) but what it writes before and beside that: the last lines are kept,
since they say why a kernel could not start or died.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sandbox_kernel.engine.events import LOST, RESYNC
from sandbox_kernel.engine.streams import Chunk, ExecStream
from sandbox_kernel.errors import (
    SandboxError,
    SandboxGoneError,
    SandboxStartError,
)
from sandbox_kernel.kernel.program import launcher_program, loader_argv, unsuitable
from sandbox_kernel.sandbox.live import CODE_USER, LiveSandbox

log = logging.getLogger(__name__)

REPORT_TIMEOUT = 20.0
_REPORT_LIMIT = 1 << 16
_KEPT_OUTPUT = 1 << 14
_SIGNAL_TIMEOUT = 5.0
_TAIL_PATIENCE = 0.3
_KILLED = 137
_SEND_SIGNAL = 'kill -s "$1" -- "-$2"'


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


class KernelProcess:
    """A started kernel process; made by `start`.

    Attributes
    ----------
    pid
        Its process id in the sandbox, which is also its process group's.
    exit_code
        `None` while it runs.
    """

    def __init__(self, sandbox: LiveSandbox, stream: ExecStream) -> None:
        self.pid = 0
        self.exit_code: int | None = None
        self.exited = asyncio.Event()
        self._sandbox = sandbox
        self._stream = stream
        self._output = {1: bytearray(), 2: bytearray()}
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, sandbox: LiveSandbox, order: KernelOrder) -> KernelProcess:
        """Start the kernel and return once its pid is known.

        Raises
        ------
        SandboxImageUnsuitableError
            The image has no Python for the launcher, or not the kernel's program.
        SandboxStartError
            The kernel's command could not be started.
        """
        argv = loader_argv()
        stream = await sandbox.exec(argv, user=CODE_USER)
        process = cls(sandbox, stream)
        try:
            async with asyncio.timeout(REPORT_TIMEOUT):
                await process._launch(order)
        except TimeoutError as error:
            await stream.close()
            if isinstance(error, SandboxError):
                raise
            raise SandboxStartError(
                f"the kernel's command did not start within {REPORT_TIMEOUT:g} s"
            ) from error
        except BaseException:
            await stream.close()
            raise
        process._tasks = [
            asyncio.create_task(process._read_output(), name="kernel-output"),
            asyncio.create_task(process._watch_events(), name="kernel-events"),
            asyncio.create_task(process._watch_sandbox(), name="kernel-sandbox"),
        ]
        return process

    async def _launch(self, order: KernelOrder) -> None:
        nonce = secrets.token_hex(16)
        letter = {
            "nonce": nonce,
            "argv": order.argv,
            "connection": order.connection,
            "environment": dict(order.environment),
            "cwd": order.cwd,
            "runtime_dir": "/home/sbx",
        }
        await self._stream.write(launcher_program() + json.dumps(letter).encode() + b"\n")
        said = await self._first_line()
        marker = nonce.encode() + b" "
        if not said.startswith(marker):
            await self._explain_silence(said)
        report = json.loads(said[len(marker) :])
        if "error" in report:
            raise SandboxStartError(f"The kernel cannot start: {report['error']}")
        self.pid = int(report["pid"])

    async def _first_line(self) -> bytes:
        said = bytearray()
        while b"\n" not in said and len(said) < _REPORT_LIMIT:
            chunk = await self._stream.read()
            if chunk is None:
                break
            if chunk.stream == 1:
                said += chunk.data
            else:
                self._keep(chunk)
        line, _, rest = bytes(said).partition(b"\n")
        self._keep(Chunk(1, rest))
        return line

    async def _explain_silence(self, said: bytes) -> None:
        """Raise the error that says why there was no report."""
        state = await self._sandbox.engine.inspect_exec(self._stream.id)
        error = unsuitable(state.exit_code, self._sandbox.spec.image)
        if error is not None:
            raise error
        shown = ascii((said + b" " + bytes(self._output[2])).decode(errors="replace")[-300:])
        raise SandboxStartError(
            f"The kernel's launcher ended with exit code {state.exit_code}: {shown}"
        )

    # -- its end ------------------------------------------------------------------------------

    async def _read_output(self) -> None:
        try:
            while (chunk := await self._stream.read()) is not None:
                self._keep(chunk)
        except SandboxError as error:
            log.debug("kernel output of %s broke: %s", self._sandbox.short_id, error)
        await self._inspect()

    async def _watch_events(self) -> None:
        async with self._sandbox.engine.events.watch(self._sandbox.id) as watch:
            async for event in watch:
                if event.action == "exec_die" and event.attributes.get("execID") == self._stream.id:
                    code = event.attributes.get("exitCode", "")
                    await self._exit_soon(int(code) if code.isdecimal() else _KILLED)
                    return
                if event.action in (RESYNC, LOST):
                    await self._inspect()

    async def _watch_sandbox(self) -> None:
        reason = await asyncio.shield(self._sandbox.ended)
        self._exit(_KILLED if reason.exit_code is None else reason.exit_code or _KILLED)

    async def _inspect(self) -> None:
        """Learn from the engine whether the process has ended."""
        try:
            state = await self._sandbox.engine.inspect_exec(self._stream.id)
        except SandboxGoneError:
            self._exit(_KILLED)
        except SandboxError as error:
            log.debug("kernel of %s cannot be inspected: %s", self._sandbox.short_id, error)
        else:
            if not state.running and state.exit_code is not None:
                self._exit(state.exit_code)

    async def _exit_soon(self, code: int) -> None:
        """Note the end, after giving the last output a moment to arrive."""
        reader = self._tasks[0]
        await asyncio.wait([reader], timeout=_TAIL_PATIENCE)
        self._exit(code)

    def _exit(self, code: int) -> None:
        if self.exit_code is None:
            self.exit_code = code
            self.exited.set()
            log.info("kernel in sandbox %s ended with exit code %d", self._sandbox.short_id, code)

    def _keep(self, chunk: Chunk) -> None:
        if chunk.data:
            kept = self._output[chunk.stream]
            kept += chunk.data
            del kept[:-_KEPT_OUTPUT]

    def forget_output(self) -> None:
        """Drop what was written while it started: it would not explain a later end."""
        for kept in self._output.values():
            kept.clear()

    def last_words(self, streams: Sequence[int] = (1, 2), lines: int = 8) -> str:
        """Return the last lines that the process wrote, with control characters escaped.

        Parameters
        ----------
        streams
            1 for stdout, 2 for stderr.
        lines
            How many.
        """
        text = "\n".join(self._output[s].decode(errors="replace").strip() for s in streams).strip()
        kept = text.splitlines()[-lines:]
        return "\n".join("".join(c if c.isprintable() else ascii(c)[1:-1] for c in k) for k in kept)

    # -- what can be done to it ---------------------------------------------------------------

    async def send_signal(self, number: int) -> None:
        """Send a signal to the process's group; nothing happens when it has ended."""
        if self.exit_code is not None:
            return
        name = signal.Signals(number).name.removeprefix("SIG")
        argv = ["sh", "-c", _SEND_SIGNAL, "kill", name, str(self.pid)]
        with contextlib.suppress(SandboxGoneError):
            async with (
                asyncio.timeout(_SIGNAL_TIMEOUT),
                await self._sandbox.engine.exec(
                    self._sandbox.id, argv, user=CODE_USER, stdin=False
                ) as stream,
            ):
                while await stream.read() is not None:
                    pass

    async def forget(self) -> None:
        """Stop watching the process; it is not ended by this."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._stream.close()
