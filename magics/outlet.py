"""`Outlet`: how much of a program's output is shown, and in which messages; no I/O.

A front end chokes on many messages and a Jupyter server drops what is too fast, so output is
gathered: at most 20 messages a second, or more only when they are full (64 KiB). Where a server is
between, the bytes are paced too. What goes beyond the limit of the display is counted, not shown.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["FULL", "INTERVAL", "SERVER_PACE", "Outlet", "Pace", "Piece"]

FULL: Final = 64 * 1024
"""Bytes at which a message is sent whatever the time."""

INTERVAL: Final = 0.05
"""Seconds for one message that is not full."""

_BURST: Final = 4.0
_TINY: Final = 1e-6
_MESSAGE_OVERHEAD: Final = 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """Text for one message of one stream."""

    stream: int
    text: str


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast bytes may leave.

    Parameters
    ----------
    burst
        Bytes at once after a rest.
    rate
        Bytes a second.
    """

    burst: float
    rate: float


SERVER_PACE: Final = Pace(burst=1_300_000, rate=450_000)
"""A Jupyter server drops what exceeds 1 MB/s over 3 s, unless it is configured otherwise."""


class _Tokens:
    """What may be spent: refilled with time, up to a bound. Debt is possible."""

    def __init__(self, burst: float, rate: float, now: float) -> None:
        self.burst = burst
        self._rate = rate
        self._left = burst
        self._at = now

    def left(self, now: float) -> float:
        self._left = min(self.burst, self._left + (now - self._at) * self._rate)
        self._at = now
        return self._left

    def spend(self, amount: float) -> None:
        self._left -= amount

    def wait(self, amount: float) -> float:
        """Seconds until there is so much."""
        return max(0.0, (amount - self._left) / self._rate)


class Outlet:
    """Gathers text of both streams and says which messages are due.

    Parameters
    ----------
    clock
        Monotonic time in seconds.
    limit
        Characters to show of both streams together.
    pace
        The bound on bytes, where there is one. It is shared by the runs of a process.
    """

    def __init__(
        self, clock: Callable[[], float], limit: int, pace: PaceKeeper | None = None
    ) -> None:
        self._clock = clock
        self._limit = limit
        self._pace = pace
        self._messages = _Tokens(_BURST, 1 / INTERVAL, clock())
        self._pending: deque[tuple[int, deque[str]]] = deque()
        self._size = 0
        self.shown = 0
        self.hidden = 0

    def add(self, stream: int, text: str) -> None:
        """Take text that can be shown."""
        room = self._limit - self.shown
        self.hidden += max(len(text) - max(room, 0), 0)
        text = text[: max(room, 0)]
        if not text:
            return
        self.shown += len(text)
        self._size += len(text)
        if self._pending and self._pending[-1][0] == stream:
            self._pending[-1][1].append(text)
        else:
            self._pending.append((stream, deque([text])))

    @property
    def full(self) -> bool:
        """Whether nothing more will be shown."""
        return self.shown >= self._limit

    def delay(self) -> float | None:
        """Return the seconds until something is due; `None` when nothing waits."""
        if not self._pending:
            return None
        now = self._clock()
        paced = 0.0 if self._pace is None else self._pace.wait(now)
        if self._size >= FULL:
            return paced
        self._messages.left(now)
        return max(paced, self._messages.wait(1.0))

    def due(self, everything: bool = False) -> list[Piece]:
        """Return the messages to send now, in order.

        Parameters
        ----------
        everything
            Whether this is the end, so that nothing may wait for its time (the pace of bytes still
            holds).
        """
        pieces: list[Piece] = []
        while self._pending:
            now = self._clock()
            if self._pace is not None and self._pace.wait(now) > 0:
                break
            allowed = self._messages.left(now)
            if self._size < FULL and not everything and allowed < 1 - _TINY:
                break
            if len(self._pending) > max(allowed, 1):
                # So many changes between the streams within a moment have no order to be seen.
                self._gather()
            piece = self._next()
            if len(piece.text) < FULL:
                # No debt: what had to be sent now must not delay what comes later.
                self._messages.spend(min(1.0, max(allowed, 0.0)))
            if self._pace is not None:
                self._pace.spend(message_bytes(piece.text))
            pieces.append(piece)
        return pieces

    def _next(self) -> Piece:
        """Take the next message."""
        stream, texts = self._pending[0]
        taken: list[str] = []
        room = FULL
        while texts and room:
            text = texts.popleft()
            if len(text) > room:
                texts.appendleft(text[room:])
                text = text[:room]
            taken.append(text)
            room -= len(text)
        if not texts:
            self._pending.popleft()
        self._size -= FULL - room
        return Piece(stream, "".join(taken))

    def _gather(self) -> None:
        texts: dict[int, deque[str]] = {}
        for stream, parts in self._pending:
            texts.setdefault(stream, deque()).extend(parts)
        self._pending = deque(texts.items())


class PaceKeeper:
    """The bound on bytes of all runs of a process together."""

    def __init__(self, pace: Pace, now: float) -> None:
        self._tokens = _Tokens(pace.burst, pace.rate, now)

    def wait(self, now: float) -> float:
        """Return the seconds until more may be sent."""
        left = self._tokens.left(now)
        # A full message must fit, since it is sent as a whole.
        return 0.0 if left >= 2 * FULL - 1 else self._tokens.wait(2 * FULL)

    def spend(self, amount: float) -> None:
        """Count bytes that were sent."""
        self._tokens.spend(amount)


def message_bytes(text: str) -> int:
    """Return the size of a stream message on its way to the browser."""
    encoded = json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")
    return len(encoded) + _MESSAGE_OVERHEAD
