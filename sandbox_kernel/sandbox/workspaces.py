"""Persistent workspaces while no sandbox runs on them: list, size, export, import, clone, remove.

What has to look into a workspace does so in a short sandbox of its own, hardened like any other
and without a network, as the code's uid: nothing of ours ever reads these files on the host or as
root (B6, F4, TEN). `Workspaces` is what callers use.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
)
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from sandbox_kernel.engine.client import Engine, ExecStream
from sandbox_kernel.engine.faults import is_disk_full
from sandbox_kernel.engine.images import image_present
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxDiskFullError,
    SandboxEngineError,
    SandboxEngineTimeoutError,
    SandboxError,
    SandboxFileNotFoundError,
    SandboxImageMissingError,
    SandboxSpecRejectedError,
    SandboxUnavailableError,
    SandboxUnknownOutcomeError,
)
from sandbox_kernel.process.files import Files, printable
from sandbox_kernel.sandbox import labels as names
from sandbox_kernel.sandbox.container import CODE_USER, DATA, WORKSPACE
from sandbox_kernel.sandbox.live import LiveSandbox
from sandbox_kernel.sandbox.programs import workspace_program
from sandbox_kernel.sandbox.spec import MIB, SandboxSpec
from sandbox_kernel.sandbox.workspace import (
    Workspace,
    ensure_workspace,
    verified,
    workspace_name,
    workspace_of,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

_MEMORY: Final = 512 * MIB
_PIDS: Final = 64
_SILENCE: Final = 120.0
"""Seconds without a byte after which an export or an import is given up."""

_ERRORS: Final = 4096
_OCCUPIED, _EMPTY = 0, 1
_MOUNTED: Final = "workspace"


@dataclass(frozen=True, slots=True)
class WorkspaceUser:
    """A container that uses a workspace.

    Parameters
    ----------
    container_id, name
        What the engine calls it.
    owner
        Whose sandbox it is; empty when it is none.
    state
        As the engine tells it.
    """

    container_id: str
    name: str
    owner: str
    state: str

    def __str__(self) -> str:
        """Name it for people."""
        whose = f"of {self.owner!r}" if self.owner else "which is no sandbox"
        return f"the container {self.name} ({self.state}) {whose}"


@dataclass(frozen=True, slots=True)
class WorkspaceInfo:
    """A workspace and who uses it."""

    workspace: Workspace
    users: tuple[WorkspaceUser, ...]


@dataclass(frozen=True, slots=True)
class WorkspaceSize:
    """How large a workspace is.

    Parameters
    ----------
    size
        Bytes that it takes on the engine's disk, in whole KiB.
    entries
        Files, folders and everything else in it.
    """

    size: int
    entries: int


_Users = dict[str, list[WorkspaceUser]]


class Workspaces:
    """The persistent workspaces of one owner on one engine.

    Parameters
    ----------
    engine
        An open engine, in whose loop the methods are called.
    owner
        Whose. Workspaces of others do not exist here.
    prefix
        What their names begin with in this installation.
    image
        The image to look into workspaces with; by default the one that each was made with. It
        needs a shell, and what the task needs: tar, find, du, cp.
    extra_labels
        Labels of the layers above, by their full names, for what is created.
    judge
        Is told each image before it is run, to raise when that may not be.
    """

    def __init__(
        self,
        engine: Engine,
        owner: str,
        *,
        prefix: str = "sbx-",
        image: str | None = None,
        extra_labels: Mapping[str, str] | None = None,
        judge: Callable[[str], None] = lambda image: None,
    ) -> None:
        self._engine = engine
        self._owner = owner
        self._prefix = prefix
        self._image = image
        self._judge = judge
        self._helper = {**(extra_labels or {}), names.HELPER: "workspace"}

    # -- without looking into them --------------------------------------------------------------

    async def list(self) -> list[WorkspaceInfo]:
        """List them, by key."""
        wanted = {names.VERSION: None, names.OWNER: self._owner, names.DURABILITY: "persistent"}
        found = [workspace_of(volume) for volume in await self._engine.list_volumes(wanted)]
        users = await self._users()
        infos = [
            WorkspaceInfo(workspace, tuple(users.get(workspace.name, ())))
            for workspace in found
            if workspace is not None and workspace.name == self._name(workspace.key)
        ]
        return sorted(infos, key=lambda info: info.workspace.key)

    async def find(self, key: str) -> WorkspaceInfo:
        """Return one of them.

        Raises
        ------
        SandboxFileNotFoundError
            There is none with this key.
        SandboxConflictError
            The volume of that name is something else.
        """
        name = self._name(key)
        volume = await self._engine.inspect_volume(name)
        if volume is None:
            raise SandboxFileNotFoundError(f"{self._owner!r} has no workspace {key[:80]!r}")
        workspace = verified(volume, name=name, owner=self._owner, key=key)
        return WorkspaceInfo(workspace, tuple((await self._users()).get(name, ())))

    async def remove(self, key: str) -> None:
        """Remove a workspace with all that is in it, unless it is in use; never by force.

        Raises
        ------
        SandboxFileNotFoundError
            There is none with this key.
        SandboxConflictError
            It is in use, and by whom; or the volume of that name is something else.
        """
        info = await self.find(key)
        self._refuse_use(info, "removed")
        try:
            await self._engine.remove_volume(info.workspace.name)
        except SandboxConflictError as error:
            self._refuse_use(await self.find(key), "removed")
            raise error
        log.info("workspace %s removed", info.workspace.name)

    def _refuse_use(self, info: WorkspaceInfo, what: str) -> None:
        if info.users:
            users = " and ".join(map(str, info.users))
            raise SandboxConflictError(
                f"The workspace {info.workspace.key!r} cannot be {what}: it is in use by {users}. "
                "End that first"
            )

    async def _users(self) -> _Users:
        """Return the containers that use each volume, whoever made them."""
        users: _Users = {}
        for entry in await self._engine.list_containers({}):
            user = WorkspaceUser(
                str(entry["Id"]),
                str((entry.get("Names") or [""])[0]).lstrip("/"),
                str((entry.get("Labels") or {}).get(names.OWNER, "")),
                str(entry.get("State") or ""),
            )
            for mount in entry.get("Mounts") or ():
                users.setdefault(str(mount.get("Name")), []).append(user)
        return users

    def _name(self, key: str) -> str:
        # Checks what can be a key.
        SandboxSpec(durability="persistent", workspace=key, prefix=self._prefix)
        return workspace_name(self._prefix, self._owner, key)

    # -- looking into them ----------------------------------------------------------------------

    async def size(self, key: str) -> WorkspaceSize:
        """Measure a workspace; also while it is in use.

        Raises
        ------
        SandboxFileNotFoundError
            There is none with this key.
        SandboxError
            The sandbox that looks could not be made, or failed.
        """
        async with self._reading(await self.find(key)) as (sandbox, place):
            code, output, errors = await _run(sandbox, "size", place)
        words = output.split()
        if code != 0 or len(words) != 2 or not all(word.isdigit() for word in words):
            raise _failure("measured", code, errors)
        return WorkspaceSize(int(words[0]) * 1024, int(words[1]))

    @contextlib.asynccontextmanager
    async def files(self, key: str) -> AsyncIterator[Files]:
        """Give the files of a workspace for reading, for the length of a block (F4).

        Relative paths begin in the workspace. The image needs python3.

        Raises
        ------
        SandboxFileNotFoundError
            There is none with this key.
        SandboxError
            The sandbox that looks could not be made.
        """
        async with self._reading(await self.find(key)) as (sandbox, place):
            yield Files(self._engine, sandbox.id, user=CODE_USER, workspace=place, roots=(place,))

    @contextlib.asynccontextmanager
    async def export(
        self, key: str, *, limit: int | None = None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Give a workspace as a tar archive, in pieces, for the length of a block.

        The archive is as hostile as the code that made the files: unpack it in a sandbox, or
        with care. Of a workspace in use, each file is as it is when it is read.

        Parameters
        ----------
        key
            Which.
        limit
            Bytes after which it is given up; a file with holes is as large as it claims.

        Raises
        ------
        SandboxFileNotFoundError
            There is none with this key.
        SandboxSpecRejectedError
            It is larger than the limit.
        SandboxUnknownOutcomeError
            The connection broke; what was given is not all of it.
        SandboxError
            The sandbox that reads could not be made, or failed.
        """
        async with self._reading(await self.find(key)) as (sandbox, place):
            nonce = secrets.token_hex(16)
            async with await _start(sandbox, "export", place, nonce) as stream:
                pieces = _archive(stream, nonce.encode(), limit)
                try:
                    yield pieces
                finally:
                    await pieces.aclose()

    async def import_(
        self,
        key: str,
        archive: AsyncIterable[bytes],
        *,
        image: str | None = None,
        disk_limit: int | None = None,
    ) -> WorkspaceSize:
        """Fill a new workspace, or one with nothing in it, from a tar archive.

        It is unpacked in the sandbox, so that a hostile archive can do no more than code can.

        Parameters
        ----------
        key
            Which.
        archive
            The archive, in pieces; not compressed.
        image
            The image of the new workspace; by default the one to look into workspaces with.
        disk_limit
            Bytes that a new workspace may hold.

        Raises
        ------
        SandboxConflictError
            It is in use, or there is something in it.
        SandboxDiskFullError
            There is no room.
        SandboxError
            The archive could not be unpacked. Nothing of it is left.
        """
        return await self._fill(
            key, image, disk_limit, {}, functools.partial(_unpack, archive=archive)
        )

    async def clone(self, key: str, to: str, *, disk_limit: int | None = None) -> WorkspaceSize:
        """Copy a workspace to a new one, or to one with nothing in it.

        Parameters
        ----------
        key
            What to copy; it may be in use, and each file is as it is when it is read.
        to
            The key of the copy.
        disk_limit
            Bytes that the copy may hold.

        Raises
        ------
        SandboxFileNotFoundError
            There is nothing to copy.
        SandboxConflictError
            The other one is in use, or there is something in it.
        SandboxError
            It could not be copied. Nothing of it is left.
        """
        if key == to:
            remedy = "Give the copy a key of its own."
            raise SandboxSpecRejectedError("to", to, "a workspace cannot be its own copy", remedy)
        source = (await self.find(key)).workspace
        sets = {_MOUNTED: source.name}
        return await self._fill(to, source.image or None, disk_limit, sets, _copy)

    async def _fill(
        self,
        key: str,
        image: str | None,
        disk_limit: int | None,
        data_sets: Mapping[str, str],
        fill: Callable[[LiveSandbox], Awaitable[None]],
    ) -> WorkspaceSize:
        image = await self._usable(self._image or image)
        if await self._engine.inspect_volume(self._name(key)) is not None:
            self._refuse_use(await self.find(key), "filled")
        spec = self._spec(
            image,
            durability="persistent",
            workspace=key,
            data_sets=data_sets,
            disk_limit=disk_limit,
        )
        workspace = await self._ensure(key, image, disk_limit)
        try:
            sandbox = await LiveSandbox.create(
                self._engine, spec, owner=self._owner, extra_labels=self._helper, share=False
            )
            try:
                await _refuse_content(sandbox, key)
                try:
                    await fill(sandbox)
                except BaseException:
                    await asyncio.shield(_clear(sandbox))
                    raise
                code, output, errors = await _run(sandbox, "size", WORKSPACE)
            finally:
                await sandbox.destroy()
        except BaseException as error:
            # One that others were quicker to fill is theirs.
            if workspace.is_new and not isinstance(error, SandboxConflictError):
                await asyncio.shield(self._take_back(key))
            raise
        words = output.split()
        if code != 0 or len(words) != 2:
            raise _failure("measured", code, errors)
        return WorkspaceSize(int(words[0]) * 1024, int(words[1]))

    async def _ensure(self, key: str, image: str, disk_limit: int | None) -> Workspace:
        """Make a workspace, unless there is one; cancelled, it leaves none that it made."""
        extra = {n: text for n, text in self._helper.items() if n != names.HELPER}
        making = asyncio.ensure_future(
            ensure_workspace(
                self._engine,
                prefix=self._prefix,
                owner=self._owner,
                key=key,
                image=image,
                disk=disk_limit or 0,
                extra=extra,
            )
        )
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            await asyncio.shield(self._unmake(key, making))
            raise

    async def _unmake(self, key: str, making: asyncio.Future[Workspace]) -> None:
        with contextlib.suppress(SandboxError):
            if (await making).is_new:
                await self._take_back(key)

    async def _take_back(self, key: str) -> None:
        """Remove a workspace that was made in vain; one that is in use by now stays."""
        with contextlib.suppress(SandboxError):
            await self.remove(key)

    @contextlib.asynccontextmanager
    async def _reading(self, info: WorkspaceInfo) -> AsyncIterator[tuple[LiveSandbox, str]]:
        """Make a sandbox that can read a workspace, and say where."""
        workspace = info.workspace
        image = await self._usable(self._image or workspace.image)
        spec = self._spec(image, data_sets={_MOUNTED: workspace.name})
        sandbox = await LiveSandbox.create(
            self._engine, spec, owner=self._owner, extra_labels=self._helper
        )
        try:
            yield sandbox, f"{DATA}/{_MOUNTED}"
        finally:
            await sandbox.destroy()

    def _spec(self, image: str, **settings: Any) -> SandboxSpec:
        return SandboxSpec(
            image=image, prefix=self._prefix, mem_limit=_MEMORY, pids_limit=_PIDS, **settings
        )

    async def _usable(self, image: str | None) -> str:
        image = image or SandboxSpec().image
        self._judge(image)
        if await image_present(self._engine, image) is None:
            raise SandboxImageMissingError(
                f"The image {image!r}, with which the workspace was made, is not on the engine. "
                "Name another one to look into it with; it needs a shell and tar"
            )
        return image


