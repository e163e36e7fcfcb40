"""The hold on one container: its lease, and the task that learns what becomes of it (K4).

That task listens to the engine's events and to the lease's stream. Neither is believed when it
merely ends: then the engine is asked. A sandbox that ends with its owner's connection is gone
when that breaks; one that may outlive its owner is attached to again for as long as it can be
there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.events import LOST, RESYNC, Event, Watch
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxEngineError,
    SandboxError,
    SandboxGoneError,
    SandboxStartError,
    SandboxUnavailableError,
)
from sandbox_kernel.sandbox.container import grace_seconds, lease_seconds
from sandbox_kernel.sandbox.ending import EndReason, reason_of
from sandbox_kernel.sandbox.lease import LeaseHolder, LeaseState, Trouble
from sandbox_kernel.sandbox.spec import Limits, SandboxSpec

log = logging.getLogger(__name__)

START_TIMEOUT: Final = 20.0
_LOOK_TIMEOUT: Final = 5.0
_EVENT_PATIENCE: Final = 0.5
_FIRST_DELAY, _LAST_DELAY = 0.1, 2.0
_OVER: Final = frozenset({"exited", "dead", "removing"})


class Hold:
    """What one owner has of one container.

    Attributes
    ----------
    ended
        Done when the container has ended or is somebody else's, with an `EndReason`; it never
        fails.
    out_of_memory_events
        How often the engine has reported that something in it was killed for lack of memory.
    paused
        Whether it is paused, as far as the engine has said.

    Parameters
    ----------
    engine, container_id
        Where, and which; the full id.
    spec, limits
        What was asked for, and what that came to.
    in_use
        Asked at each renewal whether the sandbox is in use just now.
    """

    def __init__(
        self,
        engine: Engine,
        container_id: str,
        spec: SandboxSpec,
        limits: Limits,
        in_use: Callable[[], bool],
    ) -> None:
        self.ended: asyncio.Future[EndReason] = asyncio.get_running_loop().create_future()
        self.out_of_memory_events = 0
        self.paused = False
        self._engine = engine
        self._id = container_id
        self._short_id = container_id[:12]
        self._spec = spec
        self._limits = limits
        self._in_use = in_use
        self._alone = False
        self._ident: str | None = None
        self._killed_from_outside = False
        self._line_broke = False
        self._lease: LeaseHolder | None = None
        self._attached = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._event: asyncio.Future[Event] | None = None

    # -- beginning and ending -----------------------------------------------------------------

    async def begin(self, *, start: bool, alone: bool, holder: str | None = None) -> LeaseState:
        """Attach to the container and become its holder.

        Parameters
        ----------
        start
            Whether to start it; else it runs.
        alone
            Whether to be its only holder.
        holder
            The id of a holder that is gone and whose place is taken; `None` for a new one.

        Raises
        ------
        SandboxGoneError
            It ended, or was removed, before it could be held.
        SandboxConflictError
            Somebody else holds it alone.
        SandboxStartError
            Its main process did not come up.
        """
        self._alone, self._ident = alone, holder
        if start:
            # Before the start, to miss nothing of it.
            await self._attach()
        watching = asyncio.Event()
        self._watcher = asyncio.create_task(self._watch(watching), name=f"watch-{self._short_id}")
        ready = asyncio.ensure_future(watching.wait())
        try:
            await asyncio.wait({ready, self._watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self._watcher.done():
            self._watcher.result()  # why the events could not be had
        if start:
            try:
                await self._engine.start_container(self._id)
            except SandboxGoneError as error:
                raise SandboxStartError("The sandbox was removed before it could start") from error
            await self.lease.armed(START_TIMEOUT)
        else:
            await self._attach()
            # One that ended just before takes an attachment too, and keeps it until it is started.
            await self._ask()
        return await self._join(alone)

    async def _join(self, alone: bool) -> LeaseState:
        """Become a holder, unless it ends meanwhile, of which nothing comes over the stream."""
        joining = asyncio.ensure_future(self.lease.join(START_TIMEOUT, alone=alone))
        try:
            first: set[asyncio.Future[Any]] = {joining, self.ended}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not joining.done():
                raise SandboxGoneError(self.ended.result().text)
            return joining.result()
        finally:
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)

    async def _attach(self) -> None:
        old = self._lease
        stream = await self._engine.attach_container(self._id)
        self._lease = LeaseHolder(
            stream,
            lease_seconds(self._spec),
            ident=old.ident if old is not None else self._ident,
            in_use=self._in_use,
        )
        self._attached.set()
        if old is not None:
            await old.release()

    @property
    def lease(self) -> LeaseHolder:
        """The lease, once the hold has begun."""
        if self._lease is None:
            raise RuntimeError("the sandbox is not held")
        return self._lease

    @property
    def state(self) -> LeaseState | None:
        """What the lease has last told of itself."""
        return None if self._lease is None else self._lease.state

    def end(self, reason: EndReason) -> None:
        """Settle why it ended; only the first reason counts."""
        if not self.ended.done():
            self.ended.set_result(reason)
            log.info("sandbox %s ended: %s", self._short_id, reason.text)

    async def release(self) -> None:
        """Stop watching and drop the stream. Idempotent."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})
        if self._lease is not None:
            await self._lease.release()

    async def reason_soon(self) -> EndReason | None:
        """Return why it ended; a call can fail just before the event arrives."""
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(self.ended), 1.0)
        return None

    # -- watching -----------------------------------------------------------------------------

    async def _watch(self, watching: asyncio.Event) -> None:
        async with self._engine.events.watch(self._id) as events:
            watching.set()
            try:
                while not self.ended.done():
                    await self._next_news(events)
            except Exception as error:
                # Whoever waits for the end must not wait for ever.
                log.exception("sandbox %s can no longer be watched", self._short_id)
                self.end(EndReason("engine-lost", None, f"Watching the sandbox failed: {error}"))
            finally:
                if self._event is not None:
                    self._event.cancel()
                    await asyncio.wait({self._event})

    async def _next_news(self, events: Watch) -> None:
        """Wait for an event or for trouble with the lease, and deal with it."""
        event = self._next_event(events)
        trouble = asyncio.ensure_future(self._next_trouble())
        try:
            first: set[asyncio.Future[Any]] = {event, trouble}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not event.done():
                # The stream ends with the container, and its event, which says more, may be
                # a moment behind.
                await asyncio.wait({event}, timeout=_EVENT_PATIENCE)
            if event.done() and self._take(event):
                await self._look(events)
            if trouble.done() and not self.ended.done():
                await self._face(trouble.result(), events)
        finally:
            trouble.cancel()
            await asyncio.wait({trouble})

    def _next_event(self, events: Watch) -> asyncio.Future[Event]:
        # Kept while trouble is dealt with, which can take minutes: what comes then must be heard.
        if self._event is None:
            self._event = asyncio.ensure_future(events.get())
        return self._event

    def _take(self, event: asyncio.Future[Event]) -> bool:
        self._event = None
        return self._hear(event.result())

    async def _catch_up(self, events: Watch) -> None:
        """Hear what has been reported meanwhile."""
        while not self.ended.done():
            event = self._next_event(events)
            await asyncio.wait({event}, timeout=_EVENT_PATIENCE)
            if not event.done():
                return
            self._take(event)

    async def _next_trouble(self) -> Trouble:
        await self._attached.wait()
        return await self.lease.trouble()

    def _hear(self, event: Event) -> bool:
        """Take in an event; say whether to ask the engine."""
        if event.action == "oom":
            self.out_of_memory_events += 1
        elif event.action == "pause":
            self.paused = True
        elif event.action == "unpause":
            self.paused = False
        elif event.action == "kill":
            self._killed_from_outside = event.attributes.get("signal") in {"9", "15", None}
        elif event.action == "die":
            code = event.attributes.get("exitCode", "")
            self.end(self._reason(int(code) if code.isdecimal() else None))
        elif event.action == "destroy":
            self.end(EndReason("removed", None, "The sandbox was removed on the engine."))
        if event.action in {RESYNC, LOST}:
            self._line_broke = True
            return True
        return False

    async def _face(self, trouble: Trouble, events: Watch) -> None:
        """Deal with what is wrong with the lease."""
        if trouble == "taken":
            self._taken()
        elif trouble == "lost":
            await self._rejoin(events)
        elif trouble == "silent":
            await self._look(events)
        elif self._spec.is_shared:
            await self._come_back(events)
        else:
            await self._look(events)

    async def _look(self, events: Watch) -> None:
        """Ask the engine whether the sandbox still runs."""
        try:
            await self._ask(events)
        except (SandboxUnavailableError, SandboxEngineError, TimeoutError) as error:
            if self._spec.is_shared:
                return  # the stream will end too, or not
            text = f"The connection to the engine broke: {str(error) or 'it gives no answer'}"
            self.end(EndReason("engine-lost", None, text))

    async def _ask(self, events: Watch | None = None) -> None:
        try:
            async with asyncio.timeout(_LOOK_TIMEOUT):
                state: dict[str, Any] = (await self._engine.inspect_container(self._id))["State"]
        except SandboxGoneError:
            if events is not None:
                # Why it ended says more than that it is gone.
                await self._catch_up(events)
            self.end(self._gone())
            return
        self.paused = bool(state.get("Paused"))
        if state.get("Status") in _OVER:
            self.end(self._reason(int(state.get("ExitCode") or 0)))

    def _gone(self) -> EndReason:
        """Tell why there is none any more, of whose end no event has told."""
        if self._line_broke and not self._spec.is_shared:
            text = "The connection that kept the sandbox alive broke, and the sandbox ended."
            return EndReason("engine-lost", None, text)
        if self._line_broke:
            text = "The connection to the engine broke, and the sandbox was gone when it was back."
            return EndReason("removed", None, text)
        return EndReason("removed", None, "The sandbox is gone: the engine no longer knows it.")

    async def _rejoin(self, events: Watch) -> None:
        """Become a holder again after having counted as dead, as after a suspended machine."""
        try:
            await self._join_again()
            log.info("sandbox %s: held again after a silence", self._short_id)
        except SandboxError as error:
            log.debug("sandbox %s: cannot be held again yet: %s", self._short_id, error)
            await self._look(events)

    async def _join_again(self) -> None:
        try:
            state = await self.lease.join(START_TIMEOUT, alone=False)
        except SandboxConflictError:
            self._taken()
            return
        if self._alone and state.holders == 1:
            await self.lease.join(START_TIMEOUT, alone=True)

    async def _come_back(self, events: Watch) -> None:
        """Hold on over a new stream, for as long as the sandbox can be there without a holder."""
        began = time.monotonic()
        longest = lease_seconds(self._spec) + grace_seconds(self._spec) + START_TIMEOUT
        delay = _FIRST_DELAY
        while not self.ended.done():
            try:
                await self._ask(events)
                if self.paused:
                    began = time.monotonic()  # it does not tick, and cannot be attached to
                elif not self.ended.done():
                    await self._attach()
                    await self._join_again()
                    log.info("sandbox %s: attached to again", self._short_id)
                    return
            except (SandboxError, TimeoutError) as error:
                if time.monotonic() - began > longest:
                    why = str(error) or "it gives no answer"
                    text = f"The connection to the engine broke: {why}"
                    self.end(EndReason("engine-lost", None, text))
            await asyncio.sleep(delay)
            delay = min(delay * 2, _LAST_DELAY)

    def _taken(self) -> None:
        self.end(EndReason("taken-over", None, "Another owner has taken the sandbox over."))

    def _reason(self, code: int | None) -> EndReason:
        return reason_of(
            code,
            self._spec,
            self._limits,
            killed_from_outside=self._killed_from_outside,
            out_of_memory=self.out_of_memory_events > 0,
            said=self._lease.output if self._lease is not None else "",
        )
