"""What can be done with a sandbox that runs (B8, B13; decisions 4 and 7).

`RunningSandbox` is the part of `LiveSandbox` that does not ask where the sandbox came from: run
programs in it, stop them, pause it, and end it or let go of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from sandbox_kernel.amounts import memory_text
from sandbox_kernel.engine.client import Engine, ExecStream
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxEngineError,
    SandboxError,
    SandboxGoneError,
    SandboxPausedError,
    SandboxSpecRejectedError,
    SandboxUnavailableError,
)
from sandbox_kernel.process.stop import sweep
from sandbox_kernel.sandbox.container import CODE_USER, CONTROL_USER
from sandbox_kernel.sandbox.disk import COUNT, COUNT_TIMEOUT, exceeded, volume_size
from sandbox_kernel.sandbox.ending import EndReason
from sandbox_kernel.sandbox.hold import Hold
from sandbox_kernel.sandbox.pause import (
    LONGEST_PAUSE,
    freeze,
    freeze_until,
    mark_name,
    pause_end,
    thaw,
)
from sandbox_kernel.sandbox.spec import Limits, SandboxSpec

log = logging.getLogger(__name__)

KillOutcome = Literal["processes", "container"]

DESTROY_TIMEOUT: Final = 10.0
_KILL_PATIENCE: Final = 3.5
_LEAVE_TIMEOUT: Final = 5.0
_TOUCH_TIMEOUT: Final = 5.0
_POLL: Final = 0.05
_OUTPUT_LIMIT: Final = 64 * 1024


class RunningSandbox:
    """One running sandbox, held by this object until `destroy`, `close` or `detach`.

    Attributes
    ----------
    engine, spec, limits
        Where it runs, what was asked for, and what that came to.
    owner
        Whose it is.
    id, short_id, name
        What the engine calls the container.
    volume
        The name of its workspace's volume.
    image_id
        The image that it runs from, by the digest of its content.
    """

    def __init__(
        self,
        engine: Engine,
        spec: SandboxSpec,
        limits: Limits,
        name: str,
        container_id: str,
        owner: str = "",
    ) -> None:
        self.engine = engine
        self.spec = spec
        self.limits = limits
        self.owner = owner
        self.name = name
        self.id = container_id
        self.short_id = container_id[:12]
        self.volume = ""
        self.image_id = ""
        self._born = time.monotonic()
        self._uses = 0
        self._hold = Hold(engine, container_id, spec, limits, lambda: self._uses > 0)
        self._changing = asyncio.Lock()
        self._pause_end: asyncio.Task[None] | None = None
        self._disk_watch: asyncio.Task[None] | None = None
        self._counts_in_vain = False
        self._let_go = False
        self._destruction: asyncio.Task[None] | None = None

    @property
    def ended(self) -> asyncio.Future[EndReason]:
        """Done when it has ended or is somebody else's, with an `EndReason`; it never fails."""
        return self._hold.ended

    @property
    def holder(self) -> str:
        """By what the sandbox knows who holds it; see `LiveSandbox.connect`."""
        return self._hold.lease.ident

    @property
    def out_of_memory_events(self) -> int:
        """How often the engine has reported that something was killed for lack of memory.

        The report comes before that of the process's end.
        """
        return self._hold.out_of_memory_events

    @property
    def paused(self) -> bool:
        """Whether it is paused, as far as the engine has said."""
        return self._hold.paused

    @property
    def expires_at(self) -> datetime | None:
        """When it ends if nobody uses it any more, by this machine's clock; `None` for never.

        It is as the sandbox last told, at most a third of the lease's ttl ago: uses by other
        holders count. Time for which it is paused does not count as idle.
        """
        state = self._hold.state
        left = None if state is None else state.seconds_left(asyncio.get_running_loop().time())
        return None if left is None else datetime.now(UTC) + timedelta(seconds=left)

    # -- using --------------------------------------------------------------------------------

    async def exec(
        self,
        argv: Sequence[str],
        *,
        user: str,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        stdin: bool = True,
    ) -> ExecStream:
        """Run a program in the sandbox and return its streams; a paused one is resumed first.

        Code of the user gets the spec's environment; processes of the control uid do not.

        Parameters
        ----------
        argv
            The program and its arguments.
        user
            `CODE_USER` or `CONTROL_USER`.
        env
            Further variables.
        cwd
            The working directory, absolute.
        stdin
            Whether to connect its input.

        Raises
        ------
        SandboxGoneError
            The sandbox has ended, and why.
        """
        if user not in {CODE_USER, CONTROL_USER}:
            raise ValueError(f"nothing runs as {user!r} in a sandbox")
        whole = {**(self.spec.environment if user == CODE_USER else {}), **(env or {})}
        run = functools.partial(
            self.engine.exec, self.id, argv, user=user, env=whole, cwd=cwd, stdin=stdin
        )
        try:
            try:
                await self.wake()
                return await run()
            except SandboxPausedError:
                # The news that somebody else has paused it was still on its way.
                await self.resume()
                return await run()
        except SandboxGoneError as error:
            reason = await self._hold.reason_soon()
            if reason is None:
                raise
            raise SandboxGoneError(reason.text) from error

    @contextlib.asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """Keep the sandbox from counting as idle for the length of a block; resume it first.

        For what runs in it without passing through `exec`, or for longer than a moment.
        """
        await self.wake()
        self._uses += 1
        try:
            await self._touch_if_it_matters()
            yield
        finally:
            self._uses -= 1
            await self._touch_if_it_matters()

    async def touch(self) -> datetime | None:
        """Start its time without use anew; its lifetime is never extended.

        Returns
        -------
        datetime or None
            `expires_at`.

        Raises
        ------
        SandboxPausedError
            It is paused; it cannot expire for want of use until it is resumed.
        SandboxGoneError
            It has ended, and why.
        """
        if self.paused:
            raise SandboxPausedError("The sandbox is paused; resume it first")
        try:
            await self._hold.lease.touch(_TOUCH_TIMEOUT)
        except SandboxGoneError as error:
            reason = await self._hold.reason_soon()
            raise SandboxGoneError(reason.text if reason else str(error)) from error
        return self.expires_at

    async def _touch_if_it_matters(self) -> None:
        if self.spec.idle_ttl is not None and not self.ended.done() and not self.paused:
            # Each renewal tells it again, and the end is told by whatever is done next.
            with contextlib.suppress(SandboxError):
                await self._hold.lease.touch(_TOUCH_TIMEOUT)

    # -- stopping the code --------------------------------------------------------------------

    async def kill_user_processes(self) -> KillOutcome:
        """Kill every process of the code's uid, whatever it does against that.

        Returns
        -------
        KillOutcome
            ``processes`` when none is left; ``container`` when that could not be brought about
            from inside (at the process limit no exec may start) and the whole sandbox was
            killed instead.

        Raises
        ------
        SandboxPausedError
            It is paused, so that nothing in it can be ended.
        SandboxError
            The sandbox has ended, or the engine did not do it in time.
        """
        try:
            report = await sweep(self.engine, self.id, user=CODE_USER, timeout=_KILL_PATIENCE)
        except (SandboxPausedError, SandboxUnavailableError):
            raise
        except SandboxError as error:
            log.info("sandbox %s: killed as a whole (%s)", self.short_id, error)
            await self.engine.kill_container(self.id)
            return "container"
        if report.found == "gone":
            raise SandboxGoneError("The sandbox has ended")
        return "processes"

    async def run_quietly(self, argv: Sequence[str], user: str) -> tuple[int | None, bytes]:
        """Run a short program of ours to its end; return its exit code and its output.

        Parameters
        ----------
        argv, user
            As for `exec`. The spec's environment is not given to it.

        Returns
        -------
        tuple
            The output is cut at 64 KiB.
        """
        output = bytearray()
        async with await self.engine.exec(self.id, argv, user=user, stdin=False) as stream:
            while (chunk := await stream.read()) is not None:
                if chunk.stream == 1 and len(output) < _OUTPUT_LIMIT:
                    output += chunk.data
            state = await self.engine.inspect_exec(stream.id)
        return state.exit_code, bytes(output)

    # -- pausing ------------------------------------------------------------------------------

    async def pause(self, longest: float = LONGEST_PAUSE) -> None:
        """Freeze everything in it, memory included, for all who hold it. Idempotent.

        A paused sandbox does not notice that its owners are gone. So it has a time after which
        its owner, or whoever reaps, removes it; its lifetime goes on as well.

        Parameters
        ----------
        longest
            Seconds after which it is removed unless somebody resumes it.

        Raises
        ------
        SandboxConflictError
            The engine's machine could not freeze it because too much runs in it.
        SandboxGoneError
            It has ended.
        """
        if not 1 <= longest <= 10 * 365 * 86400:
            reason = "this is no time for which a sandbox can be paused"
            raise SandboxSpecRejectedError("longest", longest, reason, "Use 1 second to 10 years.")
        async with self._changing:
            await freeze(self.engine, self.id, self.spec.prefix, self.owner, longest)
            self._hold.paused = True
            self._forget_pause()
            self._pause_end = asyncio.create_task(
                self._end_pause(longest), name=f"pause-{self.short_id}"
            )
        log.info("sandbox %s paused for at most %.0f s", self.short_id, longest)

    async def resume(self) -> None:
        """Let a paused sandbox go on. Idempotent; anybody who holds it may.

        Raises
        ------
        SandboxGoneError
            It has ended.
        """
        async with self._changing:
            self._forget_pause()
            await thaw(self.engine, self.id, self.spec.prefix)
            self._hold.paused = False
        log.info("sandbox %s resumed", self.short_id)

    async def wake(self) -> None:
        """Resume it if it is paused: what a command does first."""
        if self.paused and not self.ended.done():
            await self.resume()

    async def _end_pause(self, longest: float) -> None:
        await asyncio.sleep(longest)
        if self.paused:
            text = f"The sandbox was paused for {longest:g} s and then removed."
            self._hold.end(EndReason("idle", None, text))
            self._pause_end = None
            with contextlib.suppress(SandboxError):  # whoever reaps will do it
                await self.destroy()

    def _forget_pause(self) -> None:
        if self._pause_end is not None:
            self._pause_end.cancel()
            self._pause_end = None

    # -- its disk -----------------------------------------------------------------------------

    def watch_disk(self) -> None:
        """Begin to watch how much the workspace takes, where the spec wants that."""
        if self.spec.disk_soft_limit is not None:
            self._disk_watch = asyncio.create_task(
                self._end_when_full(self.spec.disk_soft_limit), name=f"disk-{self.short_id}"
            )

    async def _end_when_full(self, limit: int) -> None:
        size = await exceeded(self._workspace_size, limit)
        text = (
            f"The sandbox ended because its workspace takes {memory_text(size)}; its limit is "
            f"{memory_text(limit)} (disk_soft_limit)."
        )
        self._hold.end(EndReason("disk-full", None, text))
        self._disk_watch = None
        with contextlib.suppress(SandboxError):  # its lease was let go of in any case
            await self.destroy()

    async def _workspace_size(self) -> int | None:
        """Count the bytes of the workspace; `None` where another holder does that."""
        state = self._hold.state
        if state is None or state.oldest != self._hold.lease.ident:
            return None
        size = None if self._counts_in_vain else await self._count_inside()
        if size is not None:
            return size
        # No such program, folders that were closed to it, or a count that was held up, which is
        # not tried again: the engine sees them all.
        return volume_size(await self.engine.disk_usage(), self.volume)

    async def _count_inside(self) -> int | None:
        try:
            async with asyncio.timeout(COUNT_TIMEOUT):
                code, said = await self.run_quietly(COUNT, CODE_USER)
        except TimeoutError as error:
            if isinstance(error, SandboxError):
                raise
            self._counts_in_vain = True
            return None
        size = said.split(b"\t")[0]
        return int(size) * 1024 if code == 0 and size.isdigit() else None

    # -- its end ------------------------------------------------------------------------------

    async def destroy(self) -> None:
        """End the sandbox for everybody and remove it; a persistent workspace stays.

        Idempotent; any number may call it, and it goes on when its caller is cancelled. A
        sandbox that was let go of, or that somebody has taken over, is left alone.

        Raises
        ------
        SandboxError
            The engine could not be reached or did not do it within 10 s. The lease was let go
            in any case, so that the engine removes the sandbox by itself when it can.
        """
        await self._finish(self._destroy)

    async def close(self) -> None:
        """Let go of the sandbox. The last one who does so ends it. Idempotent, as `destroy`.

        Raises
        ------
        SandboxError
            As `destroy`.
        """
        await self._finish(self._leave if self.spec.is_shared else self._destroy)

    async def detach(self) -> None:
        """Let go of the sandbox, which lives on for its grace time (``resumable``).

        Raises
        ------
        SandboxSpecRejectedError
            It has none.
        SandboxError
            As `destroy`.
        """
        if not self.spec.resumable:
            raise SandboxSpecRejectedError(
                "resumable",
                self.spec.resumable,
                "this sandbox was made to end with its last owner",
                "Make it with a grace time, in seconds.",
            )
        await self._finish(functools.partial(self._leave, stay=True))

    async def _finish(self, how: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._destruction is None or _failed(self._destruction):
            self._destruction = asyncio.create_task(how(), name=f"destroy-{self.short_id}")
        await asyncio.shield(self._destruction)

    @property
    def _is_anothers(self) -> bool:
        return self.ended.done() and self.ended.result().kind == "taken-over"

    async def _destroy(self) -> None:
        began = time.monotonic()
        if self._is_anothers or self._let_go:
            await self._drop()
            return
        self._hold.end(EndReason("removed", None, "The sandbox was removed by its owner."))
        try:
            async with asyncio.timeout(DESTROY_TIMEOUT):
                await self.engine.remove_container(self.id)
                if self.spec.durability == "ephemeral":
                    await self._volume_gone()
                if self.paused:
                    await self.engine.remove_volume(mark_name(self.spec.prefix, self.id))
        except TimeoutError as error:
            if isinstance(error, SandboxError):
                raise
            raise SandboxEngineError(
                f"The sandbox {self.short_id} could not be removed within {DESTROY_TIMEOUT:g} s"
            ) from error
        finally:
            await self._drop()
        log.info(
            "sandbox %s removed in %.0f ms after %.1f s",
            self.short_id,
            (time.monotonic() - began) * 1000,
            began - self._born,
        )

    async def _leave(self, *, stay: bool = False) -> None:
        """Let go, and see to it that a sandbox that nobody holds any more is gone."""
        if self.ended.done():
            await self._destroy()
            return
        # Others may hold it. So it is removed only when it has said itself that nobody does;
        # one that gives no answer is left to its lease.
        last = False
        try:
            state = self._hold.state
            if self.paused and not stay and state is not None and state.holders <= 1:
                last = True
            elif self.paused:
                last = await self._leave_frozen(stay)
            else:
                last = (await self._hold.lease.leave(_LEAVE_TIMEOUT, stay=stay)).holders == 0
        except SandboxError as error:
            log.debug("sandbox %s: left without an answer: %s", self.short_id, error)
        if last and not stay:
            await self._destroy()
            return
        await self.abandon()
        log.info("sandbox %s let go", self.short_id)

    async def _leave_frozen(self, stay: bool) -> bool:
        """Let go of a paused sandbox; say whether nobody holds it any more.

        That is for the sandbox to say, which has to run for a moment to do so: what it said
        before it was paused does not tell who has gone since.
        """
        place = (self.engine, self.id, self.spec.prefix)
        async with self._changing:
            until = await pause_end(*place)
            await thaw(*place)
            self._hold.paused = False
            left = await self._hold.lease.leave(_LEAVE_TIMEOUT, stay=stay)
            goes_on = left.holders > 0 or stay
            if goes_on and until is not None:
                await freeze_until(*place, self.owner, until)
            elif goes_on:
                await freeze(*place, self.owner, LONGEST_PAUSE)
        return left.holders == 0

    async def abandon(self) -> None:
        """Drop everything here that belongs to it, and touch nothing on the engine."""
        self._let_go = True
        self._hold.end(EndReason("removed", None, "The sandbox was let go of."))
        await self._drop()

    async def _drop(self) -> None:
        """Give up everything here that belongs to it."""
        self._forget_pause()
        if self._disk_watch is not None:
            self._disk_watch.cancel()
            await asyncio.wait({self._disk_watch})
        await self._hold.release()

    async def _volume_gone(self) -> None:
        """Wait for the engine to remove the volume, which it does after the container."""
        tries = 0
        while self.volume and await self.engine.inspect_volume(self.volume) is not None:
            tries += 1
            if tries > 20:
                # The engine was restarted in between, or has forgotten.
                with contextlib.suppress(SandboxConflictError):
                    await self.engine.remove_volume(self.volume)
            await asyncio.sleep(_POLL)


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