# -- the program in the sandbox -----------------------------------------------------------------


async def _start(sandbox: LiveSandbox, verb: str, place: str, *words: str) -> ExecStream:
    return await sandbox.exec(workspace_program(verb, place, *words), user=CODE_USER)


async def _run(
    sandbox: LiveSandbox, verb: str, place: str, *words: str
) -> tuple[int | None, bytes, bytes]:
    """Run the program to its end; return exit code and the beginning of stdout and stderr."""
    output = {1: bytearray(), 2: bytearray()}
    async with await _start(sandbox, verb, place, *words) as stream:
        await stream.end_input()
        while (chunk := await _next(stream)) is not None:
            if len(output[chunk[0]]) < _ERRORS:
                output[chunk[0]] += chunk[1]
        state = await sandbox.engine.inspect_exec(stream.id)
    return state.exit_code, bytes(output[1]), bytes(output[2])


async def _next(stream: ExecStream) -> tuple[int, bytes] | None:
    chunk = await _bounded(stream.read())
    return None if chunk is None else (chunk.stream, chunk.data)


async def _bounded(work: Coroutine[Any, Any, T]) -> T:
    try:
        async with asyncio.timeout(_SILENCE):
            return await work
    except TimeoutError as error:
        if isinstance(error, SandboxError):
            raise
        raise SandboxEngineTimeoutError(
            f"Nothing moved to or from the workspace for {_SILENCE:g} s"
        ) from error


