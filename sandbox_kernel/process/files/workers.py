"""Threads of one transfer for what blocks: reading and writing files of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

_PATIENCE = 10.0
_T = TypeVar("_T")


class Workers:
    """Two threads, one for each direction; a context manager that lets go of them.

    They are a transfer's own, so that a disk that does not answer holds up nothing else in
    this process.

    Attributes
    ----------
    busy
        How many are at work.
    """

    def __init__(self) -> None:
        self.busy = 0
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="sandbox-files")

    async def do(self, work: Callable[..., _T], *args: Any) -> _T:
        """Do something that blocks; a caller that is cancelled still waits for its end.

        The wait has a bound: a disk or a file object that answers no more is left alone then.
        """
        self.busy += 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait({future}, timeout=_PATIENCE)
            if future.done() and not future.cancelled():
                future.exception()
            raise
        finally:
            self.busy -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._threads.shutdown(wait=False)
