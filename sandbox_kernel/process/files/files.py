"""Files in and out of a sandbox (F1, F2, F3; architecture decision 10): `Files`.

Every operation is one exec of a courier as the user's uid; see `courier.py` for what that
does, `incoming.py` for how its answers are judged and `landing.py` for where they go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxEngineTimeoutError,
    SandboxError,
    SandboxGoneError,
    SandboxSpecRejectedError,
    SandboxUnavailableError,
    SandboxUnknownOutcomeError,
)
from sandbox_kernel.process.files import wire
from sandbox_kernel.process.files.exchange import PATIENCE, WORK_PATIENCE, Exchange
from sandbox_kernel.process.files.failures import Asked
from sandbox_kernel.process.files.incoming import Content, Judge, Listing, Nothing, Receiver, Tally
from sandbox_kernel.process.files.landing import Landing, Memory
from sandbox_kernel.process.files.outgoing import Batches, Bytes, Source, Stream, Tree
from sandbox_kernel.process.files.places import ROOTS, Place, patterns_of, place_of
from sandbox_kernel.process.files.result import (
    FileEntry,
    Progress,
    Skipped,
    Transfer,
    TransferLimits,
)
from sandbox_kernel.process.files.rules import Globs
from sandbox_kernel.process.files.workers import Workers

if TYPE_CHECKING:
    from pathspec import PathSpec

log = logging.getLogger(__name__)

READ_LIMIT = 16 * 1024 * 1024
LIST_LIMIT = 50_000
_WINDOWS = os.name == "nt"
_PROGRESS_INTERVAL = 0.1


class Files:
    """The files of one running sandbox.

    Paths in the sandbox are relative to its workspace, or absolute below one of the roots; a
    path with ``..`` or to anywhere else is refused before anything runs. No link in the
    sandbox is ever followed.

    Where something goes is the name that it gets there; only a target that ends with a slash,
    or is ``.`` or empty, means a folder into which it goes under its own name. A folder that
    is there already is merged with the one that is carried. Everything is whole or not there
    at all: it is carried aside, judged, and put into place in one go.

    Parameters
    ----------
    engine, container_id
        Where; the full id.
    user
        ``uid:gid`` as whom all of it happens.
    workspace
        Where relative paths begin.
    roots
        Where files may be.
    limits
        What a transfer may come to, unless it is told otherwise.
    """

    def __init__(
        self,
        engine: Engine,
        container_id: str,
        *,
        user: str,
        workspace: str = "/workspace",
        roots: Sequence[str] = ROOTS,
        limits: TransferLimits | None = None,
    ) -> None:
        self._engine = engine
        self._container_id = container_id
        self._user = user
        self._workspace = workspace
        self._roots = tuple(roots)
        self._limits = limits or TransferLimits()

    # -- in -----------------------------------------------------------------------------------

    async def put(
        self,
        source: str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO,
        target: str | PurePosixPath = "",
        *,
        overwrite: bool = True,
        ignore: PathSpec[Any] | None = None,
        limits: TransferLimits | None = None,
        progress: Progress | None = None,
    ) -> Transfer:
        r"""Put a file or a folder of this machine, or bytes, into the sandbox.

        What arrives belongs to the user of the code and is writable by it alone. Symbolic
        links in a folder are carried as links if they stay inside of it.

        Parameters
        ----------
        source
            A path of this machine, the bytes of a file, or a binary file object, which is
            read to its end.
        target
            Where it goes; folders above it are made.
        overwrite
            Whether files that are there may be replaced.
        ignore
            What to leave out of a folder: its ``match_file`` is asked for each path relative
            to the folder, and for folders with a slash at the end.
        limits
            What it may come to; looked at before anything is sent, where that can be known.
        progress
            Told how far it is.

        Raises
        ------
        SandboxSpecRejectedError
            A path, a link in the source, or the size cannot be honoured; nothing was put.
        SandboxConflictError
            Something is there and may not be overwritten; nothing was put.
        SandboxDiskFullError
            There is no room in the sandbox; nothing was put.
        SandboxUnknownOutcomeError
            The connection broke while everything was put into place.
        SandboxImageUnsuitableError
            The image has no python3 of version 3.8 or later.

        Examples
        --------
        >>> await files.put("data", "inputs/data")  # doctest: +SKIP
        >>> await files.put(b"x,y\n1,2\n", "inputs/points.csv")  # doctest: +SKIP
        """
        began = time.monotonic()
        limits = limits or self._limits
        place = self._place(target, "target")
        shown = ""
        if isinstance(source, str | os.PathLike):
            shown = os.fspath(source)
            place = _named(place, shown)
        elif place.into:
            raise SandboxSpecRejectedError(
                "target", str(target), "it is a folder, and bytes have no name", "Add a name."
            )
        asked = Asked("target", place.path, limits, "source", shown)
        with Workers() as workers, asked.answered():
            made = await workers.do(_source_of, source, limits, ignore)
            if not place.parts and not (isinstance(made, Tree) and made.is_folder):
                raise SandboxSpecRejectedError(
                    "target", place.path, "a file cannot take its place", "Add a name."
                )
            batches = Batches(made)
            tally = made.tally
            try:
                await self._serve(
                    {"do": "take", **_where(place), "overwrite": overwrite},
                    Nothing(lambda: (tally.entries, tally.size)),
                    workers,
                    limits,
                    batches,
                    Report(progress, lambda: (tally.size, made.total)),
                    WORK_PATIENCE,
                )
            finally:
                # A reader that did not answer in time was left alone and is still at work.
                with contextlib.suppress(ValueError):
                    batches.close()
        return self._carried(place.path, tally, made.skipped, began)

    # -- out ----------------------------------------------------------------------------------

    async def get(
        self,
        source: str | PurePosixPath,
        target: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        limits: TransferLimits | None = None,
        progress: Progress | None = None,
    ) -> Transfer:
        """Get a file or a folder out of the sandbox, onto the disk of this machine.

        Only regular files and folders come out, none with a set-id bit or writable by others.
        What else is in a folder is left out and named in the result, as are files whose names
        are not safe here. A source that is a link itself is refused.

        Parameters
        ----------
        source
            What to get.
        target
            Where it goes; the folder in which it goes must be there.
        overwrite
            Whether files that are there may be replaced.
        limits, progress
            As in `put`.

        Raises
        ------
        SandboxFileNotFoundError
            There is no such file or folder in the sandbox.
        SandboxSpecRejectedError
            A path or the size cannot be honoured.
        SandboxConflictError
            Something is there and may not be overwritten.
        SandboxDiskFullError
            There is no room on this machine.
        SandboxProtocolError
            What the sandbox sent was not what our program sends.

        Whatever is raised, nothing was written.

        Examples
        --------
        >>> await files.get("plots", "results/")  # doctest: +SKIP
        """
        began = time.monotonic()
        limits = limits or self._limits
        place = self._place(source, "source")
        text = os.fspath(target)
        path = Path(text)
        if text.replace(os.sep, "/").rpartition("/")[2] in {"", ".", ".."}:
            path /= place.path.rpartition("/")[2]
        asked = Asked("source", place.path, limits, "target", str(path))
        landing = Landing(path, overwrite)
        judge = Content(landing, limits, tree=True, windows=_WINDOWS)
        order = {"do": "give", "tree": True}
        with asked.answered():
            skipped = await self._land(order, place, judge, landing, limits, progress)
        return self._carried(str(path), judge.tally, skipped, began)

    async def read(self, source: str | PurePosixPath, *, limit: int = READ_LIMIT) -> bytes:
        """Return the bytes of a small file in the sandbox.

        Parameters
        ----------
        source
            The file.
        limit
            Bytes that it may have.

        Raises
        ------
        SandboxFileNotFoundError
            There is no such file in the sandbox.
        SandboxSpecRejectedError
            It is no regular file, or a larger one.
        SandboxConflictError
            It changed while it was read.
        """
        place = self._place(source, "source")
        limits = TransferLimits(1, limit, limit, self._limits.seconds)
        memory = Memory()
        judge = Content(memory, limits, tree=False, windows=_WINDOWS)
        order = {"do": "give", "tree": False, "windows": _WINDOWS}
        with (
            Workers() as workers,
            Asked("source", place.path, limits, limit_setting="limit").answered(),
        ):
            await self._serve({**order, **_where(place)}, judge, workers, limits)
        if judge.tally.changed:
            raise SandboxConflictError(
                f"{place.path} changed while it was read. Read it again, or use get, which says "
                "so in its result"
            )
        return bytes(memory.content)

    async def collect(
        self,
        patterns: str | Sequence[str],
        target_folder: str | os.PathLike[str],
        *,
        folder: str | PurePosixPath = "/output",
        overwrite: bool = False,
        limits: TransferLimits | None = None,
        progress: Progress | None = None,
    ) -> Transfer:
        """Get those files of a folder that match patterns: the artifacts of a run (F3).

        Parameters
        ----------
        patterns
            Paths relative to the folder, with ``*``, ``?`` and ``[…]`` within a part and
            ``**`` for any number of folders. Of a folder that matches comes all that is in it.
        target_folder
            The folder of this machine into which they go, by their paths; it is made if it is
            not there, but not those above it.
        folder
            The folder in the sandbox.
        overwrite, limits, progress
            As in `get`.

        Raises
        ------
        SandboxFileNotFoundError
            A path without a wildcard is not there. Patterns may match nothing.

        Everything else is as in `get`.
        """
        began = time.monotonic()
        limits = limits or self._limits
        checked = patterns_of(patterns, "patterns")
        place = self._place(folder, "folder")
        path = Path(target_folder)
        asked = Asked("patterns", place.path, limits, "target_folder", str(path))
        landing = Landing(path, overwrite)
        globs = Globs(checked, whole=True)
        judge = Content(landing, limits, tree=True, windows=_WINDOWS, globs=globs)
        order = {"do": "collect", "patterns": checked}
        with asked.answered():
            skipped = await self._land(order, place, judge, landing, limits, progress)
        return self._carried(str(path), judge.tally, skipped, began)

    async def _land(
        self,
        order: Mapping[str, Any],
        place: Place,
        judge: Content,
        landing: Landing,
        limits: TransferLimits,
        progress: Progress | None,
    ) -> Sequence[Skipped]:
        with Workers() as workers:
            await workers.do(landing.check)
            report = Report(progress, lambda: (judge.tally.size, judge.total))
            whole = {**order, **_where(place), "windows": _WINDOWS}
            try:
                skipped = await self._serve(whole, judge, workers, limits, None, report)
                # The folder in which patterns matched nothing is not worth a folder here.
                if judge.tally.files or judge.tally.folders > 1 or "patterns" not in order:
                    await workers.do(landing.commit)
            finally:
                await workers.do(landing.close)
        return skipped

    # -- looking and tidying ------------------------------------------------------------------

    async def list(
        self,
        path: str | PurePosixPath = "",
        *,
        recursive: bool = False,
        pattern: str = "",
        limit: int = LIST_LIMIT,
    ) -> tuple[FileEntry, ...]:
        """List a folder, or describe one file; sorted by name, each folder before its content.

        Parameters
        ----------
        path
            The folder or file.
        recursive
            Whether to list what is in folders of the folder too.
        pattern
            Which paths to list, relative to the folder and as in `collect`; folders are then
            looked into as far as it asks for.
        limit
            How many entries there may be.

        Raises
        ------
        SandboxFileNotFoundError
            There is no such file or folder in the sandbox.
        SandboxSpecRejectedError
            There are more entries than the limit.
        """
        place = self._place(path, "path")
        if pattern:
            patterns_of([pattern], "pattern")
        limits = TransferLimits(entries=limit, seconds=self._limits.seconds)
        judge = Listing(place.path, limit, _WINDOWS)
        order = {"do": "show", **_where(place), "recursive": recursive, "pattern": pattern}
        with (
            Workers() as workers,
            Asked("path", place.path, limits, limit_setting="limit").answered(),
        ):
            await self._serve(order, judge, workers, limits)
        return tuple(judge.entries)

    async def remove(self, path: str | PurePosixPath, *, recursive: bool = False) -> None:
        """Remove a file, a link or an empty folder; with `recursive` a folder with its content.

        Raises
        ------
        SandboxFileNotFoundError
            There is no such file or folder in the sandbox.
        SandboxSpecRejectedError
            It is a folder that is not empty, may not be removed, or is a root.
        """
        place = self._place(path, "path")
        if not place.parts:
            raise SandboxSpecRejectedError(
                "path", place.path, "it belongs to the sandbox", "Remove what is in it."
            )
        order = {"do": "remove", **_where(place), "recursive": recursive}
        await self._do(order, place, WORK_PATIENCE)

    async def make_directory(self, path: str | PurePosixPath) -> None:
        """Make a folder and those above it; one that is there is left as it is.

        Raises
        ------
        SandboxSpecRejectedError
            Something else is in its place, or it may not be made.
        """
        place = self._place(path, "path")
        await self._do({"do": "make", **_where(place)}, place, PATIENCE)

    async def _do(self, order: Mapping[str, Any], place: Place, patience: float) -> None:
        limits = self._limits
        nothing = Nothing(lambda: (1, 0))
        with Workers() as workers, Asked("path", place.path, limits).answered():
            await self._serve(order, nothing, workers, limits, patience=patience)

    # -- what all have in common --------------------------------------------------------------

    def _place(self, path: str | PurePosixPath, setting: str) -> Place:
        return place_of(path, setting, self._workspace, self._roots)

    async def _serve(
        self,
        order: Mapping[str, Any],
        judge: Judge,
        workers: Workers,
        limits: TransferLimits,
        batches: Batches | None = None,
        report: Report | None = None,
        patience: float = PATIENCE,
    ) -> Sequence[Skipped]:
        """Have a courier carry out an order, and return what it left out."""
        nonce = secrets.token_hex(wire.NONCE_SIZE // 2)
        receiver = Receiver(nonce, judge, limits.entries)
        bounds = {name: getattr(limits, name) for name in ("entries", "file_size", "total_size")}
        whole = {**order, "nonce": nonce, "limits": bounds}
        report = report or Report(None, lambda: (0, None))
        opened = Exchange.open(self._engine, self._container_id, self._user, workers)
        async with await opened as exchange:
            try:
                async with asyncio.timeout(limits.seconds):
                    await exchange.run(whole, receiver, batches, report.now_and_then, patience)
            except (SandboxError, TimeoutError) as error:
                raise _outcome(error, exchange.committed, limits) from error.__cause__
        report.now()
        return receiver.skipped

    def _carried(
        self, path: str, tally: Tally, skipped: Sequence[Skipped], began: float
    ) -> Transfer:
        duration = time.monotonic() - began
        log.debug(
            "sandbox %s: %d files with %d bytes carried in %.0f ms",
            self._container_id[:12],
            tally.files,
            tally.size,
            duration * 1000,
        )
        return Transfer(
            path,
            tally.files,
            tally.folders,
            tally.links,
            tally.size,
            tuple(skipped),
            tuple(tally.changed),
            duration,
        )


class Report:
    """Tells a caller how far a transfer is, not too often.

    Parameters
    ----------
    progress
        Whom to tell, if anybody.
    state
        Gives the bytes carried so far and in all.
    """

    def __init__(
        self, progress: Progress | None, state: Callable[[], tuple[int, int | None]]
    ) -> None:
        self._progress = progress
        self._state = state
        self._told = 0.0

    def now_and_then(self) -> None:
        """Tell, unless that was done a moment ago."""
        if time.monotonic() - self._told >= _PROGRESS_INTERVAL:
            self.now()

    def now(self) -> None:
        """Tell."""
        self._told = time.monotonic()
        if self._progress is not None:
            self._progress(*self._state())


def _source_of(
    source: str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO,
    limits: TransferLimits,
    ignore: PathSpec[Any] | None,
) -> Source:
    if isinstance(source, str | os.PathLike):
        return Tree(Path(source), limits, ignore)
    if isinstance(source, bytes | bytearray | memoryview):
        return Bytes(source, limits)
    if callable(getattr(source, "read", None)):
        return Stream(source, limits)
    raise SandboxSpecRejectedError(
        "source", source, "it is no path, bytes or file object", "Use one of them."
    )


def _named(place: Place, source: str) -> Place:
    """Return where a source of this machine goes."""
    name = Path(os.path.abspath(source)).name  # noqa: PTH100 # pathlib would keep '..'
    return place.below(name) if place.into and name else place


def _where(place: Place) -> dict[str, Any]:
    return {"root": place.root, "parts": list(place.parts)}


def _outcome(error: BaseException, committed: bool, limits: TransferLimits) -> BaseException:
    """Return what an exchange that broke off means to its caller."""
    if not isinstance(error, SandboxError):
        error = SandboxEngineTimeoutError(
            f"The transfer took longer than limits.seconds = {limits.seconds:g}"
        )
    unclear = (SandboxUnavailableError, SandboxGoneError, SandboxEngineTimeoutError)
    if committed and (isinstance(error, unclear) or type(error) is SandboxError):
        unknown = SandboxUnknownOutcomeError(
            "The transfer broke off while the files were put into place: they may be there or "
            "not, each of them whole"
        )
        unknown.__cause__ = error
        return unknown
    return error
