"""`SandboxWorkspaces`: persistent workspaces from Python, from any event loop (B6, F4).

What is done here is to hop, and to carry archives to and from files of this machine; the work is
that of `workspaces`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, NoReturn, TypeVar

from sandbox_kernel.config import EngineSettings, survey
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxDiskFullError,
    SandboxError,
    SandboxSpecRejectedError,
)
from sandbox_kernel.process.files import FileEntry, Transfer, TransferLimits
from sandbox_kernel.sandbox.order import judge_helper
from sandbox_kernel.sandbox.owner import current_owner
from sandbox_kernel.sandbox.place import at_engine, engine_place
from sandbox_kernel.sandbox.workspaces import WorkspaceInfo, Workspaces, WorkspaceSize

__all__ = ["SandboxWorkspaces"]

T = TypeVar("T")

_PIECE: Final = 1 << 20


class SandboxWorkspaces:
    r"""The persistent workspaces of one owner, while no sandbox of one's own runs.

    Whatever has to look into one does so in a short sandbox without a network, as the user that
    code runs as, and that does not count among the sandboxes that an owner may have.

    Parameters
    ----------
    engine, owner
        As for `Sandbox.create`.
    image
        The image to look into workspaces with; by default the one that each was made with.

    Examples
    --------
    >>> spec = SandboxSpec(durability="persistent", workspace="docs/workspaces")
    >>> async with Sandbox.create(spec) as sandbox:
    ...     (await sandbox.shell("echo kept > file")).returncode
    0
    >>> workspaces = SandboxWorkspaces()
    >>> [info.workspace.key for info in await workspaces.list()]
    ['docs/workspaces']
    >>> await workspaces.read("docs/workspaces", "file")
    b'kept\n'
    >>> await workspaces.remove("docs/workspaces")
    """

    def __init__(
        self,
        *,
        engine: str | EngineSettings | Engine | None = None,
        owner: str | None = None,
        image: str | None = None,
    ) -> None:
        self._engine = engine
        self._owner = owner
        self._image = image

    async def list(self) -> list[WorkspaceInfo]:
        """List them by key, each with who uses it."""
        return await self._do(lambda workspaces: workspaces.list())

    async def find(self, key: str) -> WorkspaceInfo:
        """Return one of them, with who uses it.

        Raises
        ------
        SandboxFileNotFoundError
            There is none with this key.
        """
        return await self._do(lambda workspaces: workspaces.find(key))

    async def size(self, key: str) -> WorkspaceSize:
        """Measure one of them.

        Raises
        ------
        SandboxFileNotFoundError
            There is none with this key.
        """
        return await self._do(lambda workspaces: workspaces.size(key))

    async def remove(self, key: str) -> None:
        """Remove one with all that is in it, unless it is in use; never by force.

        Raises
        ------
        SandboxFileNotFoundError
            There is none with this key.
        SandboxConflictError
            It is in use, and by whom.
        """
        await self._do(lambda workspaces: workspaces.remove(key))

    async def clone(self, key: str, to: str, *, disk_limit: int | None = None) -> WorkspaceSize:
        """Copy one to a new workspace, or to one with nothing in it.

        Raises
        ------
        SandboxFileNotFoundError
            There is nothing to copy.
        SandboxConflictError
            The other one is in use, or there is something in it.
        """
        return await self._do(lambda workspaces: workspaces.clone(key, to, disk_limit=disk_limit))

    async def export(
        self,
        key: str,
        target: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        limit: int | None = None,
    ) -> int:
        """Write one as a tar archive to a file of this machine, whole or not at all.

        The archive is as hostile as the code that made the files: unpack it in a sandbox, or with
        care.

        Parameters
        ----------
        key
            Which.
        target
            The file.
        overwrite
            Whether a file that is there may be replaced.
        limit
            Bytes after which it is given up; a file with holes is as large as it claims.

        Returns
        -------
        int
            Bytes of the archive.

        Raises
        ------
        SandboxFileNotFoundError
            There is none with this key.
        SandboxConflictError
            The file is there.
        SandboxSpecRejectedError
            It is larger than the limit, or the file cannot be written.
        """
        path = Path(target)

        async def write(workspaces: Workspaces) -> int:
            await asyncio.to_thread(_check_target, path, overwrite)
            aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
            size = 0
            try:
                with _file(aside, path, "xb") as file:
                    async with workspaces.export(key, limit=limit) as pieces:
                        async for piece in pieces:
                            with _explained(path):
                                await asyncio.to_thread(file.write, piece)
                            size += len(piece)
                    with _explained(path):
                        await asyncio.to_thread(file.close)
                with _explained(path):
                    await asyncio.to_thread(_give_name, aside, path, overwrite)
            finally:
                with contextlib.suppress(OSError):
                    aside.unlink()
            return size

        return await self._do(write)

    async def import_(
        self,
        key: str,
        source: str | os.PathLike[str],
        *,
        image: str | None = None,
        disk_limit: int | None = None,
    ) -> WorkspaceSize:
        """Fill a new workspace, or one with nothing in it, from a tar archive of this machine.

        It is unpacked in a sandbox, so that a hostile archive can do no more than code can.

        Parameters
        ----------
        key
            Which.
        source
            The archive, not compressed.
        image
            The image of the new workspace.
        disk_limit
            Bytes that a new workspace may hold.

        Raises
        ------
        SandboxConflictError
            It is in use, or there is something in it.
        SandboxDiskFullError
            There is no room.
        """
        path = Path(source)

        async def fill(workspaces: Workspaces) -> WorkspaceSize:
            with _file(path, path, "rb") as file:

                async def pieces() -> AsyncIterator[bytes]:
                    while True:
                        with _explained(path):
                            piece = await asyncio.to_thread(file.read, _PIECE)
                        if not piece:
                            return
                        yield piece

                return await workspaces.import_(key, pieces(), image=image, disk_limit=disk_limit)

        return await self._do(fill)

    async def files(
        self, key: str, path: str | PurePosixPath = "", *, recursive: bool = False
    ) -> tuple[FileEntry, ...]:
        """List what is in a folder of one; the image needs python3.

        Raises
        ------
        SandboxFileNotFoundError
            There is no workspace with this key, or nothing at this path.
        """

        async def look(workspaces: Workspaces) -> tuple[FileEntry, ...]:
            async with workspaces.files(key) as files:
                return await files.list(path, recursive=recursive)

        return await self._do(look)

    async def get(
        self,
        key: str,
        source: str | PurePosixPath,
        target: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        limits: TransferLimits | None = None,
    ) -> Transfer:
        """Get a file or a folder of one, as `SandboxFiles.get` does.

        Raises
        ------
        SandboxFileNotFoundError
            There is no workspace with this key, or nothing at this path.
        """

        async def fetch(workspaces: Workspaces) -> Transfer:
            async with workspaces.files(key) as files:
                return await files.get(source, target, overwrite=overwrite, limits=limits)

        return await self._do(fetch)

    async def read(self, key: str, path: str | PurePosixPath) -> bytes:
        """Return what is in a file of one.

        Raises
        ------
        SandboxFileNotFoundError
            There is no workspace with this key, or no such file.
        """

        async def look(workspaces: Workspaces) -> bytes:
            async with workspaces.files(key) as files:
                return await files.read(path)

        return await self._do(look)

    async def _do(self, work: Callable[[Workspaces], Coroutine[Any, Any, T]]) -> T:
        place = engine_place(self._engine)
        prefix = survey(door="python").settings["prefix"].value
        owner = current_owner() if self._owner is None else self._owner

        def do(engine: Engine) -> Awaitable[T]:
            return work(
                Workspaces(engine, owner, prefix=prefix, image=self._image, judge=judge_helper)
            )

        return await at_engine(place, do)


def _check_target(path: Path, overwrite: bool) -> None:
    """Refuse a place where no file can be written, before anything is read."""
    if path.is_dir():
        _refuse(path, "this is a folder")
    if not overwrite and os.path.lexists(path):
        raise SandboxConflictError(f"{path} is there already; say overwrite=True")


def _give_name(aside: Path, path: Path, overwrite: bool) -> None:
    """Give a file that is whole its name; one that has appeared there meanwhile is kept, too."""
    if not overwrite:
        try:
            os.link(aside, path)
        except FileExistsError as error:
            raise SandboxConflictError(f"{path} is there already; say overwrite=True") from error
        except (OSError, NotImplementedError):
            pass  # not every file system knows hard links
        else:
            return
    aside.replace(path)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Say in our words what is wrong with a file of this machine."""
    try:
        yield
    except OSError as error:
        if isinstance(error, SandboxError):
            raise
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise SandboxDiskFullError(f"There is no room for {path} on this machine") from error
        _refuse(path, error.strerror or str(error), error)


def _refuse(path: Path, why: str, cause: OSError | None = None) -> NoReturn:
    raise SandboxSpecRejectedError("archive", str(path), why, "Name another file.") from cause


@contextlib.contextmanager
def _file(path: Path, shown: Path, mode: str) -> Iterator[BinaryIO]:
    """Open a file of this machine; only the owner can read what is written."""

    def private(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600)

    # What is written last can fail at the very end.
    with _explained(shown), open(path, mode, opener=private) as file:
        yield file  # type: ignore[misc]
