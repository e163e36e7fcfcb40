"""One order and its courier: the exec, flow control, and an end of every wait.

An `Exchange` reads all that comes as soon as it comes, but lets the courier send only as much
as was judged and written; so the engine never holds back anything of this sandbox for a slow
disk here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Callable, Mapping
from importlib import resources
from types import TracebackType
from typing import Any, Final, Self

from sandbox_kernel.engine.client import Engine, ExecStream
from sandbox_kernel.engine.faults import without_host_paths
from sandbox_kernel.errors import (
    SandboxEngineTimeoutError,
    SandboxError,
    SandboxGoneError,
    SandboxProtocolError,
    SandboxStartError,
    SandboxUnavailableError,
)
from sandbox_kernel.process.files import wire
from sandbox_kernel.process.files.incoming import Receiver
from sandbox_kernel.process.files.outgoing import Batches
from sandbox_kernel.process.files.result import printable
from sandbox_kernel.process.files.workers import Workers
from sandbox_kernel.process.program import bundled, loader_argv, unsuitable

PATIENCE: Final = 60.0
"""Seconds for which the sandbox may do nothing while this side waits for it."""

WORK_PATIENCE: Final = 300.0
"""The same while it moves or removes a whole tree."""

_KEEP_INTERVAL: Final = 15.0
_LOOK_INTERVAL: Final = 0.5
_BATCH: Final = 1 << 20
_COALESCE: Final = 0.002
_CREDIT: Final = wire.WINDOW // 4
_LAST_WORDS: Final = 3.0
_QUIET: Final = 2.0
_ENDS: Final = 1.0
_KEPT_DIAGNOSTICS: Final = 4096
_SHARED: Final = ("wire", "trouble", "rules", "folder")


@functools.cache
def courier_program() -> bytes:
    """Return the courier, preceded by the modules that it shares with the host."""
    modules = {f"{__package__}.{name}": _text(f"{name}.py") for name in _SHARED}
    return bundled(_text("courier.py"), "courier", modules)


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


class Exchange:
    """The connection to one courier; made by `open`, and a context manager that ends it.

    Attributes
    ----------
    committed
        Whether everything was sent that shall be put into place, so that from now on the
        outcome is the courier's.
    """

    def __init__(
        self, engine: Engine, container_id: str, stream: ExecStream, workers: Workers
    ) -> None:
        self.committed = False
        self._engine = engine
        self._container_id = container_id
        self._stream = stream
        self._workers = workers
        self._pending: list[bytes] = []
        self._pending_size = 0
        self._arrived = asyncio.Event()
        self._ended = False
        self._greeted = asyncio.Event()
        self._diagnostics = bytearray()
        self._first = bytearray()
        self._writing = False
        self._moved = self._written = self._now()

    @classmethod
    async def open(cls, engine: Engine, container_id: str, user: str, workers: Workers) -> Exchange:
        """Start a courier.

        Parameters
        ----------
        engine, container_id
            Where.
        user
            ``uid:gid`` that it runs as.
        workers
            What judges and reads.
        """
        stream = await engine.exec(container_id, loader_argv(), user=user)
        return cls(engine, container_id, stream, workers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stream.close()

    async def run(
        self,
        order: Mapping[str, Any],
        receiver: Receiver,
        batches: Batches | None = None,
        moved: Callable[[], None] = lambda: None,
        patience: float = PATIENCE,
    ) -> None:
        """Give the courier its order and serve it until it says that it is done.

        Parameters
        ----------
        order
            What to do.
        receiver
            What judges the answers.
        batches
            What is sent, if anything is.
        moved
            Called each time after something was carried.
        patience
            Seconds for which the courier may be silent.

        Raises
        ------
        InsideTroubleError, TroubleError
            It could not be done; see `Asked.answered`.
        SandboxError
            The connection, the engine or the sandbox came to an end, or the courier is none.
        """
        text = json.dumps({**order, "silence": PATIENCE}).encode()
        beginning = courier_program() + wire.encode(wire.ORDER, text)
        try:
            async with asyncio.TaskGroup() as group:
                others = [
                    group.create_task(self._read_all()),
                    group.create_task(self._watch(patience)),
                    group.create_task(self._send_all(beginning, batches, moved)),
                ]
                await self._judge_all(receiver, moved)
                for other in others:
                    other.cancel()
        except BaseExceptionGroup as errors:
            error = _first_of(errors)
            raise error from error.__cause__

    async def _read_all(self) -> None:
        """Take in whatever comes; what the credit allows bounds how much that is."""
        while (chunk := await self._stream.read()) is not None:
            self._moved = self._now()
            if chunk.stream != 1:
                self._diagnostics += chunk.data
                del self._diagnostics[:-_KEPT_DIAGNOSTICS]
                continue
            self._pending.append(chunk.data)
            self._pending_size += len(chunk.data)
            if self._pending_size > wire.WINDOW:
                raise SandboxProtocolError("The sandbox sent more than it was allowed to")
            self._arrived.set()
        self._ended = True
        self._arrived.set()

    async def _judge_all(self, receiver: Receiver, moved: Callable[[], None]) -> None:
        owed = 0
        while not receiver.finished:
            data = await self._next_data()
            if not data:
                raise await self._why_ended(receiver)
            if not receiver.greeted and len(self._first) < _KEPT_DIAGNOSTICS:
                self._first += data[:_KEPT_DIAGNOSTICS]
            try:
                await self._workers.do(receiver.feed, data)
            except wire.WireError as error:
                if not receiver.greeted:
                    raise await self._no_courier(receiver) from error
                raise SandboxProtocolError(
                    f"What carries files in the sandbox broke the protocol: {error}"
                ) from error
            self._moved = self._now()
            if receiver.greeted:
                self._greeted.set()
            moved()
            owed += len(data)
            if owed >= _CREDIT:
                await self._write(wire.encode_credit(owed))
                owed = 0

    async def _next_data(self) -> bytes:
        """Return what has come, in pieces that are worth a thread's while; empty at the end."""
        if not self._pending and not self._ended:
            self._arrived.clear()
            await self._arrived.wait()
        if self._pending_size < _BATCH and not self._ended:
            await asyncio.sleep(_COALESCE)
        data = b"".join(self._pending)
        self._pending.clear()
        self._pending_size = 0
        return data

    async def _send_all(
        self, beginning: bytes, batches: Batches | None, moved: Callable[[], None]
    ) -> None:
        if not await self._write(beginning) or batches is None:
            return
        ahead: asyncio.Task[list[bytes]] | None = None
        try:
            batch = await self._workers.do(batches.next)
            while batch:
                ahead = asyncio.create_task(self._workers.do(batches.next))
                if not await self._write(*batch):
                    return
                moved()
                batch = await ahead
            # What is no courier puts nothing into place.
            await self._greeted.wait()
            self.committed = True
            await self._write(wire.encode(wire.COMMIT))
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    async def _write(self, *pieces: bytes) -> bool:
        """Send something; say whether that is still possible. Why it is not, the reader learns."""
        self._writing = True
        try:
            for piece in pieces:
                await self._stream.write(piece)
                self._moved = self._written = self._now()
        except (SandboxUnavailableError, RuntimeError):
            return False
        finally:
            self._writing = False
        return True

    async def _watch(self, patience: float) -> None:
        """End an exchange in which nothing moves, and show the courier that somebody is here."""
        looked = self._now()
        while True:
            await asyncio.sleep(_LOOK_INTERVAL)
            if self._workers.busy and not self._writing:
                self._moved = self._now()  # it is this side that takes its time
            if self._now() - max(self._moved, looked) > _QUIET:
                # While input waits for a program that is gone, the engine does not end the stream.
                looked = self._now()
                state = await self._engine.inspect_exec(self._stream.id)
                if not state.running and state.exit_code is not None:
                    self._ended = True
                    self._arrived.set()
            if self._now() - self._moved > patience:
                raise SandboxEngineTimeoutError(
                    f"The sandbox did nothing for {patience:g} s while files were carried. It may "
                    "be paused, or short of processor time"
                )
            if not self._writing and self._now() - self._written > _KEEP_INTERVAL:
                await self._write(wire.encode(wire.KEEP))

    # -- ends that are not the right one ------------------------------------------------------

    async def _no_courier(self, receiver: Receiver) -> SandboxError:
        """Say what answered in place of a courier, which the engine itself does in words."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS):
                while not self._ended:
                    self._pending.clear()
                    self._pending_size = 0
                    self._arrived.clear()
                    await self._arrived.wait()
        return await self._why_ended(receiver)

    async def _why_ended(self, receiver: Receiver) -> SandboxError:
        state = await self._engine.inspect_exec(self._stream.id)
        code = state.exit_code
        if state.running or code is None:
            if not self._ended:
                return SandboxProtocolError("What answers in the sandbox is not our program")
            return SandboxUnavailableError(
                "lost", "The connection to the engine broke while files were carried"
            )
        said = printable(without_host_paths(self._first.decode("utf-8", "replace")).strip())
        if not receiver.greeted:
            if code == 127 or "executable file not found" in said or code not in (126, 137):
                found = unsuitable(code, "the sandbox's image", "Carrying files")
                if found is not None:
                    return found
            if code != 137:
                return SandboxStartError(
                    f"The program that carries files could not be started: {said or code}"
                )
        if await self._sandbox_ends(code):
            return SandboxGoneError("The sandbox ended while files were carried")
        if code == 137:
            return SandboxError(
                "The program that carries files was killed in the sandbox, by its code or for lack "
                "of memory"
            )
        told = printable(self._diagnostics.decode("utf-8", "replace").strip()[-300:])
        return SandboxProtocolError(
            f"The program that carries files ended too early with code {code} ({told})"
        )

    async def _sandbox_ends(self, code: int) -> bool:
        """Say whether the sandbox has ended; what it ends with is killed a moment before."""
        deadline = self._now() + (_ENDS if code == 137 else 0)
        while True:
            inspected = await self._engine.inspect_container(self._container_id)
            if not (inspected.get("State") or {}).get("Running"):
                return True
            if self._now() >= deadline:
                return False
            await asyncio.sleep(_LOOK_INTERVAL / 2)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
