"""A sandbox that runs: made, watched, ended, and always cleared away (features B; decision 7).

All of it runs in the engine's loop. A `LiveSandbox` owns its lease and one task that learns,
from the engine's events and the lease's stream, that and why the container ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from typing import Any, Final, Literal

from sandbox_kernel.engine.client import CreatedContainer, Engine, ExecStream
from sandbox_kernel.engine.events import LOST, RESYNC, Event, Watch
from sandbox_kernel.engine.faults import image_missing
from sandbox_kernel.engine.images import image_present
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxEngineError,
    SandboxError,
    SandboxGoneError,
    SandboxStartError,
    SandboxUnavailableError,
)
from sandbox_kernel.policy import Quota
from sandbox_kernel.sandbox import labels as names
from sandbox_kernel.sandbox.attest import attest, volume_name
from sandbox_kernel.sandbox.container import (
    CODE_USER,
    CONTROL_USER,
    container_body,
    image_parts,
    lease_seconds,
    lifetime_seconds,
)
from sandbox_kernel.sandbox.lease import LIFETIME, NO_CLOCK, RELEASED, SILENCE, LeaseHolder
from sandbox_kernel.sandbox.network import SharedNetwork, ensure_network
from sandbox_kernel.sandbox.quota import admit, keep_place
from sandbox_kernel.sandbox.readiness import require_proof
from sandbox_kernel.sandbox.spec import Limits, SandboxSpec, resolve_limits
from sandbox_kernel.sandbox.tiers import shared_tier

__all__ = ["CODE_USER", "CONTROL_USER", "EndKind", "EndReason", "KillOutcome", "LiveSandbox"]

log = logging.getLogger(__name__)

EndKind = Literal["removed", "out-of-memory", "lease-expired", "lifetime", "exited", "engine-lost"]
KillOutcome = Literal["processes", "container"]

START_TIMEOUT: Final = 20.0
DESTROY_TIMEOUT: Final = 10.0
_LOOK_TIMEOUT: Final = 5.0
_NAME_TRIES: Final = 3
_KILL_PATIENCE: Final = 2.0
_POLL: Final = 0.05
_OUTPUT_LIMIT: Final = 64 * 1024
_KILLED: Final = 137


@dataclass(frozen=True, slots=True)
class EndReason:
    """Why a sandbox ended.

    Parameters
    ----------
    kind
        For programs.
    exit_code
        Of the container's main process, where it is known.
    text
        For people.
    """

    kind: EndKind
    exit_code: int | None
    text: str


@functools.cache
def _processes_text() -> str:
    return resources.files(__package__).joinpath("processes.sh").read_text(encoding="utf-8")


def _token() -> str:
    return secrets.token_hex(6)


class LiveSandbox:
    """One running sandbox. It is made by `create` and ends with `destroy`.

    Attributes
    ----------
    engine, spec, limits
        Where it runs, what was asked for, and what that came to.
    id, short_id, name
        What the engine calls the container.
    volume
        The name of its anonymous workspace volume.
    image_id
        The image that it runs from, by the digest of its content.
    ended
        Done when the container has ended, with an `EndReason`; it never fails.
    out_of_memory_events
        How often the engine has reported that something in it was killed for lack of memory.
        The report comes before that of the process's end.
    """

    def __init__(
        self, engine: Engine, spec: SandboxSpec, limits: Limits, name: str, container_id: str
    ) -> None:
        self.engine = engine
        self.spec = spec
        self.limits = limits
        self.name = name
        self.id = container_id
        self.short_id = container_id[:12]
        self.volume = ""
        self.image_id = ""
        self.ended: asyncio.Future[EndReason] = asyncio.get_running_loop().create_future()
        self.out_of_memory_events = 0
        self._born = time.monotonic()
        self._killed_from_outside = False
        self._lease: LeaseHolder | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._destruction: asyncio.Task[None] | None = None

    # -- making -------------------------------------------------------------------------------

    @classmethod
    async def create(
        cls,
        engine: Engine,
        spec: SandboxSpec,
        *,
        owner: str,
        extra_labels: Mapping[str, str] | None = None,
        quota: Quota | None = None,
        token: Callable[[], str] = _token,
    ) -> LiveSandbox:
        """Make a sandbox and return it when its lease runs.

        Whatever goes wrong, and whenever it is cancelled, nothing stays on the engine.

        Parameters
        ----------
        engine
            An open engine, in whose loop this is called.
        spec
            What is wanted.
        owner
            Whose it is.
        extra_labels
            Labels of the layers above, by their full names.
        quota
            How many sandboxes the owner may have at a time; `None` for any number.
        token
            Gives the random part of the container's name.

        Raises
        ------
        SandboxSpecRejectedError
            The machine cannot give it, its network is not closed where it has to be, or the
            owner has as many sandboxes as are allowed; nothing was created.
        SandboxImageMissingError, SandboxImageUnsuitableError
            The image is not on the engine, or no sandbox can be made from it.
        SandboxAttestationError
            The engine made something else; it was removed.
        SandboxStartError
            The main process did not come up.
        """

        async def gate(network: SharedNetwork) -> None:
            await require_proof(engine, network, spec, functools.partial(cls.unproved, engine))

        return await cls._make(engine, spec, owner, extra_labels or {}, token, gate, quota)

    @classmethod
    async def unproved(cls, engine: Engine, spec: SandboxSpec, owner: str) -> LiveSandbox:
        """Make a sandbox on a network of which nothing is known yet, for the probe alone."""

        async def no_gate(_: SharedNetwork) -> None:
            return

        return await cls._make(engine, spec, owner, {}, _token, no_gate)

    @classmethod
    async def _make(
        cls,
        engine: Engine,
        spec: SandboxSpec,
        owner: str,
        extra_labels: Mapping[str, str],
        token: Callable[[], str],
        gate: Callable[[SharedNetwork], Awaitable[None]],
        quota: Quota | None = None,
    ) -> LiveSandbox:
        """Make a sandbox once `gate` has let its network pass."""
        began = time.monotonic()
        image = await image_present(engine, spec.image)
        if image is None:
            raise image_missing(spec.image)
        parts = image_parts(image, spec.image)
        info = await engine.info()
        limits = resolve_limits(spec, info, len(parts.small_volumes))
        if quota is not None:
            await admit(engine, owner, quota, info)
        labels = names.make_labels(
            owner=owner,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            image=spec.image,
            network=spec.network,
            ttl=lease_seconds(spec),
            lifetime=lifetime_seconds(spec),
            caller=spec.labels,
            extra=extra_labels,
            foreign=parts.labels,
        )
        tier = shared_tier(spec.network)
        network = None if tier is None else await ensure_network(engine, tier)
        if network is not None:
            await gate(network)
        body = container_body(spec, limits, image, labels, network)
        name, container_id, warnings = await _create_container(engine, spec.prefix, body, token)
        sandbox = cls(engine, spec, limits, name, container_id)
        try:
            inspected = await engine.inspect_container(container_id)
            attest(body, inspected, warnings, network)
            sandbox.volume = volume_name(inspected)
            sandbox.image_id = image.id
            if quota is not None:
                await keep_place(engine, owner, quota, info, container_id)
            await sandbox._start()
        except BaseException as error:
            await _in_any_case(sandbox.destroy(), error)
            raise
        log.info(
            "sandbox %s started in %.0f ms", sandbox.short_id, (time.monotonic() - began) * 1000
        )
        return sandbox

    async def _start(self) -> None:
        stream = await self.engine.attach_container(self.id)
        self._lease = LeaseHolder(stream, lease_seconds(self.spec))
        watching = asyncio.Event()
        self._watcher = asyncio.create_task(self._watch(watching), name=f"watch-{self.short_id}")
        ready = asyncio.ensure_future(watching.wait())
        try:
            await asyncio.wait({ready, self._watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self._watcher.done():
            self._watcher.result()  # why the events could not be had
        try:
            await self.engine.start_container(self.id)
        except SandboxGoneError as error:
            raise SandboxStartError("The sandbox was removed before it could start") from error
        await self._lease.armed(START_TIMEOUT)
        await self._lease.join(START_TIMEOUT, alone=True)

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
        """Run a program in the sandbox and return its streams.

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
        try:
            return await self.engine.exec(self.id, argv, user=user, env=whole, cwd=cwd, stdin=stdin)
        except SandboxGoneError as error:
            reason = await self._reason_soon()
            if reason is None:
                raise
            raise SandboxGoneError(reason.text) from error

    async def kill_user_processes(self, timeout: float = 5.0) -> KillOutcome:
        """Kill every process of the code's uid, whatever it does against that.

        Parameters
        ----------
        timeout
            Bound in seconds of all of it.

        Returns
        -------
        KillOutcome
            ``processes`` when none is left; ``container`` when that could not be brought about
            from inside (at the process limit no exec may start) and the whole sandbox was
            killed instead.
        """
        patience = min(_KILL_PATIENCE, timeout / 2)
        try:
            async with asyncio.timeout(patience):
                while True:
                    if await self._no_user_process_left():
                        return "processes"
                    await asyncio.sleep(_POLL)
        except (TimeoutError, SandboxEngineError, SandboxStartError) as error:
            log.info("sandbox %s: killed as a whole (%s)", self.short_id, error or "no time left")
        async with asyncio.timeout(timeout - patience):
            await self.engine.kill_container(self.id)
        return "container"

    async def _no_user_process_left(self) -> bool:
        # The shell's own kill; it spares its own process only.
        await self._run(["sh", "-c", "kill -9 -1"], CODE_USER)
        uid = CODE_USER.partition(":")[0]
        code, pids = await self._run(
            ["sh", "-c", _processes_text(), "processes", uid], CONTROL_USER
        )
        return code == 0 and not pids.strip()

    async def _run(self, argv: Sequence[str], user: str) -> tuple[int | None, bytes]:
        """Run a short program of ours to its end; its output is cut at a limit."""
        output = bytearray()
        async with await self.engine.exec(self.id, argv, user=user, stdin=False) as stream:
            while (chunk := await stream.read()) is not None:
                if chunk.stream == 1 and len(output) < _OUTPUT_LIMIT:
                    output += chunk.data
            state = await self.engine.inspect_exec(stream.id)
        return state.exit_code, bytes(output)

    # -- its end ------------------------------------------------------------------------------

    async def destroy(self) -> None:
        """End the sandbox and remove everything of it. Idempotent; any number may call it.

        It goes on when its caller is cancelled.

        Raises
        ------
        SandboxError
            The engine could not be reached or did not do it within 10 s. The lease was let go
            in any case, so that the engine removes the sandbox by itself when it can.
        """
        if self._destruction is None or _failed(self._destruction):
            self._destruction = asyncio.create_task(
                self._destroy(), name=f"destroy-{self.short_id}"
            )
        await asyncio.shield(self._destruction)

    async def _destroy(self) -> None:
        began = time.monotonic()
        self._end(EndReason("removed", None, "The sandbox was removed by its owner."))
        try:
            async with asyncio.timeout(DESTROY_TIMEOUT):
                await self.engine.remove_container(self.id)
                await self._volume_gone()
        except TimeoutError as error:
            if isinstance(error, SandboxError):
                raise
            raise SandboxEngineError(
                f"The sandbox {self.short_id} could not be removed within {DESTROY_TIMEOUT:g} s"
            ) from error
        finally:
            if self._watcher is not None:
                self._watcher.cancel()
                await asyncio.wait({self._watcher})
            if self._lease is not None:
                await self._lease.release()
        log.info(
            "sandbox %s removed in %.0f ms after %.1f s",
            self.short_id,
            (time.monotonic() - began) * 1000,
            began - self._born,
        )

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

    def _end(self, reason: EndReason) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)
            log.info("sandbox %s ended: %s", self.short_id, reason.text)

    async def _reason_soon(self) -> EndReason | None:
        """Return why it ended; an exec can fail just before the event arrives."""
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(self.ended), 1.0)
        return None

    # -- watching -----------------------------------------------------------------------------

    async def _watch(self, watching: asyncio.Event) -> None:
        async with self.engine.events.watch(self.id) as events:
            watching.set()
            try:
                while not self.ended.done():
                    if await self._next_news(events):
                        await self._look()
            except Exception as error:
                # Whoever waits for the end must not wait for ever.
                log.exception("sandbox %s can no longer be watched", self.short_id)
                self._end(EndReason("engine-lost", None, f"Watching the sandbox failed: {error}"))

    async def _next_news(self, events: Watch) -> bool:
        """Wait for an event or for trouble with the lease; say whether to ask the engine."""
        assert self._lease is not None
        event = asyncio.ensure_future(events.get())
        trouble = asyncio.ensure_future(self._lease.trouble())
        try:
            await asyncio.wait({event, trouble}, return_when=asyncio.FIRST_COMPLETED)
            if event.done():
                return self._hear(event.result())
            # The stream ends with the container, and its event, which says more, may be
            # a moment behind.
            with contextlib.suppress(TimeoutError):
                return self._hear(await asyncio.wait_for(asyncio.shield(event), 0.5))
            return True
        finally:
            for task in (event, trouble):
                task.cancel()
            await asyncio.wait({event, trouble})

    def _hear(self, event: Event) -> bool:
        if event.action == "oom":
            self.out_of_memory_events += 1
        elif event.action == "kill":
            self._killed_from_outside = event.attributes.get("signal") in {"9", "15", None}
        elif event.action == "die":
            code = event.attributes.get("exitCode", "")
            self._end(self._reason(int(code) if code.isdecimal() else None))
        elif event.action == "destroy":
            self._end(EndReason("removed", None, "The sandbox was removed on the engine."))
        return event.action in {RESYNC, LOST}

    async def _look(self) -> None:
        """Ask the engine whether the sandbox still runs."""
        while not self.ended.done():
            try:
                async with asyncio.timeout(_LOOK_TIMEOUT):
                    state = (await self.engine.inspect_container(self.id))["State"]
            except SandboxGoneError:
                reason = "The sandbox is gone: the engine no longer knows it."
                self._end(EndReason("removed", None, reason))
            except (SandboxUnavailableError, SandboxEngineError, TimeoutError) as error:
                text = f"The connection to the engine broke: {error or 'it gives no answer'}"
                self._end(EndReason("engine-lost", None, text))
            else:
                if state.get("Status") in {"exited", "dead", "removing"}:
                    self._end(self._reason(int(state.get("ExitCode") or 0)))
            return

    def _reason(self, code: int | None) -> EndReason:
        """Tell from the main process's exit code why it ended."""
        ttl, lifetime = lease_seconds(self.spec), lifetime_seconds(self.spec)
        if code == SILENCE:
            text = f"The sandbox's lease ended: its owner was not heard of for {ttl} s."
            return EndReason("lease-expired", code, text)
        if code == LIFETIME:
            return EndReason("lifetime", code, f"The sandbox's lifetime of {lifetime} s is over.")
        if code == RELEASED:
            text = "The connection that kept the sandbox alive broke, and the sandbox ended."
            return EndReason("engine-lost", code, text)
        if code == NO_CLOCK:
            text = (
                f"The sandbox ended: its limit of {self.limits.pids} processes left none for "
                "the clock of its lease."
            )
            return EndReason("exited", code, text)
        if code == _KILLED and self._killed_from_outside:
            return EndReason("removed", code, "The sandbox was killed on the engine.")
        if code == _KILLED and self.out_of_memory_events:
            size = self.limits.memory // (1024 * 1024)
            text = f"The sandbox ran out of memory; its limit is {size} MiB."
            return EndReason("out-of-memory", code, text)
        said = self._lease.output[-300:] if self._lease is not None else ""
        text = f"The sandbox's main process ended with exit code {code}."
        return EndReason("exited", code, f"{text} It said: {said!r}" if said else text)


