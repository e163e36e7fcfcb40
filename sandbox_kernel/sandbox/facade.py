"""`Sandbox`: what people use from Python (C1, C4, W21).

It may be used from any event loop, and from several, one after the other: what it stands for lives
in the loop of the engine thread, and each method hops there. What does not say that it runs in the
engine's loop only reads. The blocking twin is in `blocking`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import warnings
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Final, NoReturn, Self, TypeVar

from sandbox_kernel.config import EngineSettings
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.engine.images import ProgressCallback, PullPolicy, ensure_image
from sandbox_kernel.engine.thread import EngineThread
from sandbox_kernel.errors import (
    SandboxError,
    SandboxGoneError,
    SandboxPausedError,
    SandboxSpecRejectedError,
    SandboxUnknownOutcomeError,
)
from sandbox_kernel.process.command import OUTPUT_LIMIT, Process
from sandbox_kernel.process.command import start as start_process
from sandbox_kernel.process.files import Files
from sandbox_kernel.process.result import CommandError, CommandGoneError, RunResult
from sandbox_kernel.process.run import CAPTURE_LIMIT
from sandbox_kernel.process.run import run as run_process
from sandbox_kernel.sandbox.failure import CommandFailedError
from sandbox_kernel.sandbox.files import SandboxFiles
from sandbox_kernel.sandbox.found import SandboxInfo, list_sandboxes
from sandbox_kernel.sandbox.home import CallersLoop, Home
from sandbox_kernel.sandbox.live import CODE_USER, EndReason, KillOutcome, LiveSandbox
from sandbox_kernel.sandbox.opening import Opening
from sandbox_kernel.sandbox.order import Order, Timeouts, judge_found, requested_by, settle
from sandbox_kernel.sandbox.owner import current_owner
from sandbox_kernel.sandbox.pause import LONGEST_PAUSE
from sandbox_kernel.sandbox.place import at_engine, engine_place, settled_at
from sandbox_kernel.sandbox.program import SandboxProcess
from sandbox_kernel.sandbox.request import (
    CONFIGURED,
    CommandRequest,
    Configured,
    check_bytes,
    check_command,
    check_limit,
    check_terminal,
    to_bytes,
)
from sandbox_kernel.sandbox.spec import Limits, SandboxSpec
from sandbox_kernel.sandbox.usage import Usage, usage_of

__all__ = ["Sandbox", "SandboxState"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_REASON_PATIENCE: Final = 1.0
_SETTLE_PATIENCE: Final = 2.0
_LONGEST_LIFE: Final = 10 * 365 * 86400.0


class SandboxState:
    """What can be asked of a sandbox without waiting; the same for both twins."""

    _live: LiveSandbox
    _timeouts: Timeouts

    @property
    def id(self) -> str:
        """What the engine calls the container."""
        return self._live.id

    @property
    def name(self) -> str:
        """The container's name on the engine."""
        return self._live.name

    @property
    def spec(self) -> SandboxSpec:
        """What was asked for."""
        return self._live.spec

    @property
    def limits(self) -> Limits:
        """What that came to on the engine's machine."""
        return self._live.limits

    @property
    def image_id(self) -> str:
        """The image that it runs from, by the digest of its content."""
        return self._live.image_id

    @property
    def timeouts(self) -> Timeouts:
        """How long commands in it may take."""
        return self._timeouts

    @property
    def paused(self) -> bool:
        """Whether it is paused, as far as the engine has said."""
        return self._live.paused

    @property
    def ended(self) -> EndReason | None:
        """Why the sandbox has ended, or `None` while it runs."""
        ended = self._live.ended
        return ended.result() if ended.done() else None

    def __repr__(self) -> str:
        state = "running" if self.ended is None else self.ended.kind
        return f"<{type(self).__name__} {self.name} {state}>"


