"""Folders held open, in which nothing is reached through a link, and work prepared aside.

Both sides use this module: on the host for what a sandbox sends and for the trees that are
sent, in the sandbox for everything. A path is walked part by part from a folder that is held
open, so that it does not matter what anybody puts in the place of a folder meanwhile. Standard
library and Python 3.8, as this module is sent along; where the platform cannot hold folders
open (Windows), paths take their place and links are looked for before each step.
"""

# There is no pathlib for open folders.
# ruff: noqa: PTH112, PTH116, PTH118

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Sequence

from sandbox_kernel.process.files.trouble import (
    EXISTS,
    IS_FOLDER,
    IS_LINK,
    NOT_FOLDER,
    NOT_REGULAR,
    TOO_MANY,
    TroubleError,
    about,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

STAGE_PREFIX = ".sbx-part-"
"""With this begin the names of folders in which something is prepared."""

HAS_OPEN_FOLDERS = os.open in os.supports_dir_fd

_FOLDER_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_FILE_FLAGS = _NOFOLLOW | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
# Opening a FIFO or a device must not wait for anybody.
_READ_FLAGS = os.O_RDONLY | _FILE_FLAGS | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_MOST_NAMES = 2_000_000
_STAGE_TRIES = 10
_ITEM = "item"
_TICK = 0.05
_CLOCK_OF_FILES = 5  # CLOCK_REALTIME_COARSE of Linux, which the module time does not name


class Folder:
    """An open folder; a context manager that closes it.

    Its methods take the names of entries, never paths, and raise `OSError`, or
    `TroubleError` where the entry is not of the kind that was asked for.
    """

    def __init__(self, fd: int | None, path: str) -> None:
        self._fd = fd
        self._path = path

    @classmethod
    def open(cls, path: str, follow: bool, held: bool = HAS_OPEN_FOLDERS) -> Folder:
        """Open a folder by its path; `follow` says whether its last part may be a link."""
        if not held:
            if not os.path.isdir(path):
                raise NotADirectoryError(20, "not a folder", path)
            return cls(None, path)
        return cls(os.open(path, _FOLDER_FLAGS | (0 if follow else _NOFOLLOW)), path)

    def folder(self, name: str) -> Folder:
        """Open a folder in this one."""
        found = self.stat(name)
        if stat.S_ISLNK(found.st_mode):
            raise TroubleError(IS_LINK)
        if not stat.S_ISDIR(found.st_mode):
            raise TroubleError(NOT_FOLDER)
        if self._fd is None:
            return Folder(None, self._at(name))
        return Folder(os.open(name, _FOLDER_FLAGS | _NOFOLLOW, dir_fd=self._fd), self._at(name))

    def names(self, most: int = _MOST_NAMES) -> list[str]:
        """Return the names of all entries, sorted, but for those of work that is prepared."""
        found = []
        with os.scandir(self._path if self._fd is None else self._fd) as entries:
            for entry in entries:
                if not entry.name.startswith(STAGE_PREFIX):
                    found.append(entry.name)
                if len(found) > most:
                    raise TroubleError(TOO_MANY)
        return sorted(found)

    def stages(self) -> list[str]:
        """Return the names of folders in which something is or was prepared."""
        with os.scandir(self._path if self._fd is None else self._fd) as entries:
            return [entry.name for entry in entries if entry.name.startswith(STAGE_PREFIX)]

    def stat(self, name: str) -> os.stat_result:
        """Return what is known of an entry itself."""
        return os.stat(self._at(name), dir_fd=self._fd, follow_symlinks=False)

    def find(self, name: str) -> os.stat_result | None:
        """Return what is known of an entry, or `None` when there is none."""
        try:
            return self.stat(name)
        except FileNotFoundError:
            return None

    def own_stat(self) -> os.stat_result:
        """Return what is known of this folder."""
        return os.stat(self._path) if self._fd is None else os.fstat(self._fd)

    def read_file(self, name: str) -> int:
        """Open a regular file for reading and return its descriptor."""
        _require_regular(self.stat(name))
        fd = os.open(self._at(name), _READ_FLAGS, dir_fd=self._fd)
        try:
            _require_regular(os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def new_file(self, name: str, mode: int) -> int:
        """Create a file that was not there and return its descriptor for writing."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE_FLAGS
        return os.open(self._at(name), flags, mode, dir_fd=self._fd)

    def make_folder(self, name: str, mode: int = 0o755) -> None:
        """Create a folder that was not there."""
        os.mkdir(self._at(name), mode, dir_fd=self._fd)

    def make_link(self, name: str, target: str) -> None:
        """Create a symbolic link."""
        os.symlink(target, self._at(name), dir_fd=self._fd)

    def read_link(self, name: str) -> str:
        """Return the target of a symbolic link."""
        return os.readlink(self._at(name), dir_fd=self._fd)

    def unlink(self, name: str) -> None:
        """Remove an entry that is no folder."""
        os.unlink(self._at(name), dir_fd=self._fd)

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder."""
        os.rmdir(self._at(name), dir_fd=self._fd)

    def move(self, name: str, to: Folder, new: str, overwrite: bool) -> None:
        """Give an entry another place in one step, instead of what may be there.

        Without `overwrite` a file that appears there at the last moment is kept, too.
        """
        if not overwrite and not stat.S_ISDIR(self.stat(name).st_mode):
            try:
                os.link(
                    self._at(name),
                    to._at(new),
                    src_dir_fd=self._fd,
                    dst_dir_fd=to._fd,
                    follow_symlinks=False,
                )
            except FileExistsError:
                raise
            except (OSError, NotImplementedError):
                # Not every file system knows hard links, nor every platform those of links.
                if to.find(new) is not None:
                    raise TroubleError(EXISTS) from None
            else:
                self.unlink(name)
                return
        os.replace(self._at(name), to._at(new), src_dir_fd=self._fd, dst_dir_fd=to._fd)

    def lock(self) -> bool | None:
        """Mark this folder as in use by this process.

        Returns
        -------
        bool or None
            Whether nobody else has; `None` where folders cannot be locked.
        """
        if fcntl is None or self._fd is None:
            return None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True

    def close(self) -> None:
        """Let go of the folder. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _at(self, name: str) -> str:
        return name if self._fd is not None else os.path.join(self._path, name)


def _require_regular(found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise TroubleError(IS_LINK)
    if stat.S_ISDIR(found.st_mode):
        raise TroubleError(IS_FOLDER)
    if not stat.S_ISREG(found.st_mode):
        raise TroubleError(NOT_REGULAR)


def version(found: os.stat_result) -> tuple[int, int, int]:
    """Return what changes with a file's content."""
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def settled(fd: int) -> tuple[os.stat_result, bool]:
    """Return what is known of an open file, and whether it is being changed right now.

    The times of files come from a clock that stands still between two ticks (up to 28 ms,
    measured), so that a change just after another one does not show. A file that was written
    in the current tick gets a moment to become older.
    """
    found = os.fstat(fd)
    if _is_fresh(found):
        time.sleep(_TICK)
        found = os.fstat(fd)
    return found, _is_fresh(found)


def _is_fresh(found: os.stat_result) -> bool:
    try:
        now = time.clock_gettime_ns(_CLOCK_OF_FILES)
    except (AttributeError, OSError):
        now = time.time_ns() - int(_TICK * 1e9)
    return found.st_ctime_ns >= now


class Chain:
    """The folders along a path, kept open for the next path that shares them.

    Closing it closes those below the base, which belongs to the caller.
    """

    def __init__(self, base: Folder) -> None:
        self._base = base
        self._open: list[tuple[str, Folder]] = []

    def at(self, parts: Sequence[str], make: bool = False) -> Folder:
        """Return the folder at a path below the base, making what is missing if asked to.

        Raises
        ------
        TroubleError
            With the path of the part that is not a folder.
        """
        same = 0
        while same < min(len(self._open), len(parts)) and self._open[same][0] == parts[same]:
            same += 1
        self._cut(same)
        for depth in range(same, len(parts)):
            folder = self._open[-1][1] if self._open else self._base
            with about("/".join(parts[: depth + 1])):
                if make and folder.find(parts[depth]) is None:
                    with contextlib.suppress(FileExistsError):
                        folder.make_folder(parts[depth])
                self._open.append((parts[depth], folder.folder(parts[depth])))
        return self._open[-1][1] if self._open else self._base

    def close(self) -> None:
        """Close the folders. Idempotent."""
        self._cut(0)

    def _cut(self, count: int) -> None:
        while len(self._open) > count:
            self._open.pop()[1].close()


class Stage:
    """A private folder in which something is prepared before it is put into place in one go.

    What is prepared is one item: a file, a link, or a folder with all that is in it. It lies
    in the same file system as its later place, so that putting it there copies nothing.
    Whatever a process that was killed has left is removed by the next stage in that folder; a
    lock tells what is still in use.
    """

    def __init__(self, base: Folder) -> None:
        self._base = base
        remove_stale_stages(base)
        for _ in range(_STAGE_TRIES):
            self._name = STAGE_PREFIX + os.urandom(8).hex()
            base.make_folder(self._name, 0o700)
            self._folder = base.folder(self._name)
            # Somebody who tidies up may have taken it in the moment before it was locked.
            if self._folder.lock() is not False and base.find(self._name) is not None:
                break
            self._folder.close()
        else:
            raise TroubleError(EXISTS)
        self._chain = Chain(self._folder)

    def new_file(self, parts: Sequence[str], mode: int) -> int:
        """Create a file of the item, by its path in it, and return its descriptor."""
        return self._parent(parts).new_file(self._leaf(parts), mode)

    def make_folder(self, parts: Sequence[str], mode: int) -> None:
        """Create a folder of the item."""
        self._parent(parts).make_folder(self._leaf(parts), mode)

    def make_link(self, parts: Sequence[str], target: str) -> None:
        """Create a symbolic link of the item."""
        self._parent(parts).make_link(self._leaf(parts), target)

    def _parent(self, parts: Sequence[str]) -> Folder:
        return self._chain.at([_ITEM, *parts][:-1])

    def _leaf(self, parts: Sequence[str]) -> str:
        return parts[-1] if parts else _ITEM

    def place(self, folder: Folder, name: str, overwrite: bool) -> None:
        """Put the item into a folder under a name; a folder that is there is merged with it.

        Every conflict is looked for before anything is moved.

        Raises
        ------
        TroubleError
            With the path of the conflict below the item, which is empty for itself.
        """
        self._chain.close()
        _check(self._folder, _ITEM, folder, name, overwrite, "")
        _move(self._folder, _ITEM, folder, name, overwrite, "")

    def merge(self, folder: Folder, overwrite: bool) -> None:
        """Put what is in the item, which must be a folder, into a folder that is there."""
        self._chain.close()
        with self._folder.folder(_ITEM) as item:
            for step in (_check, _move):
                for name in item.names():
                    step(item, name, folder, name, overwrite, name)

    def remove(self) -> None:
        """Remove the stage with what is still in it. Idempotent; what resists is left."""
        self._chain.close()
        with contextlib.suppress(OSError, TroubleError, RecursionError):
            remove_tree(self._base, self._name)
        self._folder.close()


def _check(source: Folder, name: str, folder: Folder, new: str, overwrite: bool, path: str) -> None:
    with about(path):
        found = folder.find(new)
        if found is None:
            return
        if not stat.S_ISDIR(source.stat(name).st_mode):
            if stat.S_ISDIR(found.st_mode):
                raise TroubleError(IS_FOLDER, path)
            if not overwrite:
                raise TroubleError(EXISTS, path)
            return
        if not stat.S_ISDIR(found.st_mode):
            raise TroubleError(NOT_FOLDER, path)
        _each(_check, source, name, folder, new, overwrite, path)


def _move(source: Folder, name: str, folder: Folder, new: str, overwrite: bool, path: str) -> None:
    with about(path):
        found = folder.find(new)
        if (
            found is not None
            and stat.S_ISDIR(found.st_mode)
            and stat.S_ISDIR(source.stat(name).st_mode)
        ):
            _each(_move, source, name, folder, new, overwrite, path)
        else:
            source.move(name, folder, new, overwrite)


def _each(
    step: Callable[[Folder, str, Folder, str, bool, str], None],
    source: Folder,
    name: str,
    folder: Folder,
    new: str,
    overwrite: bool,
    path: str,
) -> None:
    with source.folder(name) as inner, folder.folder(new) as other:
        for child in inner.names():
            step(inner, child, other, child, overwrite, f"{path}/{child}" if path else child)


def remove_tree(folder: Folder, name: str) -> None:
    """Remove an entry, and if it is a folder all that is in it; links are not followed."""
    if not stat.S_ISDIR(folder.stat(name).st_mode):
        folder.unlink(name)
        return
    with folder.folder(name) as inner:
        for child in inner.names() + inner.stages():
            remove_tree(inner, child)
    folder.remove_folder(name)


def remove_stale_stages(folder: Folder) -> None:
    """Remove the stages in a folder whose processes are gone."""
    for name in folder.stages():
        suppressed = contextlib.suppress(OSError, TroubleError, RecursionError)
        with suppressed, folder.folder(name) as stage:
            if stage.lock() is True:
                remove_tree(folder, name)