async def _create_container(
    engine: Engine, prefix: str, body: Mapping[str, Any], token: Callable[[], str]
) -> tuple[str, str, tuple[str, ...]]:
    """Create the container under a name of its own; an unheard answer leaves none behind."""
    tries = _NAME_TRIES
    while True:
        name = prefix + token()
        creating = asyncio.ensure_future(engine.create_container(name, body))
        try:
            # Cancelled by itself, the call could end between the engine's doing and its answer.
            created = await asyncio.shield(creating)
        except SandboxConflictError:
            tries -= 1
            if tries == 0:
                raise
        except asyncio.CancelledError as error:
            await _in_any_case(_undo(engine, creating), error)
            raise
        except (SandboxUnavailableError, TimeoutError) as error:
            # The engine may have made it all the same. The name tells which one it is.
            await _in_any_case(_remove_ours(engine, name, body), error)
            raise
        else:
            return name, created.id, created.warnings


async def _undo(engine: Engine, creating: asyncio.Future[CreatedContainer]) -> None:
    """Wait for a creation that nobody wants any more, and remove what it made."""
    async with asyncio.timeout(DESTROY_TIMEOUT):
        with contextlib.suppress(SandboxError):
            created = await creating
            await engine.remove_container(created.id)


async def _remove_ours(engine: Engine, name: str, body: Mapping[str, Any]) -> None:
    async with asyncio.timeout(DESTROY_TIMEOUT):
        with contextlib.suppress(SandboxGoneError):
            found = await engine.inspect_container(name)
            if (found.get("Config") or {}).get("Labels") == body["Labels"]:
                await engine.remove_container(str(found["Id"]))


async def _in_any_case(work: Coroutine[Any, Any, None], error: BaseException) -> None:
    """Do the clearing up that `error` makes necessary, also when cancelled meanwhile.

    What goes wrong in it becomes a note on the error, which the caller raises again. The work
    has a bound of its own.
    """
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    trouble = None if task.cancelled() else task.exception()
    if trouble is not None:
        error.add_note(f"Clearing up after it failed too: {trouble}")
    if cancelled and not isinstance(error, asyncio.CancelledError):
        raise asyncio.CancelledError from error


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
