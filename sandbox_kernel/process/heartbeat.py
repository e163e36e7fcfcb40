"""Whether an engine still answers while commands run silently on it (contract W23).

A frozen engine, or a line that passes nothing on any more, looks just like a command that says
nothing. One task for each engine asks it for a sign of life as long as any command runs there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import SandboxError

__all__ = ["Heartbeat"]

# Together they find a frozen engine within 10 s. Two pings have to fail, since one also does
# when this process itself could not run for a while.
INTERVAL: Final = 2.5
PATIENCE: Final = 3.5
SILENCE: Final = 6.0
_FAILURES: Final = 2

Listener = Callable[[str], None]
"""Called, again and again while the silence lasts, with what the last ping met."""


class Heartbeat:
    """The sign of life of one engine; `of` gives the one that all of its commands share."""

    _all: Final[dict[Engine, Heartbeat]] = {}

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._listeners: list[Listener] = []
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, engine: Engine) -> Heartbeat:
        """Return the heartbeat of an engine; it is kept from the first listener to the last."""
        return cls._all.get(engine) or cls(engine)

    def join(self, listener: Listener) -> None:
        """Tell a listener when the engine has gone silent, until it leaves."""
        self._all.setdefault(self._engine, self)
        self._listeners.append(listener)
        if self._task is None:
            self._task = asyncio.create_task(self._listen(), name="engine-heartbeat")

    async def leave(self, listener: Listener) -> None:
        """Tell it nothing any more; the last one ends the task. Idempotent."""
        with contextlib.suppress(ValueError):
            self._listeners.remove(listener)
        if not self._listeners and self._task is not None:
            task, self._task = self._task, None
            if self._all.get(self._engine) is self:
                del self._all[self._engine]
            task.cancel()
            await asyncio.wait({task})

    async def _listen(self) -> None:
        clock = asyncio.get_running_loop().time
        heard, failures = clock(), 0
        while True:
            await asyncio.sleep(INTERVAL if failures == 0 else min(failures - 1, 1))
            try:
                async with asyncio.timeout(PATIENCE):
                    await self._engine.ping()
            except (SandboxError, TimeoutError) as error:
                failures += 1
                if failures >= _FAILURES and clock() - heard >= SILENCE:
                    why = str(error) or f"it gave no answer within {PATIENCE:g} s"
                    for listener in tuple(self._listeners):
                        listener(why)
            else:
                heard, failures = clock(), 0
