"""`Visit`: run programs and carry files in a sandbox that is somebody else's affair.

A visitor neither ends a sandbox nor keeps others from it. A sandbox that may have several holders
is held beside them for as long as the visit lasts, so that it does not end meanwhile; one that
belongs to a process, such as a kernel's, lives for as long as that process wants.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.engine.thread import EngineThread
from sandbox_kernel.errors import SandboxConflictError
from sandbox_kernel.process.command import start as start_process
from sandbox_kernel.process.files import Files
from sandbox_kernel.process.run import run as run_process
from sandbox_kernel.sandbox.container import CODE_USER, WORKSPACE
from sandbox_kernel.sandbox.files import SandboxFiles
from sandbox_kernel.sandbox.found import SandboxInfo
from sandbox_kernel.sandbox.live import LiveSandbox
from sandbox_kernel.sandbox.opening import Opening
from sandbox_kernel.sandbox.order import Timeouts, judge_found
from sandbox_kernel.sandbox.pause import LONGEST_PAUSE, freeze, mark_name, thaw
from sandbox_kernel.sandbox.plan import kept_prefix, labels_of, told_by
from sandbox_kernel.sandbox.program import SandboxProcess
from sandbox_kernel.sandbox.request import CONFIGURED, Configured, check_command, check_terminal

__all__ = ["Visit", "pause_found", "remove_found", "resume_found", "visit"]

T = TypeVar("T")

_LOOK_TIMEOUT: Final = 30.0


def visit(
    endpoint: Endpoint, info: SandboxInfo, timeouts: Timeouts, environment: Mapping[str, str]
) -> Opening[Visit]:
    """Visit a sandbox; a paused one is resumed.

    Parameters
    ----------
    endpoint
        Where it is.
    info
        Which.
    timeouts
        How long programs may take.
    environment
        Variables for all of them.

    Returns
    -------
    Opening
        To be entered; until then nothing is done.

    Raises
    ------
    SandboxGoneError
        It has ended.
    SandboxSpecRejectedError
        The policy does not allow it any more.
    """
    thread = EngineThread.current()

    async def enter() -> Visit:
        engine = await thread.engine(endpoint)
        inspected = await engine.inspect_container(info.id)
        labels = labels_of(inspected)
        spec, limits = told_by(labels, environment)
        judge_found(spec, limits)
        live = None
        if spec.is_shared:
            # Held alone, its holder keeps it alive.
            with contextlib.suppress(SandboxConflictError):
                live = await LiveSandbox.connect(
                    engine, info.id, owner=info.owner, environment=environment
                )
        if live is None and inspected["State"].get("Paused"):
            await thaw(engine, info.id, kept_prefix(labels))
        return Visit(engine, info, live, timeouts, environment)

    async def make() -> Visit:
        return await thread.call(enter, discard=Visit.leave)

    return Opening(make)


class Visit:
    """A visit to a running sandbox; made by `visit`."""

    def __init__(
        self,
        engine: Engine,
        info: SandboxInfo,
        live: LiveSandbox | None,
        timeouts: Timeouts,
        environment: Mapping[str, str],
    ) -> None:
        self._engine = engine
        self._info = info
        self._live = live
        self._timeouts = timeouts
        self._environment = environment
        self._use = contextlib.AsyncExitStack()

    @property
    def files(self) -> SandboxFiles:
        """The files in the sandbox."""
        return SandboxFiles(Files(self._engine, self._info.id, user=CODE_USER), self._hop)

    def start(
        self,
        argv: Sequence[str],
        *,
        timeout: float | Configured | None = CONFIGURED,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        tty: tuple[int, int] | None = None,
    ) -> Opening[SandboxProcess]:
        """Start a program; as `Sandbox.start`."""
        request = check_command(
            argv,
            env=env,
            defaults=self._environment,
            cwd=cwd,
            timeout=timeout,
            idle_timeout=None,
            timeouts=self._timeouts,
        )
        work = functools.partial(
            start_process,
            self._engine,
            self._info.id,
            request.argv,
            user=CODE_USER,
            env=request.env,
            cwd=request.cwd,
            timeout=request.timeout,
            tty=check_terminal(tty),
        )

        async def start() -> SandboxProcess:
            return SandboxProcess(await work(), self._info.name, self._hop, lambda process: None)

        async def make() -> SandboxProcess:
            return await EngineThread.current().call(start, discard=SandboxProcess.close)

        return Opening(make)

    async def is_folder(self, path: str) -> bool:
        """Say whether a path, absolute or relative to the workspace, is that of a folder."""

        async def look() -> bool:
            done = await run_process(
                self._engine,
                self._info.id,
                ["test", "-d", path],
                user=CODE_USER,
                cwd=WORKSPACE,
                timeout=_LOOK_TIMEOUT,
            )
            return done.returncode == 0

        return await self._hop(look)

    async def _hop(self, work: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        return await EngineThread.current().call(work, *args)

    async def leave(self) -> None:
        """Let go of the sandbox; runs in the engine's loop."""
        if self._live is None:
            return
        await self._use.aclose()
        if self._live.spec.resumable:
            await self._live.detach()
        else:
            await self._live.close()

    async def __aenter__(self) -> Self:
        async def use() -> None:
            if self._live is not None:
                await self._use.enter_async_context(self._live.in_use())

        await self._hop(use)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._hop(self.leave)


async def remove_found(engine: Engine, info: SandboxInfo) -> None:
    """End a sandbox for everybody and remove it; a persistent workspace stays. Idempotent."""
    await _with_prefix(engine, info, _remove)


async def pause_found(engine: Engine, info: SandboxInfo, longest: float = LONGEST_PAUSE) -> None:
    """Freeze a sandbox for all who hold it; idempotent.

    Parameters
    ----------
    engine, info
        Where, and which.
    longest
        Seconds after which it may be removed.

    Raises
    ------
    SandboxGoneError
        It has ended.
    SandboxConflictError
        It could not be frozen, and goes on running.
    """

    async def pause(engine: Engine, info: SandboxInfo, prefix: str) -> None:
        await freeze(engine, info.id, prefix, info.owner, longest)

    await _with_prefix(engine, info, pause)


async def resume_found(engine: Engine, info: SandboxInfo) -> None:
    """Let a paused sandbox go on; idempotent.

    Raises
    ------
    SandboxGoneError
        It has ended.
    """

    async def resume(engine: Engine, info: SandboxInfo, prefix: str) -> None:
        await thaw(engine, info.id, prefix)

    await _with_prefix(engine, info, resume)


async def _remove(engine: Engine, info: SandboxInfo, prefix: str) -> None:
    await engine.remove_container(info.id)
    await engine.remove_volume(mark_name(prefix, info.id))


async def _with_prefix(
    engine: Engine, info: SandboxInfo, work: Callable[[Engine, SandboxInfo, str], Awaitable[None]]
) -> None:
    inspected = await engine.inspect_container(info.id)
    await work(engine, info, kept_prefix(labels_of(inspected)))