async def _archive(
    stream: ExecStream, nonce: bytes, limit: int | None
) -> AsyncGenerator[bytes, None]:
    """Give the archive without its trailer, and say when it is not whole."""
    trailer = len(nonce) + 5
    held, errors = bytearray(), bytearray()
    given = 0
    while True:
        chunk = await _next(stream)
        if chunk is None:
            raise SandboxUnknownOutcomeError(
                "The export of the workspace was cut off; what was given is not all of it"
            )
        if chunk[0] == 2:
            errors += chunk[1][: _ERRORS - len(errors)]
            continue
        held += chunk[1]
        whole = held[-trailer:].startswith(nonce + b" ") and held.endswith(b"\n")
        piece, held = bytes(held[:-trailer]), held[-trailer:]
        given += len(piece)
        if limit is not None and given > limit:
            raise SandboxSpecRejectedError(
                "limit", limit, "the workspace's archive is larger", "Use a larger limit."
            )
        if piece:
            yield piece
        if whole:
            break
    code = int(held[-4:-1]) if held[-4:-1].isdigit() else None
    await stream.write(b"\n")
    while (chunk := await _next(stream)) is not None:
        if chunk[0] == 2:
            errors += chunk[1][: _ERRORS - len(errors)]
    if code != 0 and not (code == 1 and _only_changed(bytes(errors))):
        raise _failure("exported", code, bytes(errors))


