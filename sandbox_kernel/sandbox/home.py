"""Where the work of a sandbox is done: the engine thread's loop, or the caller's own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

__all__ = ["CallersLoop", "Home", "Hop"]

T = TypeVar("T")
Work = Callable[..., Coroutine[Any, Any, T]]


class Hop(Protocol):
    """Runs a coroutine function where the work is done, and awaits it in this loop."""

    async def __call__(self, work: Work[T], *args: Any) -> T:
        """Return what the work returns."""
        ...


class Home(Protocol):
    """Where the work is done. The engine thread is one."""

    async def call(
        self, work: Work[T], *args: Any, discard: Callable[[T], Awaitable[object]] | None = None
    ) -> T:
        """Do the work there; `discard` undoes a result that nobody will take."""
        ...

    def at_exit(self, work: Callable[[], Awaitable[object]]) -> Callable[[], None]:
        """Have something done when the process ends; returns what withdraws that."""
        ...


class CallersLoop:
    """The home of a sandbox on an engine that is open in the caller's own loop."""

    async def call(
        self, work: Work[T], *args: Any, discard: Callable[[T], Awaitable[object]] | None = None
    ) -> T:
        """Do the work here; cancelled, it undoes what it did by itself."""
        return await work(*args)

    def at_exit(self, work: Callable[[], Awaitable[object]]) -> Callable[[], None]:
        """Do nothing: whoever opened the engine ends what is on it, and else the lease does."""
        return lambda: None
