"""What goes into a sandbox: bytes, a stream, a file or a tree of this machine, as frames.

A tree is looked through before anything is sent, so that what cannot go is refused by name and
a size that is too large is noticed in time. Each file is then opened without following links,
since somebody may have put something else in its place meanwhile. All of it blocks and runs
in a thread of its own.
"""

from __future__ import annotations

import io
import os
import stat
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.process.files import trouble as codes
from sandbox_kernel.process.files import wire
from sandbox_kernel.process.files.folder import Chain, Folder, settled, version
from sandbox_kernel.process.files.incoming import Tally
from sandbox_kernel.process.files.result import Skipped, TransferLimits, printable
from sandbox_kernel.process.files.rules import MAX_PARTS, safe_time
from sandbox_kernel.process.files.trouble import TroubleError, about

if TYPE_CHECKING:
    from pathspec import PathSpec

BATCH = 1 << 20
"""Bytes that are read before they are sent."""

_SMALL = 1 << 16
_PIECE = 1 << 18
_FILE_MODE = 0o644


class Source(Protocol):
    """Something that can be sent.

    Attributes
    ----------
    tally
        What was sent so far.
    skipped
        What is left out.
    """

    tally: Tally
    skipped: list[Skipped]

    @property
    def total(self) -> int | None:
        """How many bytes it will be, where that is known."""

    def frames(self) -> Generator[bytes]:
        """Give the frames of it, once."""


class Batches:
    """Gives the frames of a source in pieces that are worth sending."""

    def __init__(self, source: Source) -> None:
        self._frames = source.frames()

    def next(self) -> list[bytes]:
        """Return the next pieces; there are none when there is no more."""
        pieces: list[bytes] = []
        small: list[bytes] = []
        size = 0
        for frame in self._frames:
            size += len(frame)
            if len(frame) < _SMALL:
                small.append(frame)
            else:
                # Large ones are sent as they are: each copy costs as much as reading them.
                pieces += (b"".join(small), frame) if small else (frame,)
                small = []
            if size >= BATCH:
                break
        if small:
            pieces.append(b"".join(small))
        return pieces

    def close(self) -> None:
        """Close the file that is being read, if any."""
        self._frames.close()


@dataclass
class Bytes:
    """Bytes in memory.

    Parameters
    ----------
    content
        The bytes.
    limits
        What they may come to.
    """

    content: bytes | bytearray | memoryview
    limits: TransferLimits
    tally: Tally = field(default_factory=Tally)
    skipped: list[Skipped] = field(default_factory=list)

    def __post_init__(self) -> None:
        if (self.total or 0) > min(self.limits.file_size, self.limits.total_size):
            raise TroubleError(codes.TOO_LARGE)

    @property
    def total(self) -> int | None:
        """How many they are."""
        return memoryview(self.content).nbytes

    def frames(self) -> Generator[bytes]:
        """Give the frames of a file with these bytes."""
        view = memoryview(self.content).cast("B")
        yield _file_entry(_FILE_MODE, len(view), time.time_ns(), "")
        for start in range(0, len(view), _PIECE):
            piece = bytes(view[start : start + _PIECE])
            yield wire.header(wire.DATA, len(piece))
            yield piece
            self.tally.size += len(piece)
        yield wire.encode_end(len(view), False)
        self.tally.files += 1


@dataclass
class Stream:
    """A binary file object, which is read to its end and stays the caller's.

    Parameters
    ----------
    stream
        Anything with a ``read`` that gives bytes.
    limits
        What it may come to.
    """

    stream: BinaryIO
    limits: TransferLimits
    tally: Tally = field(default_factory=Tally)
    total: int | None = None
    skipped: list[Skipped] = field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.stream, io.TextIOBase):
            self._refuse("it gives text", "Open it in binary mode.")

    def frames(self) -> Generator[bytes]:
        """Give the frames of a file with what is read."""
        yield _file_entry(_FILE_MODE, wire.UNKNOWN_SIZE, time.time_ns(), "")
        most = min(self.limits.file_size, self.limits.total_size)
        while data := self.stream.read(_PIECE):
            if not isinstance(data, bytes | bytearray | memoryview):
                self._refuse("it gives something else than bytes", "Open it in binary mode.")
            data = bytes(data)
            self.tally.size += len(data)
            if self.tally.size > most:
                raise TroubleError(codes.TOO_LARGE)
            # A reader may give more than it was asked for.
            for start in range(0, len(data), wire.MAX_DATA):
                yield wire.encode(wire.DATA, data[start : start + wire.MAX_DATA])
        yield wire.encode_end(self.tally.size, False)
        self.tally.files += 1

    def _refuse(self, reason: str, remedy: str) -> None:
        raise SandboxSpecRejectedError("source", self.stream, reason, remedy)