def _only_changed(errors: bytes) -> bool:
    """Whether files that changed while they were read are all that tar complains of."""
    lines = [line for line in errors.splitlines() if line.strip()]
    return bool(lines) and all(line.endswith(b"changed as we read it") for line in lines)


async def _unpack(sandbox: LiveSandbox, archive: AsyncIterable[bytes]) -> None:
    errors = bytearray()
    async with await _start(sandbox, "import", WORKSPACE) as stream:

        async def listen() -> None:
            while (chunk := await stream.read()) is not None:
                errors.extend(chunk.data[: _ERRORS - len(errors)])

        listening = asyncio.create_task(listen(), name="workspace-import")
        try:
            async for piece in archive:
                # One that has ended says so in its exit code.
                if listening.done():
                    break
                with contextlib.suppress(SandboxUnavailableError):
                    await _bounded(stream.write(piece))
            await stream.end_input()
            await asyncio.wait({listening}, timeout=_SILENCE)
        finally:
            listening.cancel()
            await asyncio.wait({listening})
        state = await sandbox.engine.inspect_exec(stream.id)
    if state.exit_code != 0:
        raise _failure("filled", state.exit_code, bytes(errors))


async def _copy(sandbox: LiveSandbox) -> None:
    code, _, errors = await _run(sandbox, "copy", WORKSPACE, f"{DATA}/{_MOUNTED}")
    if code != 0:
        raise _failure("copied", code, errors)


async def _clear(sandbox: LiveSandbox) -> None:
    with contextlib.suppress(SandboxError):
        await _run(sandbox, "clear", WORKSPACE)


async def _refuse_content(sandbox: LiveSandbox, key: str) -> None:
    code, _, errors = await _run(sandbox, "occupied", WORKSPACE)
    if code == _OCCUPIED:
        raise SandboxConflictError(
            f"The workspace {key!r} has something in it. Use another key, or remove it first"
        )
    if code != _EMPTY:
        raise _failure("looked into", code, errors)


def _failure(what: str, code: int | None, errors: bytes) -> SandboxError:
    said = printable(errors.decode("utf-8", "replace").strip())[-400:]
    if is_disk_full(said):
        return SandboxDiskFullError(f"The workspace could not be {what}: there is no room for it")
    ended = "did not end" if code is None else f"ended with {code}"
    tail = f" and said: {said}" if said else ""
    return SandboxEngineError(f"The workspace could not be {what}: the program {ended}{tail}")
