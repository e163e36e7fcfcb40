"""How many commands an engine is asked to start at a time (contract W23).

Starting a process is work for the engine's machine: a hundred at once take each other's time
until none of them is ready within its own. So they take turns, and what has to be quick, a stop
or a signal, is not among them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Final
from weakref import WeakKeyDictionary

from sandbox_kernel.engine.client import Engine

__all__ = ["Starts"]

AT_ONCE: Final = 16
"""Starts on one engine: it does not do them faster when there are more."""

AT_ONCE_EACH: Final = 8
"""Those in one container, so that one in which nothing can start leaves turns to the others."""

LONGEST_TURN: Final = 10.0
"""Seconds after which a start that waits for something else than its turn ends its turn."""


class Starts:
    """The turns of one engine's commands to start; `of` gives the one that all of them share."""

    _all: Final[WeakKeyDictionary[Engine, Starts]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._everywhere = asyncio.Semaphore(AT_ONCE)
        self._within: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(AT_ONCE_EACH)
        )
        self._users: defaultdict[str, int] = defaultdict(int)

    @classmethod
    def of(cls, engine: Engine) -> Starts:
        """Return the turns of an engine."""
        return cls._all.setdefault(engine, cls())

    @contextlib.asynccontextmanager
    async def turn(self, container_id: str) -> AsyncIterator[None]:
        """Wait for a turn and have it for the length of a block, or for `LONGEST_TURN`.

        Parameters
        ----------
        container_id
            Where something is to start.
        """
        self._users[container_id] += 1
        try:
            async with self._within[container_id], _Turn(self._everywhere):
                yield
        finally:
            self._users[container_id] -= 1
            if not self._users[container_id]:
                del self._users[container_id], self._within[container_id]


class _Turn:
    """One turn, which is given back after a time at the latest."""

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns = turns
        self._end: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._turns.acquire()
        self._end = asyncio.get_running_loop().call_later(LONGEST_TURN, self._give_back)

    async def __aexit__(self, *_: object) -> None:
        if self._end is not None:
            self._end.cancel()
            self._give_back()

    def _give_back(self) -> None:
        if self._end is not None:
            self._end = None
            self._turns.release()
