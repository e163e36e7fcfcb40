"""The owner's side of the lease (decision 7, B13): renewals on the main process's stdin.

`lease.sh` is the other side. The sandbox ends when this one lets go, dies, or is not heard of
for the ttl. A holder only reports what becomes of the stream; what that means for the sandbox
is for `LiveSandbox` to find out, since the end of a stream proves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from importlib import resources
from typing import Final, Literal

from sandbox_kernel.engine.streams import ByteStream
from sandbox_kernel.errors import SandboxError, SandboxStartError

RELEASED: Final = 0
SILENCE: Final = 3
LIFETIME: Final = 4
NO_CLOCK: Final = 5
"""Exit codes of the loop; `lease.sh` says what they mean."""

RENEWAL: Final = b"\n"
ANSWER: Final = b"lease\n"

_RENEWALS_PER_TTL = 3
_TAIL = 2048

Trouble = Literal["ended", "silent"]
"""The stream has ended; or renewals go out and no answer has come for a whole ttl."""


@functools.cache
def lease_text() -> str:
    """Return the program of the loop, without its comments: people see it in ``ps``."""
    text = resources.files(__package__).joinpath("lease.sh").read_text(encoding="utf-8")
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))


def lease_command(ttl: int, lifetime: int) -> list[str]:
    """Return the container's command: the loop, with its times in seconds.

    Parameters
    ----------
    ttl
        Silence after which it ends.
    lifetime
        Time after which it ends in any case, or 0.
    """
    text = lease_text()
    return ["sh", "-c", text, "lease", str(ttl), str(lifetime), text]


class LeaseHolder:
    """Renews one lease until it is released.

    Parameters
    ----------
    stream
        The attached streams of the main process; the holder owns them from now on.
    ttl
        The lease's ttl in seconds.
    """

    def __init__(self, stream: ByteStream, ttl: float) -> None:
        self._stream = stream
        self._ttl = ttl
        self._interval = ttl / _RENEWALS_PER_TTL
        self._answered = asyncio.Event()
        self._tail = bytearray()
        self._trouble: asyncio.Queue[Trouble] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._last_answer = loop.time()
        self._task = loop.create_task(self._run(), name="lease")

    async def armed(self, timeout: float) -> None:
        """Wait until the loop in the sandbox has said that it runs.

        Raises
        ------
        SandboxStartError
            It did not, and what it wrote instead.
        """
        waiting = asyncio.ensure_future(self._answered.wait())
        try:
            await asyncio.wait(
                {waiting, self._task}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            waiting.cancel()
        if not self._answered.is_set():
            said = self.output
            raise SandboxStartError(
                "The sandbox's main process did not come up"
                + (f"; it said: {said!r}" if said else f" within {timeout:g} s")
            )

    @property
    def output(self) -> str:
        """The last of what the main process wrote besides its answers."""
        return bytes(self._tail).decode("utf-8", "backslashreplace").strip()

    async def trouble(self) -> Trouble:
        """Wait until something is wrong with the stream; silence is told again and again."""
        return await self._trouble.get()

    async def release(self) -> None:
        """Let go: the main process sees the end of its input and ends. Idempotent."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(_ended(self._task))
        await self._stream.close()

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
                if text + b"\n" == ANSWER:
                    self._answered.set()
                else:
                    self._keep(text + b"\n")

    async def _renew(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self._interval)
            # A line that takes nothing must not keep silence from being noticed.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval):
                    await self._stream.write(RENEWAL)
            if clock() - self._last_answer > self._ttl and self._trouble.empty():
                self._trouble.put_nowait("silent")

    def _keep(self, data: bytes) -> None:
        self._tail += data
        del self._tail[:-_TAIL]


async def _ended(task: asyncio.Task[None]) -> None:
    await asyncio.wait({task})
