"""What happens to containers, as the engine tells it: one stream for all watchers.

aiodocker's own reader is not used: it goes silent for good after the connection was lost,
and a queue of its own grows without bound. Here the stream is made again with a growing
delay, and every watcher is told to look for itself (``resync``) what it missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sandbox_kernel.engine.faults import RAISED_BY_CALLS
from sandbox_kernel.engine.streams import lines
from sandbox_kernel.errors import SandboxUnavailableError

log = logging.getLogger(__name__)

EVENT_LABEL: Final = "io.sandbox-kernel.version"
"""Only containers that carry this label are reported."""

RESYNC: Final = "resync"
"""Action of the event after which a watcher has to inspect: something may have been missed."""

LOST: Final = "lost"
"""Action of the event that says that the engine's stream has just been lost."""

_QUEUE_LIMIT = 1000
_FIRST_DELAY, _LAST_DELAY = 0.1, 5.0
# Podman's words for the same things.
_SAME_AS = {"exec_died": "exec_die", "remove": "destroy", "died": "die", "exec": "exec_start"}


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to a container.

    Parameters
    ----------
    action
        Docker's word for it without the command line that some engines append: ``die``,
        ``destroy``, ``oom``, ``exec_die``, … or `RESYNC` or `LOST`.
    container_id
        The full id.
    attributes
        As the engine sent them; ``exec_die`` has ``execID`` and ``exitCode``.
    time_ns
        When, by the engine's clock; 0 for events made here.
    """

    action: str
    container_id: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    time_ns: int = 0


class Watch:
    """The events of one container, in order, as an async iterator without an end."""

    def __init__(self, container_id: str) -> None:
        self.container_id = container_id
        self._queue: asyncio.Queue[Event] = asyncio.Queue(_QUEUE_LIMIT)

    async def get(self) -> Event:
        """Wait for the next event."""
        return await self._queue.get()

    def put(self, event: Event) -> None:
        """Queue an event; what a slow watcher cannot hold becomes one `RESYNC`."""
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            while not self._queue.empty():
                self._queue.get_nowait()
            self._queue.put_nowait(Event(RESYNC, self.container_id))

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Event:
        return await self.get()


OpenStream = Callable[[], Awaitable[Any]]
"""Opens the ``/events`` stream and gives the aiohttp response."""


class EventHub:
    """The one ``/events`` stream of an engine, shared by its watchers.

    It is opened when the first watcher comes and lives until `close`.

    Attributes
    ----------
    interruptions
        How often the stream was lost, and how often it came back: as long as the number stays
        the same, the engine was not seen to go away.
    """

    def __init__(self, open_stream: OpenStream) -> None:
        self._open_stream = open_stream
        self._watches: dict[str, set[Watch]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self.interruptions = 0

    @contextlib.asynccontextmanager
    async def watch(self, container_id: str) -> AsyncIterator[Watch]:
        """Watch one container; whatever happens to it after entry is reported.

        While the engine is away, that report is the `RESYNC` that follows its return.

        Parameters
        ----------
        container_id
            The full id.
        """
        watch = Watch(container_id)
        self._watches.setdefault(container_id, set()).add(watch)
        try:
            await self._ensure_live()
            yield watch
        finally:
            watches = self._watches.get(container_id, set())
            watches.discard(watch)
            if not watches:
                self._watches.pop(container_id, None)

    async def close(self) -> None:
        """End the stream and its task. Idempotent."""
        self._closed = True
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            await asyncio.wait({reader})

    async def _ensure_live(self) -> None:
        async with self._opening:
            if self._closed:
                raise SandboxUnavailableError("lost", "The connection to the engine is closed")
            if self._reader is None:
                # The first one is opened here so that its failure reaches who asked.
                response = await self._open_stream()
                if self._closed:
                    response.close()
                    raise SandboxUnavailableError("lost", "The connection to the engine is closed")
                self._reader = asyncio.create_task(self._run(response), name="engine-events")

    async def _run(self, response: Any) -> None:
        delay = _FIRST_DELAY
        try:
            while True:
                # A stream that lasted earns a quick second try.
                if await self._consume(response):
                    delay = _FIRST_DELAY
                self._tell_all(LOST)
                response = None
                while response is None:
                    await asyncio.sleep(delay)
                    delay = min(delay * 2, _LAST_DELAY)
                    try:
                        response = await self._open_stream()
                    except Exception as error:
                        # Whatever it was, the stream is tried again; calls report the cause.
                        log.debug("the engine's events cannot be had yet: %s", error)
                self._tell_all(RESYNC)
        finally:
            if response is not None:
                response.close()

    async def _consume(self, response: Any) -> bool:
        """Deliver events until the stream ends; say whether there was any."""
        some = False
        try:
            async for line in lines(response):
                some = True
                self._deliver(line)
        except RAISED_BY_CALLS as error:
            log.debug("the engine's events ended: %r", error)
        finally:
            response.close()
        return some

    def _deliver(self, line: bytes) -> None:
        event = parse_event(line)
        if event is None:
            return
        for watch in tuple(self._watches.get(event.container_id, ())):
            watch.put(event)

    def _tell_all(self, action: str) -> None:
        self.interruptions += 1
        for container_id, watches in self._watches.items():
            for watch in watches:
                watch.put(Event(action, container_id))


def parse_event(line: bytes) -> Event | None:
    """Read one line of the stream; `None` for what is not an event of a container."""
    try:
        data = json.loads(line)
        actor = data["Actor"]
        container_id = actor["ID"]
        raw_action = data.get("Action") or data["status"]
        attributes = actor.get("Attributes") or {}
        time_ns = int(data.get("timeNano") or 0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if not isinstance(container_id, str) or not isinstance(raw_action, str):
        return None
    if data.get("Type") not in {"container", None} or not isinstance(attributes, dict):
        return None
    # "exec_create: sh -c …" carries the whole command line, which may hold secrets.
    action = raw_action.partition(":")[0].strip()
    action = _SAME_AS.get(action, action)
    kept = {str(key): str(value) for key, value in attributes.items()}
    if "containerExitCode" in kept:
        kept.setdefault("exitCode", kept["containerExitCode"])
    return Event(action, container_id, kept, time_ns)