class Sandbox(SandboxState):
    """A hardened container in which commands run; made by `create`, ended by `destroy`.

    Everything that runs in it runs as the unprivileged user of the sandbox, in ``/workspace``
    unless said otherwise. Any number of commands may run at the same time.

    Examples
    --------
    >>> async with Sandbox.create(SandboxSpec(mem_limit=512 * 2**20)) as sandbox:
    ...     result = await sandbox.run(["python3", "-c", "print(6 * 7)"])
    ...     print(result.stdout_text)
    42
    <BLANKLINE>
    """

    def __init__(
        self, live: LiveSandbox, home: Home, timeouts: Timeouts, withdraw: Callable[[], None]
    ) -> None:
        self._live = live
        self._home = home
        self._timeouts = timeouts
        self._pid = os.getpid()
        self._processes: set[Process] = set()
        self._uses: set[asyncio.Task[None]] = set()
        self._end = functools.partial(_end, live.destroy, self._processes, withdraw)
        self._leave = functools.partial(_end, live.close, self._processes, withdraw)
        self._stay = functools.partial(_end, live.detach, self._processes, withdraw)
        # A notebook's cell that is run again drops the sandbox of the first time.
        self._dropped = weakref.finalize(
            self, _dropped, asyncio.get_running_loop(), self._pid, live, self._leave
        )
        self._dropped.atexit = False

    # -- making and ending --------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        spec: SandboxSpec | None = None,
        *,
        engine: str | EngineSettings | Engine | None = None,
        owner: str | None = None,
        pull_policy: PullPolicy | None = None,
        max_timeout: float | None = None,
    ) -> Opening[Sandbox]:
        """Make a sandbox.

        ``async with Sandbox.create(…) as sandbox`` closes it at the end of the block;
        ``sandbox = await Sandbox.create(…)`` leaves that to the caller. One that nobody destroyed
        ends when the last reference to it goes, or with this process, however that ends.

        Parameters
        ----------
        spec
            What is wanted. What is left at its default is taken from the configuration, whose
            own default is the image of `jupyter sandbox build` without a network; the
            administrator's policy judges the result.
        engine
            The engine. By default the configured one, else what the docker command would use.
            A text is an address such as ``tcp://engine:2376``; settings take the place of all
            that is configured of the engine. An open `Engine` is used in the running loop,
            without a thread.
        owner
            Whose it is; by default this process's user.
        pull_policy
            When to pull the image: ``never``, ``missing`` or ``always``; by default as
            configured.
        max_timeout
            The longest timeout in seconds that a command may ask for; by default as configured.

        Returns
        -------
        Opening
            To be awaited or entered; until then nothing is done.

        Raises
        ------
        SandboxSpecRejectedError
            Something that was asked for cannot be had; nothing was created.
        SandboxUnavailableError
            There is no usable engine.
        SandboxImageMissingError, SandboxImageUnsuitableError
            The image is not there, or no sandbox can be made from it.
        SandboxAttestationError
            The engine made something else than what was asked for; it was removed.

        Examples
        --------
        >>> sandbox = await Sandbox.create()
        >>> try:
        ...     print((await sandbox.shell("id -u")).stdout_text)
        ... finally:
        ...     await sandbox.destroy()
        10001
        <BLANKLINE>
        """
        if spec is None:
            spec = SandboxSpec()
        if not isinstance(spec, SandboxSpec):
            _refuse("spec", None, f"this is {type(spec).__name__}", "Give a SandboxSpec.")
        check_limit("max_timeout", max_timeout, _LONGEST_LIFE)
        asked = {**requested_by(spec), "pull_policy": pull_policy, "max_timeout": max_timeout}
        return cls._opening(*settled_at(asked, engine), owner)

    @classmethod
    def connect(
        cls,
        which: str,
        *,
        engine: str | EngineSettings | Engine | None = None,
        owner: str | None = None,
        take_over: bool = False,
        environment: Mapping[str, str] | None = None,
        max_timeout: float | None = None,
    ) -> Opening[Sandbox]:
        """Hold a sandbox that runs: one that outlived its owner, or that others hold too.

        A paused one is resumed. The administrator's policy judges it anew.

        Parameters
        ----------
        which
            Its id (12 characters at least), its name, or the key of its workspace.
        engine, owner, max_timeout
            As for `create`. Sandboxes of other owners are not found.
        take_over
            Take it from all who hold it, whose `ended` then says ``taken-over``.
        environment
            Variables for the code that runs in it from now on; its maker's are not kept.

        Returns
        -------
        Opening
            To be awaited or entered; until then nothing is done.

        Raises
        ------
        SandboxGoneError
            There is none.
        SandboxConflictError
            It ends with the process that made it, or another one holds it alone.
        SandboxSpecRejectedError
            The policy does not allow it any more.

        Examples
        --------
        >>> one = await Sandbox.create(SandboxSpec(resumable=60))
        >>> await one.detach()
        >>> async with Sandbox.connect(one.name) as other:
        ...     print(other.id == one.id)
        True
        """
        check_limit("max_timeout", max_timeout, _LONGEST_LIFE)
        if not isinstance(which, str) or not which:
            _refuse("which", None, "this names no sandbox", "Give an id, a name or a key.")
        # A spec of its own, to have the variables checked.
        variables = SandboxSpec(environment=environment or {}).environment
        place = engine_place(engine)
        found: list[Order] = []

        def judge(spec: SandboxSpec, limits: Limits) -> None:
            judge_found(spec, limits)
            asked = {"image": spec.image, "environment": dict(variables)}
            found.append(settle({**asked, "max_timeout": max_timeout}, door="python"))

        async def find(at: Engine) -> tuple[LiveSandbox, Timeouts]:
            live = await LiveSandbox.connect(
                at,
                which,
                owner=current_owner() if owner is None else owner,
                take_over=take_over,
                environment=variables,
                judge=judge,
            )
            return live, found[-1].timeouts

        return Opening(functools.partial(_open, cls, place, find))

    @classmethod
    async def find_all(
        cls,
        *,
        engine: str | EngineSettings | Engine | None = None,
        owner: str | None = None,
    ) -> list[SandboxInfo]:
        """List the sandboxes of an owner that are on the engine, the oldest first.

        Parameters
        ----------
        engine, owner
            As for `create`.

        Raises
        ------
        SandboxUnavailableError
            There is no usable engine.

        Examples
        --------
        >>> async with Sandbox.create(SandboxSpec(labels={"for": "docs"})):
        ...     found = (await Sandbox.find_all())[-1]
        >>> found.state, dict(found.labels)
        ('running', {'for': 'docs'})
        """
        whose = current_owner() if owner is None else owner
        return await at_engine(engine_place(engine), lambda at: list_sandboxes(at, whose))

    @classmethod
    def from_order(
        cls, order: Order, *, owner: str | None = None, progress: ProgressCallback | None = None
    ) -> Opening[Sandbox]:
        """Make the sandbox of an order that is settled already; otherwise like `create`.

        Parameters
        ----------
        order
            What configuration and policy came to.
        owner
            Whose it is; by default this process's user.
        progress
            Told, in the engine's loop, how far the pull of the image is.

        Examples
        --------
        >>> from sandbox_kernel.sandbox.order import settle
        >>> order = settle({"mem_limit": "512M"}, door="python")
        >>> async with Sandbox.from_order(order) as small:
        ...     small.limits.memory
        536870912
        """
        return cls._opening(order, order.endpoint(), owner, progress)

    @classmethod
    def _opening(
        cls,
        order: Order,
        place: Endpoint | Engine,
        owner: str | None,
        progress: ProgressCallback | None = None,
    ) -> Opening[Sandbox]:
        whose = current_owner() if owner is None else owner

        async def make(at: Engine) -> tuple[LiveSandbox, Timeouts]:
            # By its digest alone an image cannot be pulled.
            policy = "never" if order.spec.image.startswith("sha256:") else order.pull_policy
            await ensure_image(at, order.spec.image, policy, progress)
            live = await LiveSandbox.create(at, order.spec, owner=whose, quota=order.quota)
            return live, order.timeouts

        return Opening(functools.partial(_open, cls, place, make))

    async def destroy(self) -> None:
        """End the sandbox with all that runs in it, and remove everything of it. Idempotent.

        A persistent workspace stays, but its sandbox ends for everybody who holds it.

        Raises
        ------
        SandboxError
            The engine could not be reached or did not do it in time. The sandbox then ends by
            itself, since its lease is no longer renewed.

        Examples
        --------
        >>> await sandbox.destroy()
        >>> sandbox.ended.text
        'The sandbox was removed by its owner.'
        """
        self._dropped.detach()
        await self._hop(self._end)

    async def close(self) -> None:
        """Let go of the sandbox, as the end of a block does. Idempotent.

        It ends with that, unless others hold the sandbox of the same persistent workspace.

        Raises
        ------
        SandboxError
            As for `destroy`.

        Examples
        --------
        >>> await sandbox.close()
        >>> sandbox.ended is None
        False
        """
        self._dropped.detach()
        await self._hop(self._leave)

    async def detach(self) -> None:
        """Let go of the sandbox, which goes on for its grace time (``resumable``). Idempotent.

        Until then whoever asks with `connect` has it again, in this process or another.

        Raises
        ------
        SandboxSpecRejectedError
            It has no grace time, and ends with its last holder.

        Examples
        --------
        >>> sandbox = await Sandbox.create(SandboxSpec(resumable=60))
        >>> await sandbox.detach()
        >>> async with Sandbox.connect(sandbox.id) as again:
        ...     print(again.name == sandbox.name)
        True
        """
        if not self.spec.resumable:
            await self._hop(self._live.detach)  # raises
        self._dropped.detach()
        await self._hop(self._stay)

    async def pause(self, longest: float = LONGEST_PAUSE) -> None:
        """Freeze everything in it, memory included, for all who hold it. Idempotent.

        The next command, or transfer of files, resumes it.

        Parameters
        ----------
        longest
            Seconds after which it is removed unless somebody has resumed it; a day by default.

        Raises
        ------
        SandboxConflictError
            The engine's machine could not freeze it because too much runs in it.
        SandboxGoneError
            It has ended.

        Examples
        --------
        >>> await sandbox.pause()
        >>> sandbox.paused
        True
        >>> (await sandbox.run(["true"])).returncode, sandbox.paused
        (0, False)
        """
        await self._explained_hop(self._live.pause, longest)

    async def resume(self) -> None:
        """Let a paused sandbox go on. Idempotent; anybody who holds it may.

        Raises
        ------
        SandboxGoneError
            It has ended.

        Examples
        --------
        >>> await sandbox.resume()
        >>> sandbox.paused
        False
        """
        await self._explained_hop(self._live.resume)

    async def touch(self) -> datetime | None:
        """Start its time without use anew; its lifetime is never extended.

        Returns
        -------
        datetime or None
            As `expires_at`.

        Raises
        ------
        SandboxPausedError
            It is paused, and cannot expire for want of use until it is resumed.
        SandboxGoneError
            It has ended.

        Examples
        --------
        >>> await sandbox.touch() is None  # it has no idle_ttl, and no max_lifetime
        True
        """
        return await self._explained_hop(self._live.touch)

    async def expires_at(self) -> datetime | None:
        """Return when it ends if nobody uses it any more, by this machine's clock.

        Returns
        -------
        datetime or None
            In UTC, as the sandbox last told; `None` for never.

        Examples
        --------
        >>> async with Sandbox.create(SandboxSpec(max_lifetime=600)) as short:
        ...     print((await short.expires_at()).tzinfo)
        UTC
        """

        async def told() -> datetime | None:
            return self._live.expires_at

        return await self._hop(told)

    async def wait(self) -> EndReason:
        """Wait until the sandbox has ended, for whatever reason.

        Examples
        --------
        >>> await sandbox.destroy()
        >>> (await sandbox.wait()).kind
        'removed'
        """

        async def ended() -> EndReason:
            return await asyncio.shield(self._live.ended)

        return await self._hop(ended)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.close()
        except SandboxError as trouble:
            if error is None:
                raise
            error.add_note(f"Clearing up after it failed too: {trouble}")

    # -- commands -----------------------------------------------------------------------------

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float | Configured | None = CONFIGURED,
        idle_timeout: float | None = None,
        stdin: bytes | str = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] = "",
        capture_limit: int = CAPTURE_LIMIT,
        output_limit: int = OUTPUT_LIMIT,
        check: bool = False,
    ) -> RunResult:
        r"""Run a program to its end.

        When this is cancelled, the program and everything that it started has been stopped.

        Parameters
        ----------
        argv
            The program and its arguments; no shell is involved.
        timeout
            Seconds after which it is stopped; `None` for no end. By default as configured,
            which is 120.
        idle_timeout
            Seconds without output after which it is stopped.
        stdin
            Its whole input; text is encoded as UTF-8.
        env
            Variables besides those of the spec. They show nowhere on the engine.
        cwd
            The working directory; a relative one lies in ``/workspace``.
        capture_limit
            Bytes kept of each stream, half of them its beginning and half its end.
        output_limit
            Bytes of output after which it is stopped.
        check
            Raise an error when it does not end with code 0.

        Raises
        ------
        SandboxSpecRejectedError
            Something that was asked for cannot be done; nothing was started.
        SandboxExecTimeoutError
            It was still running at its timeout and was stopped; also a `TimeoutError`.
        SandboxRunError
            With `check`: it failed. The error carries the result.
        SandboxStartError
            It could not be started, for example since there is no such program.
        SandboxGoneError
            The sandbox has ended, and why.
        SandboxUnknownOutcomeError
            The connection broke; it may still be running.

        Examples
        --------
        >>> result = await sandbox.run(["sort", "-n"], stdin="10\n9\n", timeout=10)
        >>> result.returncode, result.stdout
        (0, b'9\n10\n')
        """
        request = self._check(argv, env, cwd, timeout, idle_timeout)
        work = functools.partial(
            self._run,
            request,
            to_bytes("stdin", stdin),
            check_bytes("capture_limit", capture_limit),
            check_bytes("output_limit", output_limit),
        )
        result = await self._hop(work)
        if check and not (result.returncode == 0 and result.reason == "finished"):
            raise CommandFailedError(request.argv[0], result)
        return result

    async def shell(
        self,
        text: str,
        *,
        timeout: float | Configured | None = CONFIGURED,
        idle_timeout: float | None = None,
        stdin: bytes | str = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] = "",
        capture_limit: int = CAPTURE_LIMIT,
        output_limit: int = OUTPUT_LIMIT,
        check: bool = False,
    ) -> RunResult:
        r"""Run a command line with the sandbox's ``sh``; otherwise like `run`.

        To hand over a value, use `env` or `stdin`: what is pasted into the text is run.

        Examples
        --------
        >>> result = await sandbox.shell('printf %s "$WHO" | wc -c', env={"WHO": "you & me"})
        >>> result.stdout_text
        '8\n'
        """
        if not isinstance(text, str):
            kind = type(text).__name__
            _refuse("text", None, f"this is {kind}", "Give text; run(argv) takes a list of words.")
        return await self.run(
            ["sh", "-c", text],
            timeout=timeout,
            idle_timeout=idle_timeout,
            stdin=stdin,
            env=env,
            cwd=cwd,
            capture_limit=capture_limit,
            output_limit=output_limit,
            check=check,
        )

    def start(
        self,
        argv: Sequence[str],
        *,
        timeout: float | Configured | None = CONFIGURED,
        idle_timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] = "",
        tty: tuple[int, int] | None = None,
        output_limit: int = OUTPUT_LIMIT,
    ) -> Opening[SandboxProcess]:
        """Start a program to talk to while it runs; the other parameters are those of `run`.

        Leaving the block stops the program when it still runs. Output that is not read waits,
        in a file when there is much of it, and delays neither this program nor others.

        Parameters
        ----------
        tty
            Rows and columns of a terminal to run it on; by default it gets pipes. On a terminal
            all output is one stream, the input is echoed, and lines end with a carriage return
            too.

        Returns
        -------
        Opening
            To be awaited or entered; until then nothing is started.

        Examples
        --------
        >>> async with sandbox.start(["cat"], timeout=None) as process:
        ...     await process.write("hello")
        ...     await process.end_input()
        ...     async for chunk in process.output:
        ...         print(chunk)
        Chunk(stream=1, data=b'hello')
        Exit(code=0, reason='finished', ...)
        """
        request = self._check(argv, env, cwd, timeout, idle_timeout)
        work = functools.partial(
            self._start, request, check_terminal(tty), check_bytes("output_limit", output_limit)
        )

        async def make() -> SandboxProcess:
            return await self._hop(work, discard=SandboxProcess.close)

        return Opening(make)

    async def kill(self) -> KillOutcome:
        """End everything that runs in the sandbox as the user's code, whatever it does against it.

        Returns
        -------
        KillOutcome
            ``processes`` when that was enough, and the sandbox goes on; ``container`` when it
            could only be done by ending the sandbox.

        Examples
        --------
        >>> (await sandbox.shell("setsid sleep 1000 >/dev/null 2>&1 &")).returncode
        0
        >>> await sandbox.kill()
        'processes'
        """
        return await self._hop(self._kill)

    async def usage(self) -> Usage:
        """Measure what the sandbox uses at this moment.

        Examples
        --------
        >>> (await sandbox.usage()).pids > 0
        True
        """

        async def measure() -> Usage:
            self._be_running()
            return usage_of(await self._live.engine.container_stats(self._live.id))

        return await self._explained_hop(measure)

    @property
    def files(self) -> SandboxFiles:
        """The files in the sandbox: put them in, get them out, list them."""
        files = Files(self._live.engine, self._live.id, user=CODE_USER)
        return SandboxFiles(files, self._using_hop)

    # -- the engine's side --------------------------------------------------------------------

    def _check(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None,
        cwd: str | os.PathLike[str],
        timeout: float | Configured | None,
        idle_timeout: float | None,
    ) -> CommandRequest:
        return check_command(
            argv,
            env=env,
            defaults=self.spec.environment,
            cwd=cwd,
            timeout=timeout,
            idle_timeout=idle_timeout,
            timeouts=self._timeouts,
        )

    async def _hop(
        self,
        work: Callable[..., Coroutine[Any, Any, T]],
        *args: Any,
        discard: Callable[[T], Awaitable[object]] | None = None,
    ) -> T:
        if os.getpid() != self._pid:
            raise SandboxGoneError(
                "This sandbox belongs to the process that this one was forked from; make another"
            )
        return await self._home.call(work, *args, discard=discard)

    async def _explained_hop(self, work: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        async def explained() -> T:
            async with self._explaining():
                return await work(*args)

        return await self._hop(explained)

    async def _using_hop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async def used() -> T:
            async with self._explaining():
                return await self._used(work)

        return await self._hop(used)

    async def _used(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do something that counts as use, resuming the sandbox first (B8); in the engine's loop.

        Work that a pause by somebody else keeps from beginning is begun again.
        """
        async with self._live.in_use():
            try:
                return await work()
            except SandboxPausedError:
                await self._live.resume()
                return await work()

    async def _run(
        self, request: CommandRequest, stdin: bytes, capture_limit: int, output_limit: int
    ) -> RunResult:
        """Run a command; runs in the engine's loop."""
        self._be_running()
        async with self._explaining():
            return await self._used(
                functools.partial(
                    run_process,
                    self._live.engine,
                    self._live.id,
                    request.argv,
                    user=CODE_USER,
                    env=request.env,
                    cwd=request.cwd,
                    stdin=stdin,
                    timeout=request.timeout,
                    idle_timeout=request.idle_timeout,
                    capture_limit=capture_limit,
                    output_limit=output_limit,
                )
            )

    async def _start(
        self, request: CommandRequest, tty: tuple[int, int] | None, output_limit: int
    ) -> SandboxProcess:
        """Start a command; runs in the engine's loop."""
        self._be_running()
        async with self._explaining():
            process = await self._used(
                functools.partial(
                    start_process,
                    self._live.engine,
                    self._live.id,
                    request.argv,
                    user=CODE_USER,
                    env=request.env,
                    cwd=request.cwd,
                    timeout=request.timeout,
                    idle_timeout=request.idle_timeout,
                    tty=tty,
                    output_limit=output_limit,
                )
            )
        self._processes.add(process)
        if self.spec.idle_ttl is not None:
            using = asyncio.create_task(self._use_until_over(process), name="sandbox-use")
            self._uses.add(using)
            using.add_done_callback(self._uses.discard)
        return SandboxProcess(process, self.name, self._explained_hop, self._processes.discard)

    async def _use_until_over(self, process: Process) -> None:
        """Keep the sandbox from counting as idle while a program runs."""
        async with self._live.in_use():
            # It is over too when the sandbox has ended, or nothing more is heard of it.
            await process.over()

    async def _kill(self) -> KillOutcome:
        """End the user's processes; runs in the engine's loop."""
        self._be_running()
        async with self._explaining():
            return await self._live.kill_user_processes()

    def _be_running(self) -> None:
        if (ended := self.ended) is not None:
            raise SandboxGoneError(ended.text)

    @contextlib.asynccontextmanager
    async def _explaining(self) -> AsyncIterator[None]:
        """Make an error say why the sandbox has ended, where it has; in the engine's loop."""
        ended = self._live.ended
        try:
            yield
        except (SandboxGoneError, SandboxUnknownOutcomeError) as error:
            # The news of the end can be a moment behind.
            await asyncio.wait({ended}, timeout=_REASON_PATIENCE)
            if not ended.done():
                raise
            reason = ended.result()
            if reason.kind == "engine-lost" and isinstance(error, SandboxUnknownOutcomeError):
                error.add_note(reason.text)
                raise
            raise _gone(reason, error) from error


def _gone(reason: EndReason, error: SandboxError) -> SandboxGoneError:
    """Return an error that says why the sandbox ended, with what is known of the command."""
    if not isinstance(error, CommandError):
        return SandboxGoneError(reason.text)
    lacked = reason.kind if reason.kind in ("out-of-memory", "disk-full") else error.reason
    gone = CommandGoneError(reason.text, lacked)
    gone.result = error.result
    return gone


async def _open(
    cls: type[Sandbox],
    place: Endpoint | Engine,
    get: Callable[[Engine], Awaitable[tuple[LiveSandbox, Timeouts]]],
) -> Sandbox:
    """Make or find a sandbox, where the work of its engine is done."""
    thread = EngineThread.current()
    home: Home = CallersLoop() if isinstance(place, Engine) else thread

    async def open_() -> Sandbox:
        engine = place if isinstance(place, Engine) else await thread.engine(place)
        live, timeouts = await get(engine)
        return cls(live, home, timeouts, home.at_exit(live.close))

    return await home.call(open_, discard=cls.close)


async def _end(
    end: Callable[[], Coroutine[Any, Any, None]],
    processes: set[Process],
    withdraw: Callable[[], None],
) -> None:
    """End a sandbox, or let go of it, and of what ran in it; runs in the engine's loop."""
    try:
        await end()
    finally:
        withdraw()
        await asyncio.gather(*(_settle(process) for process in tuple(processes)))


async def _settle(process: Process) -> None:
    """Let a process whose sandbox has gone come to its end, and let go of it."""
    with contextlib.suppress(SandboxError, TimeoutError):
        async with asyncio.timeout(_SETTLE_PATIENCE):
            await process.wait()
    await process.close()


def _dropped(
    loop: asyncio.AbstractEventLoop,
    pid: int,
    live: LiveSandbox,
    end: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    """End a sandbox that nobody refers to any more; called by the garbage collector."""
    if os.getpid() != pid:
        return
    running = not live.ended.done()
    # RuntimeError: its loop was closed, and with that its lease has ended.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_end_dropped, end)
    if running:
        warnings.warn(f"the sandbox {live.name} was not destroyed", ResourceWarning, stacklevel=2)


_ending: set[asyncio.Task[None]] = set()


def _end_dropped(end: Callable[[], Coroutine[Any, Any, None]]) -> None:
    task = asyncio.ensure_future(end())
    _ending.add(task)
    task.add_done_callback(_ended_dropped)


def _ended_dropped(task: asyncio.Task[None]) -> None:
    _ending.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("a sandbox that was dropped will end by its lease: %s", error)


def _refuse(setting: str, value: object, reason: str, remedy: str) -> NoReturn:
    raise SandboxSpecRejectedError(setting, value, reason, remedy)
