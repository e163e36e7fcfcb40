"""`Opening`: something that is being made, for ``await`` and for ``async with`` alike."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, TypeVar

__all__ = ["Opening"]

T = TypeVar("T", bound=AbstractAsyncContextManager[Any, Any])


class Opening(Generic[T]):
    """What `Sandbox.create` and `Sandbox.start` return: nothing happens until it is awaited.

    ``await opening`` gives the thing itself, which the caller then has to close;
    ``async with opening as thing`` closes it at the end of the block.

    Parameters
    ----------
    make
        Makes the thing. When it fails or is cancelled, it leaves nothing behind.
    """

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._make = make
        self._made: T | None = None

    async def open(self) -> T:
        """Make the thing."""
        return await self._make()

    def __await__(self) -> Generator[Any, Any, T]:
        return self.open().__await__()

    async def __aenter__(self) -> T:
        if self._made is not None:
            raise RuntimeError("this has been entered already; make another one")
        self._made = await self.open()
        try:
            await self._made.__aenter__()
        except BaseException as error:
            await self._made.__aexit__(type(error), error, error.__traceback__)
            raise
        return self._made

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._made is not None
        await self._made.__aexit__(kind, error, trace)
