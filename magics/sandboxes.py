"""Where runs happen: the session's sandbox of this process, or a fresh one for one run.

This is the part that makes sandboxes (shape A: a trusted kernel, sandboxed cells). What it gives
is all that runs see of it; a broker on another side of a wall would take its place. All of it runs
in the worker's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from sandbox_magics import view
from sandbox_magics.text import clean

if TYPE_CHECKING:
    from sandbox_kernel.sandbox.facade import Sandbox
    from sandbox_kernel.sandbox.order import Order

__all__ = ["Fresh", "News", "Place", "Session"]

log = logging.getLogger(__name__)


class News(Protocol):
    """Whom to tell, for people, what goes on."""

    def phase(self, text: str) -> None:
        """Say what is being waited for."""
        ...

    def note(self, text: str) -> None:
        """Say something that is worth to be kept."""
        ...


class Place(Protocol):
    """Somewhere a run can happen."""

    @property
    def network(self) -> str:
        """The tier of its network."""
        ...

    @property
    def image(self) -> str:
        """The image, as far as it is known."""
        ...

    @property
    def seen(self) -> dict[str, tuple[int, float]] | None:
        """Artifacts that were shown already; `None` where all are of one run."""
        ...

    def use(self, news: News) -> contextlib.AbstractAsyncContextManager[Sandbox]:
        """Give a sandbox for the time of one run."""
        ...


@dataclass(frozen=True, slots=True)
class Fresh:
    """A sandbox of its own for one run, removed afterwards (C2).

    Parameters
    ----------
    asked
        Settings by name; the configuration fills in the rest, and the policy judges it.
    setup
        Command lines that root runs first, in a container of their own (C3).
    """

    asked: Mapping[str, Any] = field(repr=False)
    setup: tuple[str, ...] = field(default=(), repr=False)

    @property
    def network(self) -> str:
        """The tier of its network."""
        return str(self.asked["network"])

    @property
    def seen(self) -> None:
        """Nothing: all artifacts are of the one run."""
        return

    @property
    def image(self) -> str:
        """The image, if it was asked for."""
        return str(self.asked.get("image") or "")

    @contextlib.asynccontextmanager
    async def use(self, news: News) -> AsyncIterator[Sandbox]:
        """Make the sandbox, and remove it at the end whatever happens."""
        async with contextlib.AsyncExitStack() as stack:
            order = await _settled(self.asked)
            if self.setup:
                order = await stack.enter_async_context(self._prepared(order, news))
            async with self._sandbox(order, news) as sandbox:
                yield sandbox

    def _prepared(self, order: Order, news: News) -> contextlib.AbstractAsyncContextManager[Order]:
        from sandbox_kernel.sandbox.setup import prepared

        def hear(line: str) -> None:
            news.phase(f"setup · {view.one_line(clean(line), 80)}")

        news.phase("setup")
        return prepared(order, self.setup, timeout=order.timeouts.most, hear=hear)

    @contextlib.asynccontextmanager
    async def _sandbox(self, order: Order, news: News) -> AsyncIterator[Sandbox]:
        from sandbox_kernel.errors import SandboxError

        sandbox = await _made(order, news)
        try:
            yield sandbox
        finally:
            try:
                await sandbox.destroy()
            except SandboxError as error:
                # What the run gave is worth more than this, which mends itself.
                news.note(f"[{sandbox.name} will be removed by the engine, not by us: {error}]")


class Session:
    """The sandbox in which the cells of one process share files; made on first use.

    Parameters
    ----------
    asked
        Gives the settings to make one with, each time anew.
    """

    def __init__(self, asked: Callable[[], Mapping[str, Any]]) -> None:
        self._asked = asked
        self._sandbox: Sandbox | None = None
        self._making = asyncio.Lock()
        self._made_with: Mapping[str, Any] = {}
        self._users = 0
        self.since = 0.0
        # Size and time by path.
        self.seen: dict[str, tuple[int, float]] = {}

    network = "none"

    @property
    def image(self) -> str:
        """The image, if there is a sandbox."""
        return "" if self._sandbox is None else self._sandbox.spec.image

    @property
    def sandbox(self) -> Sandbox | None:
        """The sandbox, as long as it runs."""
        sandbox = self._sandbox
        return sandbox if sandbox is not None and sandbox.ended is None else None

    @property
    def runs(self) -> int:
        """How many runs are in it now."""
        return self._users

    @contextlib.asynccontextmanager
    async def use(self, news: News) -> AsyncIterator[Sandbox]:
        """Give the session's sandbox, which stays afterwards."""
        sandbox = await self.get(news)
        self._users += 1
        try:
            yield sandbox
        finally:
            self._users -= 1

    async def get(self, news: News) -> Sandbox:
        """Return the sandbox, a new one when there is none or the last one has ended."""
        async with self._making:
            asked = dict(self._asked())
            last = self._sandbox
            if last is not None and (ended := last.ended) is not None:
                news.note(
                    f"[this is a new session, without the files of the last one: {ended.text}]"
                )
                self._forget()
                await last.close()
            if self._sandbox is None:
                self._sandbox = await make(asked, news)
                self._made_with = asked
                self.since = time.monotonic()
            elif asked != self._made_with:
                news.note(
                    "[what is configured has changed; it holds for the next session: "
                    "%sandbox_kill --session]"
                )
                self._made_with = asked
            return self._sandbox

    async def end(self) -> None:
        """End the sandbox and all that runs in it, for everybody who shares its workspace."""
        async with self._making:
            sandbox = self._forget()
            if sandbox is not None:
                await sandbox.destroy()

    async def close(self) -> None:
        """Let go of the sandbox; it goes on only for others who share its workspace."""
        async with self._making:
            sandbox = self._forget()
            if sandbox is not None:
                await sandbox.close()

    def _forget(self) -> Sandbox | None:
        sandbox, self._sandbox = self._sandbox, None
        self.seen.clear()
        return sandbox


async def make(asked: Mapping[str, Any], news: News) -> Sandbox:
    """Make a sandbox, telling what is waited for."""
    return await _made(await _settled(asked), news)


async def _settled(asked: Mapping[str, Any]) -> Order:
    # Not at the top: it brings the client of the engine, which loading the extension must not.
    from sandbox_kernel.sandbox.order import settle

    # Files are read: not in a loop in which others wait.
    return await asyncio.to_thread(settle, asked, door="magics")


async def _made(order: Order, news: News) -> Sandbox:
    from sandbox_kernel.sandbox.facade import Sandbox

    news.phase("starting sandbox")
    return await Sandbox.from_order(order, progress=lambda step: news.phase(_step_text(step)))


def _step_text(step: Any) -> str:
    """Return a step of the pull of an image in words."""
    text = f"pulling · {step.text}" if step.text else "pulling"
    if step.current is not None and step.total:
        text += f" · {view.memory(step.current)} of {view.memory(step.total)}"
    return text
