"""The blocking twins of `Sandbox` and `SandboxProcess`, for scripts, threads and notebook cells.

Nothing is done here twice: every method is the one of the twin, awaited in the engine thread
while this thread waits. So they need no event loop and work where one runs already. An interrupt
(Ctrl-C) of the waiting stops in the sandbox what was waited for, and is then raised.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from sandbox_kernel.config import EngineSettings
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.thread import EngineThread
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.process.result import Chunk, Exit
from sandbox_kernel.sandbox.facade import Sandbox, SandboxState
from sandbox_kernel.sandbox.files import SandboxFiles
from sandbox_kernel.sandbox.opening import Opening
from sandbox_kernel.sandbox.program import ProcessState, SandboxProcess
from sandbox_kernel.sandbox.workspace_access import SandboxWorkspaces

__all__ = [
    "BlockingFiles",
    "BlockingProcess",
    "BlockingSandbox",
    "BlockingWorkspaces",
    "connect_sandbox",
    "find_sandboxes",
    "open_sandbox",
]

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
        ("await Sandbox.connect(", "connect_sandbox("),
        ("Sandbox.connect(", "connect_sandbox("),
        ("Sandbox.find_all(", "find_sandboxes("),
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
    pause = _hopping(Sandbox.pause)
    resume = _hopping(Sandbox.resume)
    touch = _hopping(Sandbox.touch)
    expires_at = _hopping(Sandbox.expires_at)
    detach = _hopping(Sandbox.detach)
    wait = _hopping(Sandbox.wait)
    destroy = _hopping(Sandbox.destroy)
    close = _hopping(Sandbox.close)
    __exit__ = _hopping(Sandbox.__aexit__)


class BlockingWorkspaces(_Twin[SandboxWorkspaces]):
    r"""The persistent workspaces of one owner, while no sandbox of one's own runs.

    Examples
    --------
    >>> with open_sandbox(SandboxSpec(durability="persistent", workspace="docs/w")) as sandbox:
    ...     sandbox.shell("echo kept > file").returncode
    0
    >>> BlockingWorkspaces().read("docs/w", "file")
    b'kept\n'
    >>> BlockingWorkspaces().remove("docs/w")
    """

    def __init__(
        self,
        *,
        engine: str | EngineSettings | None = None,
        owner: str | None = None,
        image: str | None = None,
    ) -> None:
        _refuse_open_engine(engine)
        super().__init__(SandboxWorkspaces(engine=engine, owner=owner, image=image))

    list = _hopping(SandboxWorkspaces.list)
    find = _hopping(SandboxWorkspaces.find)
    size = _hopping(SandboxWorkspaces.size)
    remove = _hopping(SandboxWorkspaces.remove)
    clone = _hopping(SandboxWorkspaces.clone)
    export = _hopping(SandboxWorkspaces.export)
    import_ = _hopping(SandboxWorkspaces.import_)
    files = _hopping(SandboxWorkspaces.files)
    get = _hopping(SandboxWorkspaces.get)
    read = _hopping(SandboxWorkspaces.read)


def _refuse_open_engine(engine: object) -> None:
    if isinstance(engine, Engine):
        raise SandboxSpecRejectedError(
            "engine",
            None,
            "an open engine can be used in its own event loop only",
            "Give its address, or use the form with await.",
        )


def _named(name: str, method: Callable[P, T]) -> Callable[P, T]:
    method.__name__ = method.__qualname__ = name
    method.__module__ = __name__
    return _described(method)


def _opener(name: str, make: Callable[P, Opening[Sandbox]]) -> Callable[P, BlockingSandbox]:
    @functools.wraps(make)
    def opener(*args: P.args, **kwargs: P.kwargs) -> BlockingSandbox:
        _refuse_open_engine(kwargs.get("engine"))
        return BlockingSandbox(_open(make(*args, **kwargs)))

    return _named(name, opener)


def _finder(name: str, find: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    @functools.wraps(find)
    def finder(*args: P.args, **kwargs: P.kwargs) -> T:
        _refuse_open_engine(kwargs.get("engine"))
        return EngineThread.current().run(functools.partial(find, *args, **kwargs))

    return _named(name, finder)


open_sandbox = _opener("open_sandbox", Sandbox.create)
connect_sandbox = _opener("connect_sandbox", Sandbox.connect)
find_sandboxes = _finder("find_sandboxes", Sandbox.find_all)
