"""A program in a sandbox on this terminal: its streams, its signals, its window (W8-W19).

Nothing that was started is left by a signal: the first Ctrl-C reaches the program as it does on
a terminal, the second one ends it, as SIGTERM and SIGHUP do at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

from sandbox_kernel.errors import SandboxError
from sandbox_kernel.process.result import Chunk, Exit
from sandbox_kernel.sandbox.program import SandboxProcess

__all__ = ["Signals", "apart", "converse", "run_guarded", "terminal_size", "to_descriptor"]

_STDIN: Final = 0
_PIECE: Final = 64 * 1024
_SIGNALLED: Final = 128


class Signals:
    """What signals do while something runs.

    Attributes
    ----------
    process
        The program that the first SIGINT goes to; `None` while there is none.
    fatal
        The signal that has ended all of it, or 0.
    """

    def __init__(self) -> None:
        self.process: SandboxProcess | None = None
        self.fatal = 0
        self._task = asyncio.current_task()
        self._sending: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Hear them for the length of a block."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._hear, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _hear(self, number: signal.Signals) -> None:
        if self.fatal:
            return  # it is being ended already
        if number == signal.SIGINT and self.process is not None:
            process, self.process = self.process, None
            task = asyncio.create_task(_interrupt(process))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
            return
        self.fatal = int(number)
        if self._task is not None:
            self._task.cancel()


async def _interrupt(process: SandboxProcess) -> None:
    with contextlib.suppress(SandboxError):
        await process.interrupt()


def run_guarded(work: Callable[[Signals], Coroutine[Any, Any, int]]) -> int:
    """Run something in an event loop, and return its exit code, or that of the signal it got."""

    async def guarded() -> int:
        signals = Signals()
        with signals.heard():
            try:
                return await work(signals)
            except asyncio.CancelledError:
                if not signals.fatal:
                    raise
                return _SIGNALLED + signals.fatal
            except BrokenPipeError:
                # Whoever read the output has seen enough.
                return _SIGNALLED + signal.SIGPIPE

    return asyncio.run(guarded())


async def converse(
    process: SandboxProcess,
    write: Callable[[Chunk], None],
    signals: Signals,
    *,
    feed: bool,
    terminal: bool,
) -> Exit:
    """Connect a program to the standard streams until it ends.

    Parameters
    ----------
    process
        The program.
    write
        Takes its output.
    signals
        What signals do.
    feed
        Whether it gets the standard input; else its input is empty.
    terminal
        Whether the standard input is a terminal that becomes its own: every key goes to it, and
        it learns of changes of the window.
    """
    with contextlib.ExitStack() as stack:
        if terminal:
            stack.enter_context(_raw())
            stack.enter_context(_resizing(process))
        signals.process = process
        if feed:
            # A daemon, since nothing ends a read of a terminal from which nothing comes.
            loop = asyncio.get_running_loop()
            threading.Thread(target=_feed, args=(process, loop), daemon=True).start()
        else:
            await process.end_input()
        try:
            async for item in process.output:
                if isinstance(item, Exit):
                    return item
                await apart(write, item)
        finally:
            signals.process = None
    raise AssertionError("the output of a program ends with its exit")


async def apart(write: Callable[[Chunk], None], chunk: Chunk) -> None:
    """Write in a thread, since a reader that has stopped must keep no signal from being heard.

    A thread for each piece, and not one of a pool: who leaves would have to wait for a pool.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if not done.done():
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

    def work() -> None:
        error: BaseException | None = None
        try:
            write(chunk)
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # nobody waits any more
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=work, name="output", daemon=True).start()
    await done


def to_descriptor(chunk: Chunk) -> None:
    """Write output to where this process has its own."""
    left = memoryview(chunk.data)
    while left:
        try:
            left = left[os.write(chunk.stream, left) :]
        except BlockingIOError:
            select.select([], [chunk.stream], [])


def terminal_size() -> tuple[int, int]:
    """Return rows and columns of the terminal."""
    columns, rows = shutil.get_terminal_size()
    with contextlib.suppress(OSError):
        columns, rows = os.get_terminal_size(_STDIN)
    return max(rows, 1), max(columns, 1)


def _feed(process: SandboxProcess, loop: asyncio.AbstractEventLoop) -> None:
    """Carry the standard input to a program; runs in a thread of its own."""
    with contextlib.suppress(OSError):
        while data := os.read(_STDIN, _PIECE):
            if not _wait(process.write(data), loop):
                return
    _wait(process.end_input(), loop)


def _wait(work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> bool:
    """Do something in the loop; say whether the program still takes input."""
    try:
        asyncio.run_coroutine_threadsafe(work, loop).result()
    except SandboxError:
        return False
    except RuntimeError:
        # The loop was closed: the program has ended.
        work.close()
        return False
    return True


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    import termios
    import tty

    before = termios.tcgetattr(_STDIN)
    # Not flushed: what was typed while the sandbox was made is for the program.
    tty.setraw(_STDIN, termios.TCSADRAIN)
    try:
        yield
    finally:
        termios.tcsetattr(_STDIN, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _resizing(process: SandboxProcess) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    pending: set[asyncio.Task[None]] = set()

    async def resize() -> None:
        with contextlib.suppress(SandboxError):
            await process.resize(*terminal_size())

    def changed() -> None:
        task = asyncio.create_task(resize())
        pending.add(task)
        task.add_done_callback(pending.discard)

    loop.add_signal_handler(signal.SIGWINCH, changed)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