class Tree:
    """A file or a folder of this machine, looked through when it is made.

    Parameters
    ----------
    path
        The caller's path; if it is a link itself, that is followed.
    limits
        What it may come to.
    ignore
        Which files of a folder to leave out; their paths are relative to it, with slashes.

    Raises
    ------
    TroubleError
        It is not there, cannot be read, or is more than the limits allow.
    SandboxSpecRejectedError
        A link in it leads out.
    """

    def __init__(self, path: Path, limits: TransferLimits, ignore: PathSpec[Any] | None) -> None:
        self.tally = Tally()
        self.total: int | None = 0
        self.skipped: list[Skipped] = []
        self._path = path
        self._limits = limits
        self._ignore = ignore
        # Nothing in an ignored folder can come back, unless there are patterns that bring back.
        patterns = getattr(ignore, "patterns", ())
        self._prunes = not any(pattern.include is False for pattern in patterns)
        self._items: list[tuple[str, int]] = []
        self._root = path.resolve()
        with about(str(path)):
            found = self._root.stat()
            if stat.S_ISDIR(found.st_mode):
                with Folder.open(str(self._root), False) as folder:
                    self._items.append(("", wire.FOLDER))
                    self._look(folder, "")
            elif stat.S_ISREG(found.st_mode):
                self._file("", found.st_size)
            else:
                raise TroubleError(codes.NOT_REGULAR)

    def _look(self, folder: Folder, above: str) -> None:
        names = folder.names()
        if names and above.count("/") + 2 > MAX_PARTS:
            raise TroubleError(codes.TOO_DEEP, above)
        for name in names:
            path = f"{above}/{name}" if above else name
            with about(path):
                found = folder.stat(name)
                if stat.S_ISDIR(found.st_mode):
                    self._folder(folder, name, path)
                elif self._ignores(path):
                    continue
                elif stat.S_ISREG(found.st_mode):
                    self._file(path, found.st_size)
                elif stat.S_ISLNK(found.st_mode):
                    self._check_link(path, folder.read_link(name))
                    self._add(path, wire.LINK)
                else:
                    self.skipped.append(Skipped(path, "not-regular"))

    def _folder(self, folder: Folder, name: str, path: str) -> None:
        ignored = self._ignores(path + "/")
        if ignored and self._prunes:
            return
        before = len(self._items)
        if not ignored:
            self._add(path, wire.FOLDER)
        with folder.folder(name) as inner:
            self._look(inner, path)
        if ignored and len(self._items) > before:
            self._items.insert(before, (path, wire.FOLDER))

    def _ignores(self, path: str) -> bool:
        return self._ignore is not None and self._ignore.match_file(path)

    def _file(self, path: str, size: int) -> None:
        total = self.total or 0
        self._check_size(size, total, path)
        self.total = total + size
        self._add(path, wire.FILE)

    def _check_size(self, size: int, before: int, path: str) -> None:
        if size > self._limits.file_size:
            raise TroubleError(codes.TOO_LARGE, path)
        if before + size > self._limits.total_size:
            raise TroubleError(codes.TOO_MUCH, str(self._path))

    def _check_link(self, path: str, target: str) -> None:
        """Refuse a link that does not stay inside, as it is written and as it leads here."""
        # As it is written, without looking: pathlib would not shorten `..`.
        written = Path(os.path.normpath(Path(path).parent / target))
        leads_to = (self._root / path).parent.joinpath(target).resolve()
        outside = written.is_absolute() or written.parts[:1] == ("..",)
        if outside or not leads_to.is_relative_to(self._root):
            raise SandboxSpecRejectedError(
                "source",
                printable(path),
                "it is a symbolic link that leads out of the tree",
                "Replace it by what it leads to, or leave it out with `ignore`.",
            )

    def _add(self, path: str, kind: int) -> None:
        self._items.append((path, kind))
        if len(self._items) > self._limits.entries:
            raise TroubleError(codes.TOO_MANY, str(self._path))

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return self._items[0][1] == wire.FOLDER

    def frames(self) -> Generator[bytes]:
        """Give the frames of all that was found."""
        if not self.is_folder:
            with Folder.open(str(self._root.parent), True) as folder:
                yield from self._file_frames(folder, self._root.name, "")
            return
        with Folder.open(str(self._root), False) as base:
            chain = Chain(base)
            try:
                for path, kind in self._items:
                    yield from self._item_frames(chain, path, kind)
            finally:
                chain.close()

    def _item_frames(self, chain: Chain, path: str, kind: int) -> Generator[bytes]:
        parts = path.split("/") if path else []
        if kind == wire.FILE:
            with about(path):
                folder = chain.at(parts[:-1])
            yield from self._file_frames(folder, parts[-1], path)
            return
        with about(path):
            if kind == wire.FOLDER:
                mode = stat.S_IMODE(chain.at(parts).own_stat().st_mode)
                entry = wire.Entry(wire.FOLDER, mode, 0, 0, _encoded(path))
                self.tally.folders += 1
            else:
                target = chain.at(parts[:-1]).read_link(parts[-1])
                self._check_link(path, target)
                entry = wire.Entry(wire.LINK, 0o777, 0, 0, _encoded(path), _encoded(target))
                self.tally.links += 1
        yield wire.encode_entry(entry)

    def _file_frames(self, folder: Folder, name: str, path: str) -> Generator[bytes]:
        with about(path):
            fd = folder.read_file(name)
        try:
            before, fresh = settled(fd)
            self._check_size(before.st_size, self.tally.size, path)
            mode = stat.S_IMODE(before.st_mode)
            yield _file_entry(mode, before.st_size, before.st_mtime_ns, path)
            sent = 0
            while sent < before.st_size:
                with about(path):
                    pieces = _read_pieces(fd, min(wire.MAX_DATA, before.st_size - sent))
                if not pieces:
                    break
                size = sum(map(len, pieces))
                yield wire.header(wire.DATA, size)
                yield from pieces
                sent += size
                self.tally.size += size
            changed = fresh or sent != before.st_size or version(before) != version(os.fstat(fd))
            yield wire.encode_end(sent, changed)
        finally:
            os.close(fd)
        if changed:
            self.tally.changed.append(path)
        self.tally.files += 1


def _read_pieces(fd: int, most: int) -> list[bytes]:
    """Read so much, or what there is, in pieces that go out as they are, without a copy."""
    pieces = []
    while most and (piece := os.read(fd, min(_PIECE, most))):
        pieces.append(piece)
        most -= len(piece)
    return pieces


def _file_entry(mode: int, size: int, mtime_ns: int, path: str) -> bytes:
    return wire.encode_entry(wire.Entry(wire.FILE, mode, size, safe_time(mtime_ns), _encoded(path)))


def _encoded(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")
