"""`SandboxProcess`: a program that runs in a sandbox, to talk to from any event loop (W8-W19).

It stands for a `Process` in the engine's loop and hops there; `Sandbox.start` makes it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.process.command import Process
from sandbox_kernel.process.result import Chunk, Exit
from sandbox_kernel.process.stop import StopReport
from sandbox_kernel.sandbox.home import Hop
from sandbox_kernel.sandbox.request import to_bytes

__all__ = ["ProcessState", "SandboxProcess"]

_BATCH: Final = 256 * 1024
_TIMED_OUT: Final = frozenset({"timeout", "idle-timeout"})


class ProcessState:
    """What can be asked of a running program without waiting; the same for both twins."""

    _process: Process
    _place: str

    @property
    def pid(self) -> int:
        """The program's process id in the sandbox."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The program's exit code; `None` while it runs, and when it is not known."""
        return self._process.exit.code

    @property
    def output(self) -> Self:
        """The output, to iterate over."""
        return self

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.pid} in {self._place}>"


class SandboxProcess(ProcessState):
    """A program that runs in a sandbox; made by `Sandbox.start`.

    Iterating over it, or over `output`, gives each `Chunk` in order and last an `Exit`; it raises
    what ended the program otherwise, `SandboxExecTimeoutError` for one. Nothing is lost when the
    reading is cancelled, as `asyncio.wait_for` does.
    """

    def __init__(
        self, process: Process, place: str, hop: Hop, forget: Callable[[Process], None]
    ) -> None:
        self._process = process
        self._place = place
        self._hop = hop
        self._forget = forget
        self._fetched: deque[Chunk | Exit] = deque()
        self._fetching: asyncio.Task[Chunk | Exit | SandboxError | None] | None = None
        self._filling = asyncio.Lock()

    # -- reading ------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk | Exit:
        item = await self.read()
        if item is None:
            raise StopAsyncIteration
        return item

    async def read(self) -> Chunk | Exit | None:
        r"""Return the next piece of output, the `Exit` after the last one, and then `None`.

        Examples
        --------
        >>> async with sandbox.start(["echo", "hello"]) as process:
        ...     await process.read(), await process.read(), await process.read()
        (Chunk(stream=1, data=b'hello\n'), Exit(code=0, reason='finished', ...), None)
        """
        while (item := self.read_now()) is None:
            if not await self._hop(self._fill):
                return None
        return item

    def read_now(self) -> Chunk | Exit | None:
        """Return a piece of output that has been fetched already, or `None`; never waits."""
        if self._process.exit.reason in _TIMED_OUT:
            # The timeout comes next, however much has not been read (W19).
            self._fetched.clear()
        try:
            item = self._fetched.popleft()
        except IndexError:
            return None
        # How it ended can have become clearer since, by a kill that was under way.
        return self._process.exit if isinstance(item, Exit) else item

    async def _fill(self) -> bool:
        """Wait for output and fetch what is there; runs in the engine's loop.

        A hop for each chunk would cost as much as the chunk itself. Cancelled, this loses nothing:
        what has been taken from the process is in the queue or in the task. Returns whether
        anything was fetched; nothing is when the end has been read.
        """
        async with self._filling:
            if self._fetched:
                return True  # by another reader
            size = 0
            while size < _BATCH:
                if self._fetching is None:
                    self._fetching = asyncio.create_task(_item(self._process), name="process-read")
                await (asyncio.sleep(0) if size else asyncio.wait({self._fetching}))
                if not self._fetching.done():
                    break
                item = self._fetching.result()
                if isinstance(item, Chunk):
                    self._fetched.append(item)
                    self._fetching = None
                    size += len(item.data)
                    continue
                if isinstance(item, BaseException) and size:
                    break  # the output comes first
                self._fetching = None
                if isinstance(item, BaseException):
                    raise item
                if isinstance(item, Exit):
                    self._fetched.append(item)
                    await self._close()
                return bool(self._fetched)
            return True

    async def wait(self) -> Exit:
        """Wait for the program's end without reading; its output stays to be read.

        Raises
        ------
        SandboxExecTimeoutError
            It was still running at its timeout and was stopped.
        SandboxGoneError, SandboxUnknownOutcomeError
            As for `Sandbox.run`.

        Examples
        --------
        >>> async with sandbox.start(["sh", "-c", "exit 3"]) as process:
        ...     (await process.wait()).code
        3
        """
        return await self._hop(self._process.wait)

    # -- writing ------------------------------------------------------------------------------

    async def write(self, data: bytes | str) -> None:
        r"""Send input; text is encoded as UTF-8.

        Raises
        ------
        SandboxError
            The input has been ended.

        Examples
        --------
        >>> async with sandbox.start(["head", "-n", "1"]) as process:
        ...     await process.write("one\ntwo\n")
        ...     await process.read()
        Chunk(stream=1, data=b'one\n')
        """
        await self._hop(self._process.write, to_bytes("data", data))

    async def end_input(self) -> None:
        """End the program's input; its output goes on.

        Examples
        --------
        >>> async with sandbox.start(["cat"]) as process:
        ...     await process.end_input()
        ...     await process.wait()
        Exit(code=0, reason='finished', ...)
        """
        await self._hop(self._process.end_input)

    # -- signals and the end ------------------------------------------------------------------

    async def interrupt(self) -> None:
        """Send SIGINT to the program's group, as Ctrl-C does; it may end, or go on.

        Examples
        --------
        >>> async with sandbox.start(["sleep", "1000"]) as process:
        ...     await process.interrupt()
        ...     await process.wait()
        Exit(code=130, reason='interrupted', ...)
        """
        await self._hop(self._process.interrupt)

    async def signal(self, signum: int) -> None:
        """Send a signal to the program's group; nothing happens once it has ended.

        Parameters
        ----------
        signum
            Its number on Linux.

        Examples
        --------
        >>> async with sandbox.start(["sleep", "1000"]) as process:
        ...     await process.signal(15)
        ...     (await process.wait()).code
        143
        """
        await self._hop(self._process.signal, signum)

    async def resize(self, rows: int, cols: int) -> None:
        r"""Give the program's terminal another size, of which the program is told.

        Examples
        --------
        >>> async with sandbox.start(["sh"], tty=(24, 80)) as process:
        ...     await process.resize(30, 100)
        ...     await process.write("stty size; exit\n")
        ...     output = [chunk.data async for chunk in process if isinstance(chunk, Chunk)]
        >>> b"30 100" in b"".join(output)
        True
        """
        await self._hop(self._process.resize, rows, cols)

    async def kill(self, everything: bool = False) -> StopReport:
        """End the program and everything that it started; idempotent.

        What it had written can still be read, and the `Exit` after that.

        Parameters
        ----------
        everything
            End every program of the user in the sandbox.

        Returns
        -------
        StopReport
            What that did: a program that keeps a stop from starting, as a fork bomb does, takes
            everything of the user along, and as the last resort the sandbox.

        Raises
        ------
        SandboxPausedError
            The sandbox is paused, so that nothing in it can be ended.
        SandboxError
            It failed, or how the program ended did not become known.

        Examples
        --------
        >>> async with sandbox.start(["sleep", "1000"]) as process:
        ...     report = await process.kill()
        ...     await process.wait()
        Exit(code=137, reason='killed', ...)
        """
        return await self._hop(self._process.kill, everything)

    async def kill_leftovers(self) -> StopReport:
        """End what the program left behind when it ended, and the program too if it still runs.

        Examples
        --------
        >>> detach = "setsid sleep 1000 >/dev/null 2>&1 &"
        >>> async with sandbox.start(["sh", "-c", detach]) as process:
        ...     await process.wait()
        ...     report = await process.kill_leftovers()
        Exit(code=0, reason='finished', ...)
        """
        return await self._hop(self._process.kill_leftovers)

    async def reattach(self, timeout: float = 0.0) -> Exit | None:
        """Find out, after the connection was lost, what has become of the program.

        Its output is lost with the connection; how it ended need not be.

        Parameters
        ----------
        timeout
            Seconds to wait for the end of a program that still runs.

        Returns
        -------
        Exit | None
            `None` while it still runs.

        Examples
        --------
        >>> async with sandbox.start(["sleep", "1000"]) as process:
        ...     print(await process.reattach())
        None
        """
        return await self._hop(self._process.reattach, timeout)

    async def close(self) -> None:
        """Stop the program when it still runs, and let go of it. Idempotent."""
        await self.__aexit__(None, None, None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        async def leave() -> None:
            try:
                await self._process.__aexit__(kind, error, trace)
            finally:
                await self._close()

        await self._hop(leave)

    async def _close(self) -> None:
        """Let go of a program that has ended; runs in the engine's loop."""
        self._forget(self._process)
        await self._process.close()
        if self._fetching is not None:
            await asyncio.wait({self._fetching})


async def _item(process: Process) -> Chunk | Exit | SandboxError | None:
    """Return the next item of a process, also when that is an error; `None` after the end."""
    try:
        return await anext(process)
    except StopAsyncIteration:
        return None
    except SandboxError as error:
        return error
