"""What arrives on a command's stream, sorted: reports of its wrapper, and output (W2, W9, W10).

No engine here. Output is counted and passed on to a sink; reports become facts about the
command. Before a command runs there can be no output of it: what comes then without being a
report are words of the engine or the image, which an error about the start repeats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from sandbox_kernel.errors import SandboxError, SandboxImageUnsuitableError
from sandbox_kernel.process.output import Reports, Sink
from sandbox_kernel.process.result import Chunk, CommandNotFoundError, CommandStartError
from sandbox_kernel.process.stop import Identity, Kind
from sandbox_kernel.process.verdict import Evidence, parse_evidence, parse_identity

__all__ = ["Intake"]

_EARLY_LIMIT: Final = 64 * 1024
_REFUSALS: Final = {
    "not-found": "there is no such program in the sandbox",
    "not-executable": "what it names is no program that this user may run",
    "directory": "its working directory cannot be entered",
    "environment": "its environment cannot be set",
}


class Intake:
    """The receiving end of one command.

    Parameters
    ----------
    kind
        Whether its output comes through pipes or from a terminal.
    nonce
        What the wrapper's reports begin with.
    marker
        The value of the variable by which its processes can be known.
    sink
        Where its output goes.
    limit
        Bytes of output after which `overflow` is called.
    overflow
        Called once, with the reason, when no more output can be taken; what comes after that is
        counted and dropped.

    Attributes
    ----------
    counts
        Bytes of output by stream.
    heard_at
        When the last output came, by the event loop's clock.
    hello, ready, running
        Done with the reports of these names; `ready` gives the identity or raises the refusal.
    status
        Set when the command's exit code, `code`, was reported.
    evidence
        What was reported along with it.
    """

    def __init__(
        self,
        kind: Kind,
        nonce: str,
        marker: str,
        sink: Sink,
        limit: int,
        overflow: Callable[[str], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.counts = {1: 0, 2: 0}
        self.heard_at = loop.time()
        self.hello: asyncio.Future[None] = loop.create_future()
        self.ready: asyncio.Future[Identity] = loop.create_future()
        self.running: asyncio.Future[None] = loop.create_future()
        self.status = asyncio.Event()
        self.code: int | None = None
        self.evidence = Evidence()
        self._clock = loop.time
        self._kind: Kind = kind
        self._marker = marker
        self._sink = sink
        self._limit = limit
        self._overflow: Callable[[str], None] | None = overflow
        # On a terminal there is one stream for all, and the first report is made without a nonce.
        self._carrier = 1 if kind == "terminal" else 2
        self._first = Reports("") if kind == "terminal" else None
        self._reports = Reports(nonce)
        self._files = ("", "")
        self._early = bytearray()

    @property
    def identity(self) -> Identity | None:
        """Who the command is, once it has reported."""
        if not self.ready.done() or self.ready.cancelled() or self.ready.exception():
            return None
        return self.ready.result()

    def feed(self, stream: int, data: bytes) -> None:
        """Take what arrived on a stream."""
        if stream != self._carrier:
            self._take(stream, data)
            return
        heard: list[list[str]] = []
        if self._first is not None:
            data, heard = self._first.feed(data)
            if heard:
                data += self._first.rest()
                self._first = None
        self._sort(stream, data, heard)

    def end(self) -> None:
        """Take what still waited to become a report, at the end of the stream."""
        if rest := self._reports.rest():
            self._take(self._carrier, rest)

    def refuse(self, error: SandboxError) -> None:
        """Let whoever waits for the start have this error."""
        for waited in (self.hello, self.ready, self.running):
            if not waited.done():
                waited.set_exception(error)
                waited.exception()  # it may be that nobody waits any more

    def early(self) -> str:
        """Return what was said before the command could run."""
        return self._early.decode("utf-8", "replace").strip()[-500:]

    def _sort(self, stream: int, data: bytes, heard: list[list[str]]) -> None:
        if self._first is None:
            data, more = self._reports.feed(data)
            heard = heard + more
        if data:
            self._take(stream, data)
        for words in heard:
            self._hear(words)

    def _take(self, stream: int, data: bytes) -> None:
        if self.identity is None:
            self._early += data[: _EARLY_LIMIT - len(self._early)]
            return
        if stream not in self.counts:
            return
        self.heard_at = self._clock()
        self.counts[stream] += len(data)
        if self._overflow is None:
            return
        try:
            self._sink.put(Chunk(stream, data))
        except OSError as error:
            self._give_up(f"its output could not be kept here ({error.strerror})")
            return
        if sum(self.counts.values()) > self._limit:
            self._give_up(f"it had written more than {self._limit} bytes")

    def _give_up(self, why: str) -> None:
        overflow, self._overflow = self._overflow, None
        if overflow is not None:
            overflow(why)

    def _hear(self, words: Sequence[str]) -> None:
        match words:
            case ["hello"] if not self.hello.done():
                self.hello.set_result(None)
            case ["failed", *what] if not self.ready.done():
                self.refuse(_refusal(" ".join(what)))
            case ["holds", out, err]:
                self._files = (out, err)
            case ["ready", *numbers] if not self.ready.done():
                identity = parse_identity(self._kind, self._files, self._marker, numbers)
                if identity is not None:
                    self.ready.set_result(identity)
            case ["running"] if not self.running.done():
                self.running.set_result(None)
            case ["exit", *numbers] if self.identity is not None and self.code is None:
                self.code, self.evidence = parse_evidence(numbers)
                if self.code is not None:
                    self.status.set()
            case ["cpu", *amounts]:
                self.evidence = self.evidence.with_cpu(amounts)
            case ["left"]:
                self.evidence = self.evidence.with_left()
            case ["full", *place]:
                self.evidence = self.evidence.with_full(" ".join(place))


def _refusal(what: str) -> SandboxError:
    if what.startswith("missing"):
        return SandboxImageUnsuitableError(
            f"The image lacks {what.removeprefix('missing ')}, without which no command can be run"
        )
    kind = CommandNotFoundError if what == "not-found" else CommandStartError
    return kind(f"The command was not started: {_REFUSALS.get(what, what)}")
