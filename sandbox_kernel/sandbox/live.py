"""Sandboxes made and found: create one, share one, connect to one (features B; decision 7).

All of it runs in the engine's loop. What can be done with a sandbox that was made here is in
`running.py`, what it was made of in `plan.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, Final, Self

from sandbox_kernel.engine.client import CreatedContainer, Engine
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxEngineError,
    SandboxError,
    SandboxGoneError,
    SandboxSpecRejectedError,
    SandboxStartError,
    SandboxUnavailableError,
)
from sandbox_kernel.policy import Quota
from sandbox_kernel.sandbox import labels as names
from sandbox_kernel.sandbox.attest import attest, volume_name
from sandbox_kernel.sandbox.container import CODE_USER, CONTROL_USER
from sandbox_kernel.sandbox.ending import EndKind, EndReason
from sandbox_kernel.sandbox.found import find_sandbox
from sandbox_kernel.sandbox.hold import START_TIMEOUT
from sandbox_kernel.sandbox.network import SharedNetwork
from sandbox_kernel.sandbox.ownership import make_writable
from sandbox_kernel.sandbox.pause import thaw
from sandbox_kernel.sandbox.plan import (
    Plan,
    SetupPlan,
    labels_of,
    make_plan,
    other_settings,
    plan_of,
    verify_workspace,
)
from sandbox_kernel.sandbox.quota import admit, keep_place
from sandbox_kernel.sandbox.readiness import require_proof
from sandbox_kernel.sandbox.running import DESTROY_TIMEOUT, KillOutcome, RunningSandbox
from sandbox_kernel.sandbox.snapshot import give_project, give_template
from sandbox_kernel.sandbox.spec import Limits, SandboxSpec
from sandbox_kernel.sandbox.workspace import quota_refusals

__all__ = ["CODE_USER", "CONTROL_USER", "EndKind", "EndReason", "KillOutcome", "LiveSandbox"]

log = logging.getLogger(__name__)

_NAME_TRIES: Final = 3
_CONVERGE_TIMEOUT: Final = 60.0
_PREPARE_TIMEOUT: Final = 600.0
_ABANDONED: Final = START_TIMEOUT + 10.0
"""Seconds after which a container that was never started belongs to a creator that is gone."""

_POLL: Final = 0.1


def _token() -> str:
    return secrets.token_hex(6)


class LiveSandbox(RunningSandbox):
    """One running sandbox, made by `create` or found by `connect`.

    It ends with `destroy`, or with `close` when nobody else holds it; see `RunningSandbox`.
    """

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
        share: bool = True,
        token: Callable[[], str] = _token,
    ) -> Self:
        """Make a sandbox and return it when its lease runs and its workspace is prepared.

        Whatever goes wrong, and whenever it is cancelled, no container and no anonymous volume
        stays on the engine. Creators of one persistent workspace get one sandbox, which each of
        them holds; the settings must be the same, while environment and labels of a later one
        are its own affair.

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
        share
            Whether to share the sandbox of a workspace that is in use; else it is refused.
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
            The main process did not come up, or the workspace cannot be written to.
        SandboxConflictError
            The workspace is in use with other settings, by one who holds it alone, or is
            somebody else's.
        """

        async def gate(network: SharedNetwork) -> None:
            await require_proof(engine, network, spec, functools.partial(cls.unproved, engine))

        plan = await make_plan(engine, spec, owner, extra_labels or {}, gate, quota)
        return await cls._make(plan, token, share=share)

    @classmethod
    async def unproved(cls, engine: Engine, spec: SandboxSpec, owner: str) -> Self:
        """Make a sandbox on a network of which nothing is known yet, for the probe alone."""

        async def no_gate(_: SharedNetwork) -> None:
            return

        return await cls._make(await make_plan(engine, spec, owner, {}, no_gate), _token)

    @classmethod
    async def for_setup(
        cls, engine: Engine, spec: SandboxSpec, *, owner: str, quota: Quota | None = None
    ) -> Self:
        """Make a container for commands as root that prepare an image (C3); see `create`.

        Nothing of the user's may ever run in it.
        """

        async def gate(network: SharedNetwork) -> None:
            await require_proof(engine, network, spec, functools.partial(cls.unproved, engine))

        plan = await make_plan(engine, spec, owner, {}, gate, quota)
        parts = (getattr(plan, field.name) for field in dataclasses.fields(plan))
        return await cls._make(SetupPlan(*parts), _token)

    @classmethod
    async def connect(
        cls,
        engine: Engine,
        which: str,
        *,
        owner: str,
        take_over: bool = False,
        environment: Mapping[str, str] | None = None,
        judge: Callable[[SandboxSpec, Limits], None] | None = None,
        holder: str | None = None,
    ) -> Self:
        """Hold a sandbox that runs: one that outlived its owner, or that others hold too (B9).

        What the engine tells of it is compared with what it was made to be; a paused one is
        resumed.

        Parameters
        ----------
        engine
            An open engine, in whose loop this is called.
        which
            Its id (12 characters at least), its name, or the key of its workspace.
        owner
            Whose it is. Sandboxes of others are not found.
        take_over
            Take it from all who hold it; their `ended` says ``taken-over``. Else it is held
            beside them.
        environment
            Variables for the code that runs in it from now on. Those of its maker are not kept.
        judge
            Told what it was made to be, to raise when that may not be any more; see
            `order.judge_found`.
        holder
            The `holder` of somebody who is gone and whose place is taken; `None` for a new one.

        Raises
        ------
        SandboxGoneError
            There is none.
        SandboxConflictError
            It cannot outlive the process that made it, or another one holds it alone.
        SandboxAttestationError
            It is weaker than what it was made to be.
        """
        inspected = await find_sandbox(engine, which, owner)
        plan = await plan_of(engine, inspected, environment or {})
        if not plan.spec.is_shared:
            raise SandboxConflictError(
                f"The sandbox {str(inspected['Id'])[:12]} belongs to the process that made it and "
                "ends with it. Make it with a grace time (resumable) to connect to it"
            )
        if judge is not None:
            judge(plan.spec, plan.limits)
        found = await cls._enter(plan, inspected, alone=take_over, holder=holder)
        if found is None:
            raise SandboxGoneError(f"The sandbox {which!r} ended just now")
        return found

    @classmethod
    async def _make(cls, plan: Plan, token: Callable[[], str], *, share: bool = True) -> Self:
        if plan.workspace is not None and plan.workspace.source is not None:
            if share:
                return await cls._converge(plan, plan.workspace.source)
            made = await cls._make_new(plan, plan.workspace.source)
            if made is None:
                key = plan.spec.workspace
                raise SandboxConflictError(f"The workspace {key!r} is in use by a sandbox")
            return made
        if plan.quota is not None:
            await admit(plan.engine, plan.owner, plan.quota, plan.info)
        for _ in range(_NAME_TRIES):
            made = await cls._make_new(plan, plan.spec.prefix + token())
            if made is not None:
                return made
        raise SandboxConflictError("The engine has containers by all the names that were tried")

    @classmethod
    async def _converge(cls, plan: Plan, name: str) -> Self:
        """Make the one sandbox of a workspace, or share that of whoever was first.

        Its name follows from the workspace, so that the engine makes one of them only.
        """
        deadline = time.monotonic() + _CONVERGE_TIMEOUT
        waiting: dict[str, float] = {}
        while time.monotonic() < deadline:
            with contextlib.suppress(SandboxGoneError):
                found = await cls._adopt(plan, name, waiting)
                if found is not None:
                    return found
                await asyncio.sleep(_POLL)
                continue
            if plan.quota is not None:
                await admit(plan.engine, plan.owner, plan.quota, plan.info)
            made = await cls._make_new(plan, name)
            if made is not None:
                return made
        raise SandboxStartError(
            f"The sandbox of the workspace {plan.spec.workspace!r} keeps being made and removed "
            f"by others; no hold on it in {_CONVERGE_TIMEOUT:g} s"
        )

    @classmethod
    async def _make_new(cls, plan: Plan, name: str) -> Self | None:
        """Make a sandbox by a name; `None` when the engine has a container of that name."""
        began = time.monotonic()
        engine, spec, body = plan.engine, plan.spec, plan.body()
        # The anonymous volume of an ephemeral workspace is made with the container.
        with quota_refusals(plan.limits.disk):
            created = await _create_container(engine, name, body)
        if created is None:
            return None
        sandbox = cls(engine, spec, plan.limits, name, created.id, plan.owner)
        try:
            inspected = await engine.inspect_container(created.id)
            attest(body, inspected, created.warnings, plan.network)
            sandbox.volume = volume_name(inspected)
            sandbox.image_id = plan.image.id
            if spec.workspace is not None:
                # The engine makes a volume that went away meanwhile; now it cannot go.
                await verify_workspace(
                    engine, spec.prefix, plan.owner, spec.workspace, plan.limits.disk
                )
            if plan.quota is not None:
                await keep_place(engine, plan.owner, plan.quota, plan.info, created.id)
            with _device_refusals(spec):
                await sandbox._hold.begin(start=True, alone=spec.durability == "ephemeral")
            if spec.is_shared:
                # Somebody who was quicker may hold it already, and be at it.
                await sandbox._be_prepared(plan)
            else:
                await sandbox._prepare(plan)
        except BaseException as error:
            await _in_any_case(sandbox.destroy(), error)
            raise
        sandbox.watch_disk()
        log.info(
            "sandbox %s started in %.0f ms", sandbox.short_id, (time.monotonic() - began) * 1000
        )
        return sandbox

    @classmethod
    async def _adopt(cls, plan: Plan, name: str, waiting: dict[str, float]) -> Self | None:
        """Share the sandbox that has a workspace's name.

        Parameters
        ----------
        plan, name
            What is wanted, and what it is called.
        waiting
            Since when each container that is not started yet has been waited for.

        Returns
        -------
        LiveSandbox or None
            `None` while it is being made or removed.

        Raises
        ------
        SandboxGoneError
            There is none.
        SandboxConflictError
            It is something else.
        """
        engine = plan.engine
        inspected = await engine.inspect_container(name)
        container_id, state = str(inspected["Id"]), inspected["State"].get("Status")
        theirs = labels_of(inspected)
        same = (names.OWNER, names.WORKSPACE, names.DURABILITY)
        if names.VERSION not in theirs or any(theirs.get(n) != plan.labels[n] for n in same):
            raise SandboxConflictError(
                f"The container {name!r} is on the engine and is not the sandbox of this "
                "workspace. Look at it (docker inspect) and remove it, or use another key"
            )
        abandoned = time.monotonic() - waiting.setdefault(container_id, time.monotonic())
        if state in {"exited", "dead"} or (state == "created" and abandoned > _ABANDONED):
            await engine.remove_container(container_id)
            return None
        if state in {"created", "removing"}:
            return None
        other = other_settings(plan.labels, theirs)
        if not other and str(inspected.get("Image")) != plan.image.id:
            other = [f"the image {plan.spec.image!r} has been replaced since it was made"]
        if other:
            raise SandboxConflictError(
                f"The workspace {plan.spec.workspace!r} is in use, in a sandbox with other "
                f"settings: {'; '.join(other)}. End that one first, or ask for the same"
            )
        return await cls._enter(plan, inspected, alone=False)

    @classmethod
    async def _enter(
        cls,
        plan: Plan,
        inspected: Mapping[str, Any],
        *,
        alone: bool,
        holder: str | None = None,
    ) -> Self | None:
        """Hold a running container beside, or instead of, its holders; `None` when it ends."""
        engine, container_id = plan.engine, str(inspected["Id"])
        # Those of its maker, and of the layers above it, stay as they are.
        labels = {k: v for k, v in labels_of(inspected).items() if k.startswith(names.PREFIX)}
        body = plan.body(labels)
        attest(body, inspected, (), plan.network, running=True)
        name = str(inspected["Name"]).lstrip("/")
        sandbox = cls(engine, plan.spec, plan.limits, name, container_id, plan.owner)
        sandbox.volume = volume_name(inspected)
        sandbox.image_id = plan.image.id
        try:
            if inspected["State"].get("Paused"):
                # Nobody can be asked while it is.
                await thaw(engine, container_id, plan.spec.prefix)
            await sandbox._hold.begin(start=False, alone=alone, holder=holder)
            await sandbox._be_prepared(plan)
        except SandboxGoneError as error:
            reason = await sandbox._hold.reason_soon()
            await _in_any_case(sandbox.abandon(), error)
            if reason is not None and reason.kind == "taken-over":
                raise SandboxConflictError(reason.text) from error
            return None
        except SandboxConflictError as error:
            await _in_any_case(sandbox.abandon(), error)
            raise
        except BaseException as error:
            await _in_any_case(sandbox.close(), error)
            raise
        sandbox.watch_disk()
        log.info("sandbox %s is held as well", sandbox.short_id)
        return sandbox

    # -- preparing ----------------------------------------------------------------------------

    async def _prepare(self, plan: Plan) -> None:
        """Make the workspace what it has to be before the first command."""
        lease = self._hold.lease
        await make_writable(self, plan, lease.place)
        if self.spec.project is not None:
            await give_project(self, self.spec.project)
        if self.spec.template is not None:
            await give_template(self, self.spec.template, is_new=plan.is_new)
        if self.spec.is_shared:
            await lease.prepared(START_TIMEOUT)

    async def _be_prepared(self, plan: Plan) -> None:
        """Wait until the first holder has prepared the workspace; do it when that one is gone."""
        lease = self._hold.lease
        try:
            async with asyncio.timeout(_PREPARE_TIMEOUT):
                while True:
                    state = await lease.keep(START_TIMEOUT)
                    if state.ready:
                        return
                    if state.oldest == lease.ident:
                        await self._prepare(plan)
                        return
                    await asyncio.sleep(_POLL)
        except TimeoutError as error:
            if isinstance(error, SandboxError):
                raise
            raise SandboxStartError(
                f"The workspace was not prepared within {_PREPARE_TIMEOUT:g} s by the one who "
                "made it"
            ) from error


@contextlib.contextmanager
def _device_refusals(spec: SandboxSpec) -> Iterator[None]:
    """Refuse devices that the engine does not have, which it finds out at the start (B15)."""
    try:
        yield
    except SandboxEngineError as error:
        said = str(error).lower()
        if not spec.devices or not ("device" in said or "cdi" in said):
            raise
        raise SandboxSpecRejectedError(
            "devices",
            list(spec.devices),
            "the engine has no such devices, or no driver for them",
            "Install what gives containers the devices on the engine's machine, or leave them out.",
        ) from error


async def _create_container(
    engine: Engine, name: str, body: Mapping[str, Any]
) -> CreatedContainer | None:
    """Create the container, unless its name is taken; an unheard answer leaves none behind."""
    creating = asyncio.ensure_future(engine.create_container(name, body))
    try:
        # Cancelled by itself, the call could end between the engine's doing and its answer.
        return await asyncio.shield(creating)
    except SandboxConflictError:
        return None
    except asyncio.CancelledError as error:
        await _in_any_case(_undo(engine, creating), error)
        raise
    except (SandboxUnavailableError, TimeoutError) as error:
        # The engine may have made it all the same. The name tells which one it is.
        await _in_any_case(_remove_ours(engine, name, body), error)
        raise


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
