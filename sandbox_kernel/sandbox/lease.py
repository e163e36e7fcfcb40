"""A holder's side of the lease (decision 7, B7, B8, B13): lines on the main process's stdin.

`lease.sh` is the other side, and says what the lines mean. Whoever holds the lease keeps the
sandbox alive; several may (two notebooks with one workspace), or one alone, who loses it when
another takes it. A holder only reports what becomes of its stream and of its hold; what that
means for the sandbox is for `LiveSandbox` to find out, since the end of a stream proves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final, Literal

from sandbox_kernel.engine.streams import ByteStream
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxEngineTimeoutError,
    SandboxError,
    SandboxGoneError,
    SandboxStartError,
)

RELEASED: Final = 0
SILENCE: Final = 3
LIFETIME: Final = 4
NO_CLOCK: Final = 5
IDLE: Final = 6
"""Exit codes of the loop; `lease.sh` says what they mean."""

METERS: Final = ("/sys/fs/cgroup/cpuacct/cpuacct.usage", "/sys/fs/cgroup/cpu.stat")
"""The use of the processor by a sandbox as it sees it itself, with cgroups of either version."""

_RENEWALS_PER_TTL = 3.6
"""No whole number, lest each renewal come at the moment of a timeout of the shell's."""
_TAIL = 2048
_AGAIN = 1.0
"""A shell may lose a line that comes at the moment of its timeout, so a request is repeated."""

Trouble = Literal["ended", "silent", "taken", "lost"]
"""The stream has ended; renewals go out and no answer has come for a whole ttl; another holder
has taken the sandbox for itself; this one counts as dead, since it was not heard of."""

Verb = Literal["join", "take", "keep", "touch", "ready", "left", "park"]


@functools.cache
def lease_text() -> str:
    """Return the program of the loop, without its comments: people see it in ``ps``."""
    text = resources.files(__package__).joinpath("lease.sh").read_text(encoding="utf-8")
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))


def lease_command(
    ttl: int,
    lifetime: int,
    *,
    idle: int = 0,
    grace: int = 0,
    place: str = "/",
    meters: Sequence[str] = METERS,
) -> list[str]:
    """Return the container's command: the loop, with its times in seconds.

    Parameters
    ----------
    ttl
        Silence after which a holder counts as dead.
    lifetime
        Time after which it ends in any case, or 0.
    idle
        Time without use after which it ends, or 0.
    grace
        How long it outlives its last holder.
    place
        The folder whose owner and mode it tells.
    meters
        Where to look up how much the sandbox has used the processor.
    """
    text = lease_text()
    times = [str(ttl), str(lifetime), str(idle), str(grace)]
    return ["sh", "-c", text, "lease", *times, place, " ".join(meters), text]


@dataclass(frozen=True, slots=True)
class LeaseState:
    """What the loop has last told of itself.

    Parameters
    ----------
    oldest
        Id of the oldest holder; empty when there is none.
    holders
        How many there are.
    ready
        Whether its workspace has been prepared.
    idle_left, life_left
        Seconds until it ends for want of use, or in any case; `None` for never.
    at
        When this was heard, by the event loop's clock.
    """

    oldest: str
    holders: int
    ready: bool
    idle_left: int | None
    life_left: int | None
    at: float

    def seconds_left(self, now: float) -> float | None:
        """Return how long the sandbox lives on if nobody uses it; `None` for ever."""
        ends = [left for left in (self.idle_left, self.life_left) if left is not None]
        return max(0.0, min(ends) - (now - self.at)) if ends else None


@dataclass(frozen=True, slots=True)
class PlaceState:
    """The owner and mode of the workspace as the loop found them; empty where it could not."""

    mode: str = ""
    uid: int | None = None


