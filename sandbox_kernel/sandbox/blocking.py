"""The blocking twins of `Sandbox` and `SandboxProcess`, for scripts, threads and notebook cells.

Nothing is done here twice: every method is the one of the twin, awaited in the engine thread
while this thread waits. So they need no event loop and work where one runs already. An interrupt
(Ctrl-C) of the waiting stops in the sandbox what was waited for, and is then raised.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.thread import EngineThread
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.process.result import Chunk, Exit
from sandbox_kernel.sandbox.facade import Sandbox, SandboxState
from sandbox_kernel.sandbox.files import SandboxFiles
from sandbox_kernel.sandbox.opening import Opening
from sandbox_kernel.sandbox.program import ProcessState, SandboxProcess

__all__ = ["BlockingFiles", "BlockingProcess", "BlockingSandbox", "open_sandbox"]

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C", Sandbox, SandboxProcess)
P = ParamSpec("P")
T = TypeVar("T")


class _Twin(Generic[A]):
    def __init__(self, twin: A) -> None:
        self._twin = twin


def _hopping(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[_Twin[A], P], T]:
    """Return a method that runs the twin's one in the engine thread and waits for it."""

    @functools.wraps(method)
    def hop(self: _Twin[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return EngineThread.current().run(functools.partial(method, self._twin, *args, **kwargs))

    return _described(hop)


def _opening(
    method: Callable[Concatenate[A, P], Opening[C]], wrap: Callable[[C], B]
) -> Callable[Concatenate[_Twin[A], P], B]:
    """Return a method that opens what the twin's one gives, and wraps that in its own twin."""

    @functools.wraps(method)
    def hop(self: _Twin[A], /, *args: P.args, **kwargs: P.kwargs) -> B:
        return wrap(_open(method(self._twin, *args, **kwargs)))

    return _described(hop)


def _open(opening: Opening[C]) -> C:
    async def discard(made: C) -> None:
        await made.__aexit__(None, None, None)

    return EngineThread.current().run(opening.open, discard=discard)


def _described(method: Callable[P, T]) -> Callable[P, T]:
    """Have a method's description speak of the blocking form."""
    for word, instead in (
        ("await Sandbox.create(", "open_sandbox("),
        ("Sandbox.create(", "open_sandbox("),
        ("async with", "with"),
        ("async for", "for"),
        ("await ", ""),
    ):
        method.__doc__ = (method.__doc__ or "").replace(word, instead)
    return method


class BlockingProcess(_Twin[SandboxProcess], ProcessState):
    r"""A program that runs in a sandbox; made by `BlockingSandbox.start`.

    Iterating over it, or over `output`, gives each `Chunk` in order and last an `Exit`.

    Examples
    --------
    >>> with sandbox.start(["echo", "hello"]) as process:
    ...     for chunk in process.output:
    ...         print(chunk)
    Chunk(stream=1, data=b'hello\n')
    Exit(code=0, reason='finished', ...)
    """

    def __init__(self, twin: SandboxProcess) -> None:
        super().__init__(twin)
        self._process = twin._process
        self._place = twin._place

    def read(self) -> Chunk | Exit | None:
        """Return the next piece of output, the `Exit` after the last one, and then `None`."""
        # Not for what has been fetched already; a hop for each chunk would double its cost.
        return self._twin.read_now() or _read(self)

    def __iter__(self) -> Iterator[Chunk | Exit]:
        return self

    def __next__(self) -> Chunk | Exit:
        item = self.read()
        if item is None:
            raise StopIteration
        return item

    def __enter__(self) -> Self:
        return self

    wait = _hopping(SandboxProcess.wait)
    write = _hopping(SandboxProcess.write)
    end_input = _hopping(SandboxProcess.end_input)
    interrupt = _hopping(SandboxProcess.interrupt)
    signal = _hopping(SandboxProcess.signal)
    resize = _hopping(SandboxProcess.resize)
    kill = _hopping(SandboxProcess.kill)
    kill_leftovers = _hopping(SandboxProcess.kill_leftovers)
    reattach = _hopping(SandboxProcess.reattach)
    close = _hopping(SandboxProcess.close)
    __exit__ = _hopping(SandboxProcess.__aexit__)


_read = _hopping(SandboxProcess.read)


class BlockingFiles(_Twin[SandboxFiles]):
    """The files of one sandbox, in and out; it is `BlockingSandbox.files`."""

    put = _hopping(SandboxFiles.put)
    get = _hopping(SandboxFiles.get)
    read = _hopping(SandboxFiles.read)
    collect = _hopping(SandboxFiles.collect)
    list = _hopping(SandboxFiles.list)
    remove = _hopping(SandboxFiles.remove)
    make_directory = _hopping(SandboxFiles.make_directory)


class BlockingSandbox(_Twin[Sandbox], SandboxState):
    """A hardened container in which commands run; made by `open_sandbox`.

    Examples
    --------
    >>> with open_sandbox() as sandbox:
    ...     print(sandbox.run(["python3", "-c", "print(6 * 7)"]).stdout_text)
    42
    <BLANKLINE>
    """

    def __init__(self, twin: Sandbox) -> None:
        super().__init__(twin)
        self._live = twin._live
        self._timeouts = twin._timeouts

    @property
    def files(self) -> BlockingFiles:
        """The files in the sandbox: put them in, get them out, list them."""
        return BlockingFiles(self._twin.files)

    def __enter__(self) -> Self:
        return self

    run = _hopping(Sandbox.run)
    shell = _hopping(Sandbox.shell)
    start = _opening(Sandbox.start, BlockingProcess)
    kill = _hopping(Sandbox.kill)
    usage = _hopping(Sandbox.usage)
    wait = _hopping(Sandbox.wait)
    destroy = _hopping(Sandbox.destroy)
    close = _hopping(Sandbox.close)
    __exit__ = _hopping(Sandbox.__aexit__)


def _opener(make: Callable[P, Opening[Sandbox]]) -> Callable[P, BlockingSandbox]:
    @functools.wraps(make)
    def open_sandbox(*args: P.args, **kwargs: P.kwargs) -> BlockingSandbox:
        if isinstance(kwargs.get("engine"), Engine):
            raise SandboxSpecRejectedError(
                "engine",
                None,
                "an open engine can be used in its own event loop only",
                "Give its address, or use Sandbox.create.",
            )
        return BlockingSandbox(_open(make(*args, **kwargs)))

    open_sandbox.__name__ = open_sandbox.__qualname__ = "open_sandbox"
    open_sandbox.__module__ = __name__
    return _described(open_sandbox)


open_sandbox = _opener(Sandbox.create)