class LeaseHolder:
    """One holder of one lease, on one stream, until it is released.

    Parameters
    ----------
    stream
        The attached streams of the main process; the holder owns them from now on.
    ttl
        The lease's ttl in seconds.
    ident
        The holder's id; one that comes back on another stream gives the one that it had.
    in_use
        Asked at each renewal whether the sandbox is in use just now.
    """

    def __init__(
        self,
        stream: ByteStream,
        ttl: float,
        *,
        ident: str | None = None,
        in_use: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ident = ident or secrets.token_hex(8)
        self.state: LeaseState | None = None
        self.place = PlaceState()
        self._stream = stream
        self._ttl = ttl
        self._in_use = in_use
        self._interval = ttl / _RENEWALS_PER_TTL
        self._started = asyncio.Event()
        self._holding = asyncio.Event()
        self._asking = asyncio.Lock()
        self._answer: tuple[Verb, asyncio.Future[str]] | None = None
        self._tail = bytearray()
        self._trouble: asyncio.Queue[Trouble] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._last_answer = loop.time()
        self._task = loop.create_task(self._run(), name="lease")

    # -- beginning ----------------------------------------------------------------------------

    async def armed(self, timeout: float) -> None:
        """Wait until the loop in the sandbox, which is being started, has said that it runs.

        Raises
        ------
        SandboxStartError
            It did not, and what it wrote instead.
        """
        waiting = asyncio.ensure_future(self._started.wait())
        try:
            await asyncio.wait(
                {waiting, self._task}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            waiting.cancel()
        if not self._started.is_set():
            said = self.output
            raise SandboxStartError(
                "The sandbox's main process did not come up"
                + (f"; it said: {said!r}" if said else f" within {timeout:g} s")
            )

    async def join(self, timeout: float, *, alone: bool) -> LeaseState:
        """Become a holder.

        Parameters
        ----------
        timeout
            Bound in seconds.
        alone
            Take the sandbox from all others, and let nobody in.

        Raises
        ------
        SandboxConflictError
            Another one holds it alone, or there are too many.
        SandboxGoneError
            The sandbox ended meanwhile.
        SandboxEngineTimeoutError
            It did not answer in time.
        """
        return await self._ask("take" if alone else "join", timeout)

    # -- holding ------------------------------------------------------------------------------

    async def touch(self, timeout: float) -> LeaseState:
        """Say that the sandbox is in use; errors as `join`'s."""
        return await self._ask("touch", timeout)

    async def keep(self, timeout: float) -> LeaseState:
        """Ask how things are, which is no use; errors as `join`'s."""
        return await self._ask("keep", timeout)

    async def prepared(self, timeout: float) -> LeaseState:
        """Say that the workspace is ready for everybody; errors as `join`'s."""
        return await self._ask("ready", timeout)

    async def leave(self, timeout: float, *, stay: bool) -> LeaseState:
        """Stop holding; errors as `join`'s.

        Parameters
        ----------
        timeout
            Bound in seconds.
        stay
            Let the sandbox live on for its grace time when this was the last holder.
        """
        self._holding.clear()
        return await self._ask("park" if stay else "left", timeout)

    @property
    def output(self) -> str:
        """The last of what the main process wrote besides its answers."""
        return bytes(self._tail).decode("utf-8", "backslashreplace").strip()

    async def trouble(self) -> Trouble:
        """Wait until something is wrong with the hold; silence is told again and again."""
        return await self._trouble.get()

    async def release(self) -> None:
        """Drop the stream. Idempotent.

        To the main process of a sandbox with one owner this is the end of its input, and it
        ends; one that may have several only hears no more of this holder.
        """
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(_ended(self._task))
        await self._stream.close()

    # -- the stream ---------------------------------------------------------------------------

    async def _ask(self, verb: Verb, timeout: float) -> LeaseState:
        async with self._asking:
            answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            self._answer = (verb, answer)
            asking = asyncio.create_task(self._repeat(verb), name="lease-ask")
            try:
                ends: set[asyncio.Future[Any]] = {answer, asking, self._task}
                await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._answer = None
                asking.cancel()
                await asyncio.wait({asking})
        if not answer.done():
            if self._task.done() or not asking.cancelled():
                raise SandboxGoneError("The sandbox's main process was not there to answer")
            raise SandboxEngineTimeoutError(
                f"The sandbox's main process did not answer within {timeout:g} s"
            )
        said = answer.result()
        if said == "held":
            raise SandboxConflictError(
                "Another owner holds the sandbox for itself alone. Take it over (take_over), or "
                "wait until that one is gone"
            )
        if said == "full":
            raise SandboxConflictError("The sandbox has as many holders as it can have")
        if said == "lost":
            raise SandboxGoneError("The hold on the sandbox was lost")
        assert self.state is not None
        return self.state

    async def _repeat(self, verb: Verb) -> None:
        with contextlib.suppress(SandboxError, RuntimeError):  # the end is seen by the reader
            while True:
                await self._send(verb)
                await asyncio.sleep(_AGAIN)

    async def _send(self, verb: Verb) -> None:
        await self._stream.write(f"{verb} {self.ident}\n".encode())

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                renewing = tasks.create_task(self._renew())
                await self._read()
                renewing.cancel()
        except* SandboxError:
            pass  # a lost connection; those who want to know the cause ask the engine
        finally:
            self._trouble.put_nowait("ended")

    async def _read(self) -> None:
        line = b""
        while (chunk := await self._stream.read()) is not None:
            self._last_answer = asyncio.get_running_loop().time()
            if chunk.stream != 1:
                self._keep(chunk.data)
                continue
            *lines, line = (line + chunk.data).split(b"\n")
            line = line[-_TAIL:]
            for text in lines:
                if not self._understand(text):
                    self._keep(text + b"\n")

    def _understand(self, line: bytes) -> bool:
        """Take in one line of the loop; say whether it was one."""
        words = line.decode("ascii", "replace").split()
        try:
            if words[0] == "workspace":
                _, mode, uid = words
                self.place = PlaceState(*(("", None) if uid == "-" else (mode, int(uid))))
                return True
            begin, verb, ident, oldest, count, ready, idle, life = words
            if begin != "lease":
                return False
            self.state = LeaseState(
                oldest="" if oldest == "-" else oldest,
                holders=int(count),
                ready=ready == "1",
                idle_left=None if idle == "-" else int(idle),
                life_left=None if life == "-" else int(life),
                at=asyncio.get_running_loop().time(),
            )
        except (ValueError, IndexError):
            return False
        if verb == "start":
            self._started.set()
        elif ident != self.ident:
            if verb == "take" and self._holding.is_set():
                self._lose("taken")
        else:
            self._hear(verb)
        return True

    def _hear(self, verb: str) -> None:
        if self._answer is not None:
            wanted, answer = self._answer
            if verb in {wanted, "held", "full", "lost"} and not answer.done():
                # At once, since the next line may say that it was taken again.
                if verb in {"join", "take"}:
                    self._holding.set()
                answer.set_result(verb)
        if verb == "lost" and self._holding.is_set():
            self._lose("lost")

    def _lose(self, why: Trouble) -> None:
        self._holding.clear()
        self._trouble.put_nowait(why)

    async def _renew(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await self._holding.wait()
            await asyncio.sleep(self._interval)
            if not self._holding.is_set():
                continue
            # A line that takes nothing must not keep silence from being noticed.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval):
                    await self._send("touch" if self._in_use() else "keep")
            if clock() - self._last_answer > self._ttl and self._trouble.empty():
                self._trouble.put_nowait("silent")

    def _keep(self, data: bytes) -> None:
        self._tail += data
        del self._tail[:-_TAIL]


async def _ended(task: asyncio.Task[None]) -> None:
    await asyncio.wait({task})
